"""Each option of `apply_async` means the same for a durable task as for a task of bare Celery."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from tests.integration.durable_eta.conftest import Shop

pytestmark = pytest.mark.slow
WAIT_S = 30
#: The delay of bare and durable calls.
SOON = {"countdown": 0.3}

#: Stands for the name of the app's default queue.
DEFAULT_QUEUE = "the default queue"

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "expires in seconds": {"expires": 60},
    "expires at an instant": {"expires": datetime.now(timezone.utc) + timedelta(hours=1)},
    "headers": {"headers": {"tenant": "acme", "size": 7}},
    "time_limit": {"time_limit": 50, "soft_time_limit": 40},
    "priority": {"priority": 3},
    "serializer": {"serializer": "pickle"},
    "msgpack": {"serializer": "msgpack"},
    "compression": {"compression": "zlib"},
    "compressed pickle": {"serializer": "pickle", "compression": "bzip2"},
    "shadow": {"shadow": "durable.other"},
    "retry_policy": {"retry": True, "retry_policy": {"max_retries": 1}},
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

    bare, durable = call(durable_eta=False), call()

    assert durable.get(timeout=WAIT_S) == bare.get(timeout=WAIT_S)
    assert [row.key for row in project.rows("see")][-1:] == [durable.id]
