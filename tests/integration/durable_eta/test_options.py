"""Each option of `apply_async` means the same for a durable task as for a task of bare Celery."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import signature

from tests.integration.durable_eta.conftest import Shop

pytestmark = pytest.mark.slow
WAIT_S = 30
#: The delay of bare and durable calls.
SOON = {"countdown": 0.3}
EXPIRES_S = 60
#: It does not take the result of the task to which it is linked.
LINKED = signature("durable.add", (1, 2), immutable=True)
#: Stands for the name of the app's default queue.
DEFAULT_QUEUE = "the default queue"

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "expires in seconds": {"expires": EXPIRES_S},
    "expires at an instant": {"expires": datetime.now(timezone.utc) + timedelta(hours=1)},
    "headers": {"headers": {"tenant": "acme", "size": 7}},
    "time_limit": {"time_limit": 50, "soft_time_limit": 40},
    "priority": {"priority": 3},
    "serializer": {"serializer": "pickle"},
    "msgpack": {"serializer": "msgpack"},
    "yaml": {"serializer": "yaml"},
    "compression": {"compression": "zlib"},
    "compressed pickle": {"serializer": "pickle", "compression": "bzip2"},
    "shadow": {"shadow": "durable.other"},
    "retry_policy": {"retry": True, "retry_policy": {"max_retries": 1}},
    "timeout": {"timeout": 5},
    "confirm_timeout": {"confirm_timeout": 5},
    "link": {"link": LINKED},
    "several links": {"link": [LINKED, LINKED]},
    "link_error": {"link_error": LINKED},
    "delivery_mode": {"delivery_mode": 1},
    "add_to_parent": {"add_to_parent": False},
    "stamps": {"stamped_headers": ["tenant"], "tenant": "acme"},
    "reply_to": {"reply_to": "somewhere"},
    "queue": {"queue": DEFAULT_QUEUE},
    "exchange and routing_key": {"exchange": DEFAULT_QUEUE, "routing_key": DEFAULT_QUEUE},
    "root_id": {"root_id": "r"},
    "group": {"group_id": "g", "group_index": 2},
    "parent_id": {"parent_id": "p"},
    "ignore_result": {"ignore_result": False},
    "retries": {"retries": 2},
    "expiration": {"expiration": 60},
    "message_id": {"message_id": "m"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_task_sees_the_same_request_as_with_bare_celery(
    project: Shop, options: dict[str, Any]
) -> None:
    see = project.task("see")

    name = project.app.conf.task_default_queue
    options = {key: name if value == DEFAULT_QUEUE else value for key, value in options.items()}

    def call(**more: Any) -> Any:
        return see.apply_async((1, "é"), {"name": [None, True]}, **SOON, **options, **more)

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


def test_a_task_that_is_acknowledged_late_runs_again_when_its_process_dies(
    project: Shop, tmp_path: Path
) -> None:
    result = project.task("die_once").apply_async((str(tmp_path / "died"),), **SOON)

    assert result.get(timeout=WAIT_S) == "survived"
    assert [row.key for row in project.rows("die_once")][-1:] == [result.id]


def test_the_rate_limit_of_a_task_holds(project: Shop) -> None:
    results = [project.task("limited").apply_async(**SOON) for _ in range(3)]

    began = sorted(result.get(timeout=WAIT_S) for result in results)
    assert began[-1] - began[0] > 1, "with 1/s, the third begins 2 s after the first"
    assert {result.id for result in results} <= {row.key for row in project.rows("limited")}


def _now() -> datetime:
    return datetime.now(timezone.utc)
