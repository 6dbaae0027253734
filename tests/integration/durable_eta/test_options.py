"""Each option of `apply_async` means the same for a durable task as for a task of bare Celery."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Task, signature, uuid

from tests.doc_pages import ROOT
from tests.integration.durable_eta.conftest import Shop, begin, end
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
WAIT_S = 30
#: The delay of bare and durable calls.
SOON = {"countdown": 0.3}
EXPIRES_S = 60
#: It does not take the result of the task to which it is linked.
LINKED = signature("durable.add", (1, 2), immutable=True)
#: Stands for the name of the app's default queue.
DEFAULT_QUEUE = "the default queue"
#: Stand for values that each call makes: an instant, a new id, and a connection or a producer.
SOON_AT, NEW_ID, OWN = "an instant soon", "a new id", "of the app's broker"

#: Options that are tested one by one.
SINGLE = {
    "eta": SOON_AT, "task_id": NEW_ID, "connection": OWN, "producer": OWN, "publisher": OWN,
    "headers": {"tenant": "acme", "size": 7}, "priority": 3, "serializer": "pickle",
    "compression": "zlib", "shadow": "durable.other", "timeout": 5, "confirm_timeout": 5,
    "link": LINKED, "link_error": LINKED, "delivery_mode": 1, "add_to_parent": False,
    "reply_to": "somewhere", "queue": DEFAULT_QUEUE, "root_id": "r", "parent_id": "p",
    "ignore_result": False, "retries": 2, "expiration": 60, "message_id": "m",
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {name: value} for name, value in SINGLE.items()},
    "none": {},
    "expires in seconds": {"expires": EXPIRES_S},
    "expires at an instant": {"expires": datetime.now(timezone.utc) + timedelta(hours=1)},
    "time_limit": {"time_limit": 50, "soft_time_limit": 40},
    "msgpack": {"serializer": "msgpack"},
    "yaml": {"serializer": "yaml"},
    "compressed pickle": {"serializer": "pickle", "compression": "bzip2"},
    "retry_policy": {"retry": True, "retry_policy": {"max_retries": 1}},
    "several links": {"link": [LINKED, LINKED]},
    "stamps": {"stamped_headers": ["tenant"], "tenant": "acme"},
    "exchange and routing_key": {"exchange": DEFAULT_QUEUE, "routing_key": DEFAULT_QUEUE},
    "group": {"group_id": "g", "group_index": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_task_sees_the_request_of_bare_celery(project: Shop, options: dict[str, Any]) -> None:
    see = project.task("see")

    def call(**more: Any) -> Any:
        with made(project.app, options) as own:
            result = see.apply_async((1, "é"), {"name": [None, True]}, **own, **more)
            assert result.id == own.get("task_id", result.id)
            return result

    times = [_now()]
    bare = call(durable_eta=False)
    times.append(_now())
    durable = call()
    times.append(_now())

    expected, seen = bare.get(timeout=WAIT_S), durable.get(timeout=WAIT_S)
    if "expires" in options:
        # Celery lets the broker's time limit for the message end at `expires`.
        for facts in (expected, seen):
            assert 0 < int(facts["properties"].pop("expiration")) <= 3_600_000
    if options.get("expires") == EXPIRES_S:
        for facts, first, last in ((expected, *times[:2]), (seen, *times[1:])):
            called = datetime.fromisoformat(facts.pop("expires")) - timedelta(seconds=EXPIRES_S)
            assert first <= called <= last, "they are counted from the call"
    assert seen == expected
    assert [row.key for row in project.rows("see")][-1:] == [durable.id]


@contextmanager
def made(app: Any, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the options of a call that is due soon, with values in place of what stands for them.

    A connection of the app is closed after the call.
    """
    with app.connection_for_write() as connection:
        own = connection if "connection" in options else app.amqp.Producer(connection)
        soon = datetime.now(timezone.utc) + timedelta(seconds=SOON["countdown"])
        values = {SOON_AT: soon, NEW_ID: uuid(), OWN: own}
        values[DEFAULT_QUEUE] = app.conf.task_default_queue
        named = {} if "eta" in options else dict(SOON)
        for key, value in options.items():
            named[key] = values.get(value, value) if isinstance(value, str) else value
        yield named


def test_an_ignored_result_is_not_stored(project: Shop, tmp_path: Path) -> None:
    """The task writes to a file what it sees, since its result is not stored."""
    files = {how: tmp_path / how for how in ("bare", "durable")}
    for how, file in files.items():
        result = project.task("see_in_file").apply_async(
            (str(file),), **SOON, ignore_result=True, durable_eta=how == "durable"
        )
        wait_until(file.exists, WAIT_S, "the file")
        assert result.ignored
        assert project.app.backend.get(project.app.backend.get_key_for_task(result.id)) is None
    expected, seen = (json.loads(file.read_text()) for file in files.values())
    assert expected["ignore_result"] is True
    assert {**seen, "args": None} == {**expected, "args": None}
    assert [row.key for row in project.rows("see_in_file")][-1:] == [result.id]


#: Options of all calls.
IN_EACH_CALL = {"args", "kwargs", "countdown"}


@pytest.mark.quick
def test_each_option_of_the_documentation_is_called() -> None:
    called = {name for options in OPTIONS.values() for name in options} | IN_EACH_CALL
    documented = re.findall(r"^ +(\w+) \(.+?\): ", Task.apply_async.__doc__ or "", re.MULTILINE)
    page = (ROOT / "docs" / "durable-eta.md").read_text()
    table = page.partition("| option of `apply_async` |")[2].partition("\n\n")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)))
    assert len(documented) > 20
    assert len(listed) > 30
    assert not {*documented, *listed} - called


def _now() -> datetime:
    return datetime.now(timezone.utc)


# -- result backends and queues of RabbitMQ that work differently ---------------------------------

QUORUM = {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"}


@pytest.mark.parametrize("conf", [{"result_backend": "rpc://"}, QUORUM], ids=["rpc", "quorum"])
def test_a_durable_task_runs_and_has_a_result(
    tmp_path: Path, postgresql_url: str, rabbitmq_url: str, redis_url: str, conf: dict[str, object]
) -> None:
    project = begin(tmp_path, postgresql_url, rabbitmq_url, redis_url, **conf)
    try:
        project.start_worker()
        result = project.task("add").apply_async((1, 2), countdown=0.5)
        assert result.get(timeout=30) == 3
        assert [row.key for row in project.rows("add")] == [result.id]
    finally:
        end(project)
