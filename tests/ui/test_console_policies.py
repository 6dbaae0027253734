"""The form of limits in the console."""

from __future__ import annotations

import html
import re
from typing import Any

from delaytasks.console.viewers import Role
from tests.ui.console_site import Site


def form_of(text: str) -> dict[str, str]:
    """Return what a browser sends if a viewer changes nothing in the form of limits."""
    [form] = re.findall(r'<form method="post" action="/policies/limits" .*?</form>', text, re.S)
    fields: dict[str, str] = {}
    for field in re.findall(r"<input[^>]*>", form):
        [name] = re.findall(r' name="(\w+)"', field)
        fields[name] = html.unescape(next(iter(re.findall(r' value="([^"]*)"', field)), ""))
    return fields


def limits(site: Site, tag: str) -> Any:
    [policy] = site.delays.policies(tag=tag)
    return policy.concurrency, policy.key_concurrency, policy.rate_text


def test_one_limit_is_raised_and_the_others_stay(own_site: Site) -> None:
    client = own_site.client(Role.ADMIN)
    [link] = re.findall(r'href="(/policies\?tag=[^"]*)"', client.get("/policies").text)
    assert link == "/policies?tag=pay.notify#edit", "mail.send is paused and has no limits"
    fields = form_of(client.get(link).text)
    client.post("/policies/limits", data=fields)
    assert limits(own_site, "pay.notify") == (10, None, "100/s")
    client.post("/policies/limits", data={**fields, "concurrency": "20"})
    assert limits(own_site, "pay.notify") == (20, None, "100/s")
    client.post("/policies/limits", data={**fields, "rate": ""})
    assert limits(own_site, "pay.notify") == (10, None, None), "an empty field has no limit"


def test_new_limits_replace_no_others(own_site: Site) -> None:
    client = own_site.client(Role.ADMIN)
    new = form_of(client.get("/policies").text)
    assert new["name"] == ""
    client.post("/policies/limits", data={**new, "name": "pay.notify", "key_concurrency": "1"})
    assert "the tag pay.notify has limits already" in client.get("/policies").text
    assert limits(own_site, "pay.notify") == (10, None, "100/s")
    client.post("/policies/limits", data={**new, "name": "mail.send", "key_concurrency": "1"})
    assert limits(own_site, "mail.send") == (None, 1, None)


def test_the_form_of_limits_is_for_administrators(site: Site) -> None:
    assert "/policies?tag=" not in site.client(Role.OPERATE).get("/policies").text
    gone = site.client(Role.ADMIN).get("/policies?tag=gone").text
    assert form_of(gone)["name"] == ""
