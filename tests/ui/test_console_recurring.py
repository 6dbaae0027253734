"""The form of recurring schedules in the console."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest

from delaytasks.console.viewers import Role
from delaytasks.recurring.definition import DEFINED
from delaytasks.recurring.recurring import follow
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, post


def test_recurring_schedules_are_set_paused_and_removed(own_site: Site) -> None:
    client, recurring = own_site.client(Role.ADMIN), own_site.delays.recurring
    fields = {"name": "hourly", "tag": "order.close", "cron": "0 * * * *", "body": '{"order": 1}'}
    post(client, "/do/recurring-set", **fields)
    assert recurring.get("hourly").body == {"order": 1}
    post(client, "/do/pause", recurring="hourly")
    assert recurring.get("hourly").is_paused
    post(client, "/do/recurring-remove", name="hourly")
    assert "hourly" not in {each.name for each in recurring.list()}
    post(client, "/do/recurring-set", **{**fields, "body": "{"})
    assert "not JSON" in html.unescape(client.get("/recurring").text)
    assert client.get("/recurring?after=%00").status_code == 400


def form_of(text: str, action: str = "/do/recurring-set") -> dict[str, str]:
    """Return what a browser sends if a viewer changes nothing in the form of this action."""
    [form] = re.findall(
        rf'<form method="post" action="{action}" class="fields".*?</form>', text, re.DOTALL
    )
    fields: dict[str, str] = {}
    for field in re.findall(r"<input[^>]*>", form):
        [name] = re.findall(r' name="(\w+)"', field)
        [fields[name], *_] = re.findall(r' value="([^"]*)"|$', field)
    for name, options in re.findall(r'<select name="(\w+)">(.*?)</select>', form):
        [fields[name], *_] = re.findall(r"<option selected>(\w+)|$", options)
    fields |= re.findall(r'<textarea name="(\w+)"[^>]*>(.*?)</textarea>', form, re.DOTALL)
    return {name: html.unescape(value) for name, value in fields.items()}


@pytest.mark.parametrize("timing", [{"cron": "0 3 * * *", "tz": "Asia/Tokyo"}, {"every": "5m"}])
def test_a_schedule_is_changed_in_one_field_only(own_site: Site, timing: dict[str, Any]) -> None:
    client, recurring = own_site.client(Role.ADMIN), own_site.delays.recurring
    rules = {"jitter": "10s", "missed": "all", "overlap": "skip"}
    options = {"queue": "mail", "priority": 3, "retries": "15s 3m", "max_late": 60}
    options |= {"limit_key": "k", "meta": {"tenant": "acme"}, "body_version": 3}
    body = {"order": 1, "text": "</textarea>é"}
    recurring.set("nightly", "order.close", body, **timing, **rules, **options)  # type: ignore[arg-type]
    stored = recurring.get("nightly")
    fields = form_of(client.get("/recurring?name=nightly").text)
    client.post("/do/recurring-set", data=fields)
    assert recurring.get("nightly") == stored
    client.post("/do/recurring-set", data={**fields, "queue": "reports"})
    changed = recurring.get("nightly")
    assert changed.queue == "reports"
    for name in set(DEFINED) - {"queue"}:
        assert getattr(changed, name) == getattr(stored, name), name
    client.post("/do/recurring-set", data={**fields, "body": " ", "overlap": "allow"})
    assert (recurring.get("nightly").body, recurring.get("nightly").overlap) == (body, "allow")
    client.post("/do/recurring-set", data={**fields, "body": '{"order": 2}', "retries": ""})
    changed = recurring.get("nightly")
    assert changed.body == {"order": 2}
    assert json.loads(changed.headers_json or "").keys() == {"max_late_s", "body_version"}


def test_the_form_is_for_schedules_that_can_change_and_replaces_no_other(own_site: Site) -> None:
    client, recurring = own_site.client(Role.ADMIN), own_site.delays.recurring
    fields = form_of(client.get("/recurring").text)
    fields |= {"name": "feeds", "tag": "report.build", "cron": "0 4 * * *"}
    client.post("/do/recurring-set", data=fields)
    assert "there is a schedule feeds already" in client.get("/recurring").text
    assert recurring.get("feeds").tag == "feed.read"

    @own_site.delays.recurring("0 9 * * *", name="declared")
    @own_site.delays.processor("declared.report")
    def report(body: Any) -> None: ...

    follow(runtime_of(own_site.delays))
    text = own_site.client(Role.ADMIN).get("/recurring").text
    assert "<code>every 5m</code>" in text
    assert re.findall(r'href="/recurring\?name=([\w-]+)#edit"', text) == ["feeds", "report-nightly"]
    assert "name=feeds#edit" not in own_site.client(Role.OPERATE).get("/recurring").text
    assert form_of(own_site.client(Role.ADMIN).get("/recurring?name=gone").text)["name"] == ""


# -- The form of limits in the console ------------------------------------------------------------


LIMITS = "/do/limit"


def limits(site: Site, tag: str) -> Any:
    [policy] = site.delays.policies.list(tag=tag)
    return policy.concurrency, policy.concurrency_per_key, policy.rate_text


def test_administrators_change_limits_one_by_one(own_site: Site) -> None:
    assert "/policies?tag=" not in own_site.client(Role.OPERATE).get("/policies").text
    client = own_site.client(Role.ADMIN)
    assert form_of(client.get("/policies?tag=gone").text, LIMITS)["tag"] == ""
    [link] = re.findall(r'href="(/policies\?tag=[^"]*)"', client.get("/policies").text)
    assert link == "/policies?tag=pay.notify#edit", "mail.send is paused and has no limits"
    fields = form_of(client.get(link).text, LIMITS)
    client.post(LIMITS, data=fields)
    assert limits(own_site, "pay.notify") == (10, None, "100/s")
    client.post(LIMITS, data={**fields, "concurrency": "20"})
    assert limits(own_site, "pay.notify") == (20, None, "100/s")
    client.post(LIMITS, data={**fields, "rate": "none"})
    assert limits(own_site, "pay.notify") == (10, None, None)
    new = form_of(client.get("/policies").text, LIMITS)
    client.post(LIMITS, data={**new, "tag": "pay.notify", "concurrency_per_key": "1"})
    assert limits(own_site, "pay.notify") == (10, 1, None), "those without a value stay"
    client.post(LIMITS, data={**new, "tag": "mail.send"})
    assert "no limit was named" in client.get("/policies").text
