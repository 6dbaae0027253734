"""API keys: the routes that their scopes allow, the limit of requests, and the stored hashes."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from delaytasks import ConfigError
from delaytasks.http_api.api_keys import ApiKey, ApiKeyFile, ApiKeys, new_entry
from delaytasks.http_api.routes import ROUTES, Route, make_api
from delaytasks.operate import serving as probes
from delaytasks.operate.health import HealthChecks
from delaytasks.runtime import runtime_of
from tests.integration.http_api.conftest import ApiCaller, ApiSite, site_on_a_file

#: A valid body of each route that has one.
BODIES: dict[str, dict[str, Any]] = {
    "scheduleTask": {"tag": "mine", "delay": 60},
    "scheduleCallback": {"url": "https://1.1.1.1/paid", "delay": 60},
    "cancelTask": {},
    "rescheduleTask": {"delay": 60},
    "touchTask": {"delay": 60},
    "rerunTask": {},
    "cancelKey": {"tag": "mine", "key": "a"},
    "rescheduleKey": {"tag": "mine", "key": "a", "delay": 60},
    "touchKeys": {"tag": "mine", "keys": ["a"], "delay": 60},
}
BY_NAME = {route.name: route for route in ROUTES}
#: The scopes that allow a route, and those that do not, for a task with the tag "mine": by what
#: the route does, and whether it concerns one tag.
ALLOWED = {
    ("read", False): (["read"], ["operate", "schedule:*"]),
    ("schedule", True): (["schedule:*", "schedule:m*"], ["read", "operate", "schedule:other"]),
    ("read", True): (["read", "schedule:mine"], ["operate", "schedule:other"]),
    ("operate", True): (["operate", "schedule:mine"], ["read", "schedule:other"]),
}


def call(caller: ApiCaller, route: Route, id: int) -> int:
    path = route.path.replace("{id}", str(id))
    return caller(route.method, path, BODIES.get(route.name)).status_code


@pytest.mark.parametrize("name", BY_NAME)
def test_a_route_is_refused_without_its_scope(site: ApiSite, name: str) -> None:
    route = BY_NAME[name]
    assert route.has_body == (name in BODIES)
    allowed, refused = ALLOWED[route.operation.who, route.is_of_tag]
    if name == "scheduleCallback":
        allowed, refused = ["schedule:delaytasks.*"], [*refused, "schedule:*"]
    task = site.delays.schedule_delay("mine", {}, 60, key="a")
    for scope in refused:
        status = call(site.caller(scope), route, task.id)
        is_hidden = "{id}" in route.path and scope.startswith("schedule:")
        assert status == (404 if is_hidden else 403), scope
    for scope in allowed:
        # Tasks that wait cannot be run again.
        assert call(site.caller(scope), route, task.id) == (409 if name == "rerunTask" else 200)


def test_a_key_finds_no_difference_between_hidden_and_missing_tasks(site: ApiSite) -> None:
    task = site.delays.schedule_delay("hidden", {}, 60)
    caller = site.caller("schedule:mine")
    hidden, missing = caller("GET", f"/v1/tasks/{task.id}"), caller("GET", "/v1/tasks/7")
    assert hidden.text.replace(str(task.id), "7") == missing.text


@pytest.mark.parametrize("tag", ["delaytasks.message", "delaytasks.callback", "celery:shop.remind"])
def test_no_key_schedules_tasks_that_send_messages(shop: ApiCaller, tag: str) -> None:
    assert shop("POST", "/v1/tasks", {"tag": tag, "delay": 1}).status_code in (400, 403)


#: What a request presents, with `{}` for the key.
PRESENTED = ["", "Basic {}", "Bearer ", "Bearer dtk_secret", "Bearer {:.40}", "Bearer xyz{}"]


@pytest.mark.parametrize("header", [*PRESENTED, "Bearer dtk_\xe4\xff"])
def test_a_request_without_a_known_key_is_refused(site: ApiSite, header: str) -> None:
    key, _ = site.keys.create("shop", ["read"])
    headers = {"Authorization": header.format(key)} if header else {}
    answer = site.app.test_client().get("/v1/tasks", headers=headers)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert ApiCaller(site.app, key).json("GET", "/v1/tasks")["tasks"] == []


def test_a_removed_key_is_refused_with_the_next_request(site: ApiSite) -> None:
    key, _ = site.keys.create("shop", ["read"])
    caller = ApiCaller(site.app, key)
    assert caller("GET", "/v1/tasks").status_code == 200
    assert ApiKeyFile(site.keys.path).remove("shop")
    assert caller("GET", "/v1/tasks").status_code == 401
    assert not site.keys.remove("shop")


def test_the_file_has_no_key_and_belongs_to_its_owner(tmp_path: Path) -> None:
    file = ApiKeyFile(tmp_path / "data" / "api-keys.json")
    key, entry = file.create("shop", ["schedule:order.*"])
    secret = key.removeprefix("dtk_")
    assert len(secret) >= 40
    assert secret not in file.path.read_text() + str(entry)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="already"):
        file.create("shop", ["read"])


def test_keys_may_be_in_the_configuration(site: ApiSite) -> None:
    key, entry = new_entry(["read"])
    app = make_api(site.delays, ApiKeys({"shop": entry}))
    assert ApiCaller(app, key)("GET", "/v1/tasks").status_code == 200
    with pytest.raises(ConfigError, match="'shop' is incomplete"):
        ApiKeys({"shop": {"scopes": ["read"]}})


@pytest.mark.parametrize("scopes", ["", "schedule:", "schedule", "admin", "read x", "queue:a"])
def test_a_wrong_scope_is_refused(scopes: str) -> None:
    with pytest.raises(ConfigError, match="scope"):
        ApiKey.of("shop", scopes.split())


def test_a_request_names_a_queue_of_the_settings_or_of_the_scopes_of_its_key(
    tmp_path: Path,
) -> None:
    new = {"tag": "mail", "delay": 60}
    with site_on_a_file(tmp_path, queues={"*": "slow"}) as site:
        caller = site.caller("schedule:mail", "queue:eu-*")
        for queue, status in (("slow", 200), ("eu-1", 200), ("default", 403), ("invented", 403)):
            answer = caller("POST", "/v1/tasks", {**new, "queue": queue})
            assert answer.status_code == status, queue
        assert caller.json("POST", "/v1/tasks", new)["queue"] == "slow"


# -- The URLs for probes, which need no key -------------------------------------------------------


def probe(site: ApiSite, name: str) -> tuple[int, dict[str, bool]]:
    answer = site.app.test_client().get(f"/health/{name}")
    document = json.loads(answer.text)
    assert document["is_healthy"] == all(document["checks"].values())
    return answer.status_code, document["checks"]


def test_a_server_is_ready_while_its_database_answers_and_has_tables(
    site: ApiSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "ASK_AGAIN_S", 0.0)
    assert probe(site, "ready") == (200, {"database": True, "tables": True})
    store = runtime_of(site.delays).store
    store.schema.metadata.drop_all(store.database.tx)
    assert probe(site, "ready") == (503, {"database": True, "tables": False})
    site.delays.close()
    (tmp_path / "api.sqlite3").write_text("no database any more")
    assert probe(site, "ready") == (503, {"database": False})
    assert probe(site, "live") == (200, {}), "a restart would not help"


def test_probes_within_a_moment_share_one_check(
    site: ApiSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "ASK_AGAIN_S", 60.0)
    assert probe(site, "ready")[0] == 200
    monkeypatch.setattr(HealthChecks, "ready", None)
    assert probe(site, "ready")[0] == 200
