"""The audit table names who has done, stopped or tried an action in the console."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from delaytasks.console import pages_tasks, requests
from delaytasks.console.requests import EXTENSION, MOST_ACTIVE, BulkRunState, new_run_id
from delaytasks.console.viewers import Role, Viewer
from delaytasks.core.filters import AuditEntry, BulkResult
from delaytasks.operations.bulk_calls import record_action
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, post, token_of
from tests.ui.test_console_access import routes


def newest(site: Site, count: int = 1) -> list[AuditEntry]:
    return site.delays.audit(limit=count)


def refusal(site: Site) -> tuple[str, str, int, dict[str, Any]]:
    """Return the action, the actor, the refused count and the fields of the newest entry."""
    [entry] = newest(site)
    assert (entry.state, entry.changed) == ("failed", 0)
    return entry.action, entry.actor, entry.refused, entry.filter


def test_an_action_that_the_role_does_not_allow_is_audited(own_site: Site) -> None:
    answer = post(own_site.client(Role.VIEW), "/tasks/123/cancel", version="7", next="/tasks/123")
    assert answer.status_code == 403
    assert refusal(own_site) == ("cancel_task", "maria", 1, {"id": "123"})
    fields = {"kind": "tag", "name": "pay.notify", "concurrency": "3"}
    assert post(own_site.client(Role.OPERATE), "/policies/limits", **fields).status_code == 403
    assert refusal(own_site) == ("set_limits", "maria", 1, fields)


@pytest.mark.parametrize("forged", [{"token": "wrong"}, {"headers": {"Origin": "http://evil"}}])
def test_a_forged_form_is_audited(own_site: Site, forged: dict[str, Any]) -> None:
    client = own_site.client(Role.OPERATE)
    token, fields = token_of(client), {"kind": "tag", "name": "pay.notify"}
    data = {"csrf": forged.get("token", token), **fields}
    answer = client.post("/policies/pause", data=data, headers=forged.get("headers", {}))
    assert answer.status_code == 403
    assert refusal(own_site) == ("pause", "maria", 1, fields)


def test_a_bulk_action_that_does_not_begin_is_audited(own_site: Site) -> None:
    client = own_site.client(Role.OPERATE)
    assert post(client, "/bulk", action="cancel").status_code == 400
    assert refusal(own_site) == ("start_bulk", "maria", 1, {"action": "cancel"})
    begun = [BulkRunState(new_run_id(), "cancel", "bob", {}, 1) for _ in range(MOST_ACTIVE)]

    def work(run: BulkRunState) -> BulkResult:
        run.stop.wait()
        return BulkResult(1, 1, 0, runtime_of(own_site.delays).clock.now())

    runs = own_site.app.extensions[EXTENSION].runs
    for run in begun:
        assert runs.start(run, lambda report, run=run: work(run))
    fields = {"action": "cancel", "tag": "order.close", "status": ["NOT_COMPLETE", "HELD"]}
    assert post(client, "/bulk", **fields).status_code == 400
    for run in begun:
        run.stop.set()
    shown = {**fields, "status": "NOT_COMPLETE, HELD"}
    assert refusal(own_site) == ("start_bulk", "maria", 1, shown)


def test_the_audit_names_the_user_that_stops_the_run_of_another_user(own_site: Site) -> None:
    page = own_site.begun_run("order.close")
    client = own_site.client(Role.OPERATE)
    own_site.viewer = Viewer("ann", Role.OPERATE)
    assert post(client, f"{page}/stop").status_code == 303
    [entry] = newest(own_site)
    assert (entry.action, entry.actor, entry.state) == ("stop_bulk", "ann", "done")
    assert (entry.filter["action"], entry.filter["started by"]) == ("cancel", "maria")


def test_a_refused_form_is_audited_in_part_only(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = own_site.client(Role.VIEW)
    long = {f"field-{number}": "x" * 5000 for number in range(100)}
    answer = post(client, "/recurring", name="nightly", body="a secret", **long)
    assert answer.status_code == 403
    *_, shown = refusal(own_site)
    assert "body" not in shown
    assert "csrf" not in shown
    assert len(shown) == requests.MOST_FIELDS
    assert max(map(len, shown.values())) == requests.MOST_CHARACTERS


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


def test_the_pages_of_the_audit_have_each_entry_once(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_tasks, "AUDIT_ENTRIES", 3)
    client, runtime = own_site.client(), runtime_of(own_site.delays)
    for number in range(8):
        record_action(runtime, "pause", {"tag": f"tag-{number}"}, "maria")
    total, seen, path = len(newest(own_site, 100)), list[str](), "/audit"
    while path:
        text = client.get(path).text
        rows = re.findall("<tr data-row>.*?</tr>", text, re.DOTALL)
        assert 1 <= len(rows) <= 3
        seen += rows
        path = html.unescape(next(iter(re.findall(r'<a rel="next" href="([^"]+)"', text)), ""))
    assert len(seen) == total
    assert [tag for row in seen for tag in re.findall(r"tag-\d", row)] == [
        f"tag-{number}" for number in range(7, -1, -1)
    ]
    assert client.get(f"/audit?before={10**19}").status_code == 200
