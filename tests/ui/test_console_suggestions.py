"""The tags and queues that the fields of the console suggest."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import Any

import pytest
from flask.testing import FlaskClient
from sqlalchemy import event

from delaytasks.console import pages_tags
from delaytasks.console.viewers import Role
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.runtime import runtime_of
from tests.ui.console_site import Site, write_runs


def add_worker(site: Site, *tags: str) -> None:
    workers = runtime_of(site.delays).store.workers
    workers.report("celery@shop-3", ["default"], "prefork", 8, 0, tags)


def suggested(client: FlaskClient, path: str, field: str, form: str = "") -> list[str]:
    """Return what a browser suggests for the last field of this name."""
    text: str = client.get(path).text
    found = re.findall(rf'<input name="{field}"[^>]* list="([^"]+)"', text)
    [options] = re.findall(rf'<datalist id="{found[-1]}">(.*?)</datalist>', text)
    return [html.unescape(each) for each in re.findall(r'<option value="([^"]*)">', options)]


@pytest.mark.parametrize("path", ["/tasks", "/recurring"])
def test_tags_of_workers_policies_and_statistics_are_suggested(own_site: Site, path: str) -> None:
    add_worker(own_site, "of.a.worker")
    write_runs(own_site.delays, "of.statistics", timedelta(minutes=2), 1)
    own_site.delays.pause(tag="of.a.policy")
    tags = suggested(own_site.client(Role.ADMIN), path, "tag")
    others = ["mail.send", "order.close", "pay.notify"]
    assert tags == sorted([*others, "of.a.policy", "of.a.worker", "of.statistics"])


def test_the_forms_of_policies_suggest_tags_and_queues(site: Site) -> None:
    operator, admin = site.client(Role.OPERATE), site.client(Role.ADMIN)
    site.client(Role.OPERATE)
    both = ["mail.send", "order.close", "pay.notify", "default", "feeds"]
    assert suggested(operator, "/policies", "name") == both
    site.client(Role.ADMIN)
    assert suggested(admin, "/policies", "name") == both[:3]


def test_the_names_are_bounded_and_those_of_policies_stay(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_tags, "MOST_SUGGESTED", 4)
    for number in range(5):
        own_site.delays.pause(queue=f"queue-{number}")
    add_worker(own_site, *(f"a.worker.{number}" for number in range(5)))
    client = own_site.client(Role.VIEW)
    own_site.delays.pause(tag="paused.tag")
    tags = suggested(client, "/tasks", "tag")
    assert len(tags) == 4
    assert "paused.tag" in tags
    assert len(suggested(client, "/tasks", "queue")) == 4


def test_the_names_are_read_without_the_table_of_tasks(own_site: Site) -> None:
    store, seen = runtime_of(own_site.delays).store, list[str]()
    for engine in (store.database.auto, store.database.tx):
        event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    with own_site.app.test_request_context():
        found = pages_tags.known_names()
        assert found.tags
        assert seen
        assert not [each for each in seen if store.schema.tasks.name in each]
        seen.clear()
        assert pages_tags.known_names() == found
        assert seen == [], "all viewers share them for a minute"


def test_a_page_is_shown_if_the_names_cannot_be_read(
    own_site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreUnavailableError("the database does not answer")

    monkeypatch.setattr(type(runtime_of(own_site.delays).store.policies), "read", fail)
    monkeypatch.setattr(type(own_site.delays.statistics), "series", fail)
    monkeypatch.setattr(type(runtime_of(own_site.delays).store.workers), "registered", fail)
    client = own_site.client(Role.VIEW)
    assert suggested(client, "/tasks", "queue") == ["default"]
    assert suggested(client, "/tasks", "tag") == []
