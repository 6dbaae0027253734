"""API keys: the routes that their scopes allow, the limit of requests, and the stored hashes."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from delaytasks import ConfigError
from delaytasks.http_api.api_keys import ApiKey, ApiKeyFile, ApiKeys
from delaytasks.operate import serving as probes
from delaytasks.operate.health import HealthChecks
from delaytasks.runtime import runtime_of
from tests.integration.http_api.conftest import ApiCaller, ApiSite, site_on_a_file


def test_a_key_finds_no_difference_between_hidden_and_missing_tasks(site: ApiSite) -> None:
    task = site.delays.schedule_delay("hidden", {}, 60)
    caller = site.caller("schedule:mine")
    hidden, missing = caller("GET", f"/v1/tasks/{task.id}"), caller("GET", "/v1/tasks/7")
    assert hidden.text.replace(str(task.id), "7") == missing.text


@pytest.mark.parametrize("tag", ["delaytasks.message", "delaytasks.callback", "celery:shop.remind"])
def test_no_key_schedules_tasks_that_send_messages(shop: ApiCaller, tag: str) -> None:
    assert shop("POST", "/v1/tasks", {"tag": tag, "delay": 1}).status_code in (400, 403)


def test_a_key_without_the_right_learns_nothing_of_what_a_request_lacks(site: ApiSite) -> None:
    assert site.caller("read")("POST", "/v1/tasks", {"nonsense": 1}).status_code == 403


#: What a request presents, with `{}` for the key.
PRESENTED = ["", "Basic {}", "Bearer ", "Bearer dtk_secret", "Bearer {:.40}", "Bearer xyz{}"]


@pytest.mark.parametrize("header", [*PRESENTED, "Bearer dtk_\xe4\xff"])
def test_a_request_without_a_known_key_is_refused(site: ApiSite, header: str) -> None:
    key, _ = site.keys.create("shop", ["read"])
    headers = {"Authorization": header.format(key)} if header else {}
    answer = site.app.test_client().get("/v1/tasks", headers=headers)
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert ApiCaller(site.app, key).json("GET", "/v1/tasks")["tasks"] == []


def test_the_file_has_hashes_and_a_removed_key_is_refused_from_then_on(site: ApiSite) -> None:
    key, entry = site.keys.create("shop", ["read"])
    secret = key.removeprefix("dtk_")
    assert secret not in site.keys.path.read_text() + str(entry)
    assert stat.S_IMODE(site.keys.path.stat().st_mode) == 0o600
    caller = ApiCaller(site.app, key)
    assert caller("GET", "/v1/tasks").status_code == 200
    assert ApiKeyFile(site.keys.path).remove("shop")
    assert caller("GET", "/v1/tasks").status_code == 401


def test_an_incomplete_entry_and_a_wrong_scope_are_refused() -> None:
    with pytest.raises(ConfigError, match="'shop' is incomplete"):
        ApiKeys({"shop": {"scopes": ["read"]}})
    for scopes in ("", "schedule:", "schedule", "admin", "read x", "queue:a"):
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
    # Probes within a moment share one check.
    monkeypatch.setattr(probes, "ASK_AGAIN_S", 60.0)
    before = probe(site, "ready")
    monkeypatch.setattr(HealthChecks, "ready", None)
    assert probe(site, "ready") == before
