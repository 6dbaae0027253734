"""Roles decide about the pages and the actions of the console."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from werkzeug.routing import Rule

from delaytasks import ConfigError
from delaytasks.console import requests
from delaytasks.console.application import make_console
from delaytasks.console.requests import (
    EXTENSION,
    MOST_ACTIVE,
    SESSION_S,
    LoginLimit,
    Role,
    UserFile,
    Viewer,
    proxy_viewer,
)
from delaytasks.model.clock import monotonic
from delaytasks.model.filters import LogEntry
from delaytasks.runtime import runtime_of
from tests.ui.console_site import SECRET, Site, healthy_site, make_delays, post, token_of
from tests.waiting import wait_until

#: The least role of each page and action. A new route needs a line here.
ROLES = """
    GET view: overview, tasks, task, tags, tag, failures, queues, workers
    GET view: policies, recurring, audit, entry
    GET operate: bulk
    POST view: log_out, preferences
    POST operate: cancel, reschedule, rerun, stop_bulk, pause, resume, recurring run
    POST admin: limit, recurring set, recurring remove
"""
LEAST = {
    (method, endpoint): Role[role.upper()]
    for method, role, names in re.findall(r"(\w+) (\w+): (.*)", ROLES)
    for endpoint in names.split(", ")
}
#: Without a viewer, these answer: they are part of the login page, or for probes.
OPEN = {
    ("GET", "static"), ("GET", "login"), ("POST", "log_in"),
    ("GET", "health_live"), ("GET", "health_ready"),
}  # fmt: skip


def routes(site: Site) -> list[tuple[str, Rule]]:
    return [
        (method, rule)
        for rule in site.app.url_map.iter_rules()
        for method in sorted((rule.methods or set()) & {"GET", "POST", "PUT", "PATCH", "DELETE"})
    ]


def path_of(site: Site, rule: Rule) -> str:
    values: dict[str, Any] = dict.fromkeys(("id", "entry", "name"), "123456789")
    values["filename"] = "console.css"
    with site.app.test_request_context():
        return site.app.url_for(rule.endpoint, **{name: values[name] for name in rule.arguments})


@pytest.mark.parametrize("role", [None, *Role])
def test_each_route_has_a_role_and_is_refused_below_it(own_site: Site, role: Role | None) -> None:
    known = {(method, rule.endpoint) for method, rule in routes(own_site)}
    assert known == LEAST.keys() | OPEN
    for method, rule in routes(own_site):
        if (method, rule.endpoint) in OPEN:
            continue
        client = own_site.client(Role.VIEW)
        token = token_of(client)
        own_site.client(role)
        answer = client.open(path_of(own_site, rule), method=method, data={"csrf": token})
        where = f"{method} {rule.rule} as {role}: {answer.status}"
        if role is None:
            assert answer.status_code == 401, where
        elif role < LEAST[method, rule.endpoint]:
            assert answer.status_code == 403, where
        else:
            assert answer.status_code not in (401, 403, 500), where


@pytest.mark.parametrize("token", [None, "", "wrong"])
def test_each_action_needs_the_token_of_the_session(site: Site, token: str | None) -> None:
    client = site.client()
    token_of(client)
    for method, rule in routes(site):
        if method == "POST":
            data = {} if token is None else {"csrf": token}
            assert client.post(path_of(site, rule), data=data).status_code == 403, rule.rule


def test_a_form_of_another_site_is_refused_even_with_the_token(site: Site) -> None:
    client = site.client()
    data = {"csrf": token_of(client), "theme": "dark"}
    foreign = ["https://evil.example", "http://localhost.evil.example", "http://[", "null"]
    refused = [{"Sec-Fetch-Site": "cross-site"}, *({"Origin": origin} for origin in foreign)]
    for headers in refused:
        assert client.post("/preferences", data=data, headers=headers).status_code == 403
    own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    assert client.post("/preferences", data=data, headers=own).status_code == 303


def test_answers_allow_no_inline_code_and_no_other_host(site: Site) -> None:
    client = site.client()
    for path in ("/", "/tasks", "/nothing", "/static/console.css"):
        with client.get(path) as answer:
            headers = answer.headers
        policy = headers["Content-Security-Policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    pages = "/ /tasks /tags /tag?name=order.close /failures /policies /recurring /queues /workers"
    for path in pages.split():
        text = client.get(path).text
        assert "badge" not in text, "the deployment has no name"
        assert not re.search(r"<[^>]+\s(style|on\w+)=", text), path
        assert not re.search(r"<script(?![^>]* src=)", text), path
        assert not re.search(r'(src|href|action)="(https?:)?//', text), path


def test_each_page_and_question_names_the_deployment(tmp_path: Path) -> None:
    with healthy_site(f"sqlite:///{tmp_path / 'test.sqlite3'}", environment="<b> orange") as site:
        badge = '<span class="badge orange">&lt;b&gt;</span>'
        for path in ("/", "/nothing"):
            text = site.client().get(path).text
            assert "<title>[&lt;b&gt;] " in text
            assert text.count(badge) == 2, "at the top, and in the question before an action"
        login = make_console(site.delays, UserFile(tmp_path / "users.json")).test_client()
        assert badge in login.get("/login").text
    with pytest.raises(ConfigError, match="is a name of at most 24 characters"):
        make_delays("sqlite://", is_new=False, environment="x" * 30)


def test_an_access_rule_refuses_by_false_and_its_errors_have_a_page(site: Site) -> None:
    no_viewer: Any = lambda _: False  # noqa: E731
    console = make_console(site.delays, no_viewer, secret_key="of tests")
    assert console.test_client().get("/").status_code == 401

    def broken(environ: Any) -> Viewer | None:
        raise LookupError("the users of the host cannot be read")

    client = make_console(site.delays, broken, secret_key="of tests").test_client()
    answer = client.get("/tasks")
    assert (answer.status_code, "This page failed" in answer.text) == (500, True)
    assert client.get("/health/ready").status_code == 200, "the host is not asked who probes"
    with client.get("/static/console.css") as style:
        assert style.status_code == 200, "the error page needs its style"


def test_only_operators_see_bodies_and_meta(site: Site) -> None:
    task = site.delays.find(tag="pay.notify", status="FAILED").tasks[0]
    hidden = site.client(Role.VIEW).get(f"/tasks/{task.id}").text
    assert SECRET not in hidden
    assert "acme" not in hidden
    refused = site.client(Role.VIEW).get("/tasks?meta=tenant%3Dacme").text
    assert "cannot search by meta" in refused
    assert "<tr data-row>" not in refused
    shown = site.client(Role.OPERATE).get(f"/tasks/{task.id}").text
    assert SECRET in shown
    assert "tenant=acme" in shown
    for text, copied in ((hidden, {"id", "error"}), (shown, {"id", "error", "body"})):
        assert set(re.findall(r'data-copy="task-(\w+)"', text)) == copied
        for id in re.findall(r'data-copy="([^"]+)"', text):
            assert text.count(f'id="{id}"') == 1
    assert str(2**60 + 1) in shown


# -- the login page -------------------------------------------------------------------------------


@pytest.fixture
def users(tmp_path: Path) -> UserFile:
    made = UserFile(tmp_path / "users.json")
    made.set("ann", "a long password", Role.OPERATE)
    return made


def log_in(client: Any, name: str = "ann", password: str = "a long password", **more: str) -> Any:
    data = {"csrf": token_of(client, "/login"), "name": name, "password": password, **more}
    return client.post("/login", data=data)


def test_a_user_logs_in_and_returns_to_the_page(site: Site, users: UserFile) -> None:
    client = make_console(site.delays, users).test_client()
    answer = client.get("/tasks?status=FAILED")
    assert answer.status_code == 303
    assert answer.location == "/login?next=/tasks?status%3DFAILED"
    answer = log_in(client, next="/tasks?status=FAILED")
    assert (answer.status_code, answer.location) == (303, "/tasks?status=FAILED")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert client.get("/tasks").status_code == 200
    assert post(client, "/logout").status_code == 303
    assert client.get("/tasks").status_code == 303
    answer = client.get("/login", base_url="https://ops.example/")
    assert "Secure" in answer.headers["Set-Cookie"], "behind HTTPS"
    for target in (
        "https://evil.example", "//evil.example", "///evil.example", "/\\evil", "//[", "/\t/evil",
        "javascript:alert(1)",
    ):  # fmt: skip
        assert log_in(client, next=target).location == "/", "a login leads to no other site"


def test_a_log_out_ends_the_session_of_a_copied_cookie(site: Site, users: UserFile) -> None:
    users.set("bob", "a long password", Role.VIEW)
    console = make_console(site.delays, users)
    client, other = console.test_client(), console.test_client()
    copied = log_in(client).headers["Set-Cookie"].partition(";")[0].partition("=")
    log_in(other, "bob")
    thief = make_console(site.delays, UserFile(users.path)).test_client()
    thief.application.secret_key = console.secret_key
    thief.set_cookie(copied[0], copied[2])
    assert thief.get("/tasks").status_code == 200
    assert post(client, "/logout").status_code == 303
    assert thief.get("/tasks").status_code == 303, "another process knows it, too"
    assert other.get("/tasks").status_code == 200, "other users stay"
    log_in(client)
    assert client.get("/tasks").status_code == 200
    assert thief.get("/tasks").status_code == 303


@pytest.mark.parametrize(("name", "password"), [("ann", "wrong"), ("nobody", "a long password")])
def test_wrong_logins_are_limited_by_name_and_address(
    site: Site, users: UserFile, name: str, password: str
) -> None:
    users.set("bob", "a long password", Role.VIEW)
    console = make_console(site.delays, users)
    client = console.test_client()
    for _ in range(requests.MOST_FAILURES):
        assert log_in(client, name, password).status_code == 401
    answer = log_in(client, name, "a long password")
    assert answer.status_code == 429, "the right password is refused too, for a while"
    assert client.get("/tasks").status_code == 303
    assert log_in(console.test_client(), "bob").status_code == 303, "others at the address"
    elsewhere = console.test_client()
    elsewhere.environ_base["REMOTE_ADDR"] = "192.0.2.7"
    assert log_in(elsewhere, name).status_code == (303 if name == "ann" else 401)


def test_an_address_cannot_try_passwords_of_many_names(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = LoginLimit()
    for number in range(requests.MOST_OF_ADDRESS):
        assert limit.wait_s(f"user-{number}", "192.0.2.7") == 0
        limit.failed(f"user-{number}", "192.0.2.7")
        limit.succeeded("ann", "192.0.2.7")
    assert limit.wait_s("ann", "192.0.2.7") > 0
    assert limit.wait_s("ann", "192.0.2.8") == 0
    over = monotonic() + requests.PERIOD_S
    monkeypatch.setattr(requests, "monotonic", lambda: over)
    assert limit.wait_s("ann", "192.0.2.7") == 0


def test_a_session_ends_with_the_user_role_and_password(site: Site, users: UserFile) -> None:
    client, page = make_console(site.delays, users).test_client(), "/bulk?action=cancel&tag=x"
    log_in(client)
    assert client.get(page).status_code == 200
    users.set("ann", "a long password", Role.VIEW)
    assert client.get(page).status_code == 303, "the hash has changed"
    log_in(client)
    assert client.get(page).status_code == 403
    users.remove("ann")
    assert client.get("/").status_code == 303


def test_a_used_session_ends(site: Site, users: UserFile, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_console(site.delays, users).test_client()
    log_in(client)
    start, passed = runtime_of(site.delays).clock.now(), timedelta()
    monkeypatch.setattr(requests, "now", lambda: start + passed)
    while passed < timedelta(seconds=SESSION_S - 3600):
        passed += timedelta(hours=1)
        assert client.get("/tasks").status_code == 200
    passed += timedelta(seconds=3700)
    assert client.get("/tasks").status_code == 303


def test_the_file_has_hashes_only_and_belongs_to_its_owner(users: UserFile) -> None:
    assert "a long password" not in users.path.read_text()
    assert users.path.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="at least 10 characters"):
        users.set("bob", "short", Role.VIEW)


# -- a proxy --------------------------------------------------------------------------------------


def test_the_header_of_a_proxy_counts_only_from_its_address(site: Site) -> None:
    find = proxy_viewer("X-Forwarded-User", ["10.0.0.0/8"], {"ann": Role.ADMIN}.get)
    console = make_console(site.delays, find, secret_key="of tests").test_client()
    named = {"X-Forwarded-User": "ann"}
    trusted, foreign = {"REMOTE_ADDR": "10.1.2.3"}, {"REMOTE_ADDR": "192.0.2.1"}
    answer = console.get("/", headers=named, environ_base=trusted)
    assert (answer.status_code, '<span class="chip">admin</span>' in answer.text) == (200, True)
    assert console.get("/", headers=named, environ_base=foreign).status_code == 401
    assert console.get("/", environ_base=trusted).status_code == 401
    assert console.get("/login", environ_base=trusted).status_code == 401
    assert find({"HTTP_X_FORWARDED_USER": "bob", "REMOTE_ADDR": "10.0.0.1"}) == Viewer(
        "bob", Role.VIEW
    )


# -- The audit table names who has done, stopped or tried an action in the console ----------------


def newest(site: Site, count: int = 1) -> list[LogEntry]:
    return site.delays.bulk.log(limit=count)


def refusal(site: Site) -> tuple[str, dict[str, Any]]:
    """Return the action and the fields of the newest entry, which is a refusal."""
    [entry] = newest(site)
    assert (entry.state, entry.actor, entry.changed, entry.refused) == ("failed", "maria", 0, 1)
    return entry.action, entry.filter


def test_a_form_that_is_refused_is_audited_in_part(own_site: Site) -> None:
    client, fields = own_site.client(Role.OPERATE), {"tag": "pay.notify"}
    token = token_of(client)
    for action, csrf, origin in (("pause", "wrong", {}), ("resume", token, {"Origin": "http://x"})):
        data = {"csrf": csrf, **fields}
        assert client.post(f"/do/{action}", data=data, headers=origin).status_code == 403
        assert refusal(own_site) == (action, fields)
    threads = own_site.app.extensions[EXTENSION].threads
    for _ in range(MOST_ACTIVE):
        threads.acquire()
    answer = post(client, "/do/cancel", tag="order.close", status=["NOT_COMPLETE", "HELD"])
    assert (answer.status_code, "wait until one has ended" in answer.text) == (400, True)
    shown = {"tag": "order.close", "status": "NOT_COMPLETE, HELD"}
    assert refusal(own_site) == ("cancel", shown)
    long = {f"field-{number}": "x" * 5000 for number in range(100)}
    answer = post(client, "/do/recurring-set", name="nightly", body="a secret", **long)
    assert answer.status_code == 403
    _, shown = refusal(own_site)
    assert not {"body", "csrf"} & {*shown}
    assert len(shown) == requests.MOST_FIELDS
    assert max(map(len, shown.values())) == requests.MOST_CHARACTERS


def test_the_audit_names_the_user_that_stops_the_run_of_another_user(own_site: Site) -> None:
    page = own_site.begun_run("order.close")
    client = own_site.client(Role.OPERATE)
    own_site.viewer = Viewer("ann", Role.OPERATE)
    assert post(client, f"{page}/stop").status_code == 303
    [entry] = newest(own_site)
    assert (entry.action, entry.actor, entry.state) == ("stop_bulk", "ann", "done")
    assert entry.filter == {"entry": page.removeprefix("/audit/")}
    wait_until(lambda: ">stopped</span>" in client.get(page).text, 10, "the run to end")


def test_no_viewer_and_no_action_means_no_entry(own_site: Site) -> None:
    [before] = newest(own_site)
    client = own_site.client(Role.VIEW)
    token = token_of(client)
    assert client.post("/preferences", data={"csrf": "wrong"}).status_code == 403
    own_site.client(None)
    for method, rule in routes(own_site):
        if method == "POST" and "<" not in rule.rule:
            client.post(rule.rule, data={"csrf": token})
    assert newest(own_site) == [before]


# -- The addresses of the console for probes, which need no login ---------------------------------


def test_probes_need_no_login_and_get_no_session(site: Site, tmp_path: Path) -> None:
    client = make_console(site.delays, UserFile(tmp_path / "users.json")).test_client()
    for name in ("live", "ready"):
        answer = client.get(f"/health/{name}")
        assert (answer.status_code, json.loads(answer.text)["is_healthy"]) == (200, True)
        assert answer.mimetype == "application/json"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Set-Cookie" not in answer.headers
        assert client.head(f"/health/{name}").status_code == 200
    assert client.get("/").status_code == 303
