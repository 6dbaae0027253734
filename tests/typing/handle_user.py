"""Use the handles of processors as a user's code does. mypy and pyright check this module.

Both must infer exactly these types, and report exactly the lines that are marked. No test runs this
module.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from typing_extensions import assert_type

import delaytasks
from delaytasks import DelayedTask, DelayTasks

delays = DelayTasks(Celery("shop"), "sqlite://")
NOW = datetime.now(timezone.utc)


@dataclass
class OrderBody:
    id: int


@delays.processor("order.close", queue="orders", retries="15s 3m")
def close_order(body: dict[str, int]) -> bool:
    return bool(body)


@delaytasks.processor("order.remind")
def remind(body: OrderBody, task: DelayedTask) -> None:
    task.check_lease()


@delays.processor("order.ask")
async def ask(body: str) -> int:
    return len(body)


@delays.processor("order.refund", schema=OrderBody)
def refund(body: OrderBody, task: DelayedTask) -> None: ...


def parse(body: list[int]) -> OrderBody:
    return OrderBody(body[0])


@delays.processor("order.ship", schema=parse)
def ship(body: OrderBody) -> None: ...


@delays.processor("order.store", batch=100)
def store(bodies: list[dict[str, int]], tasks: list[DelayedTask]) -> None: ...


@delays.processor("order.count", batch=100, schema=OrderBody)
def count(tasks: list[DelayedTask]) -> int:
    return len(tasks)


@delays.processor("order.any")
def anything(body: Any) -> None: ...


assert_type(close_order({"order": 1}), bool)
assert_type(close_order.tag, str)
assert_type(close_order.schedule({"order": 1}, "30m", key="1"), DelayedTask)
assert_type(close_order.schedule({"order": 1}, at=NOW, on_conflict="keep"), DelayedTask)
assert_type(close_order.schedule_many([({"order": 1}, 5), ({"order": 2}, NOW)], priority=3), int)
close_order.schedule({"order": "one"}, 5)  # type: ignore[dict-item]
close_order.schedule(OrderBody(1), 5)  # type: ignore[arg-type]
close_order.schedule({"order": 1}, 5, colour="red")  # type: ignore[call-arg]
close_order.schedule({"order": 1}, at="30m")  # type: ignore[arg-type]
close_order.schedule_many([("order", 5)])  # type: ignore[list-item]
close_order("order")  # type: ignore[arg-type]

remind.schedule(OrderBody(1), timedelta(hours=1))
remind(OrderBody(1), delays.get(7))
remind.schedule({"id": 1}, 5)  # type: ignore[arg-type]

asked: Coroutine[Any, Any, int] = ask("how")
ask.schedule("how", 5)
ask.schedule(5, 5)  # type: ignore[arg-type]

refund.schedule(OrderBody(1), 5)
refund.schedule({"id": 1}, 5)  # type: ignore[arg-type]
ship.schedule([1], 5)
ship(OrderBody(1))

store.schedule({"order": 1}, 5)
store([{"order": 1}], [])
count.schedule(OrderBody(1), 5)
assert_type(count([]), int)

anything.schedule({"a": [1]}, 5)


async def use_asyncio() -> None:
    assert_type(await close_order.aschedule({"order": 1}, "30m", key="1"), DelayedTask)
    assert_type(await close_order.aschedule({"order": 1}, at=NOW, on_conflict="keep"), DelayedTask)
    assert_type(await close_order.aschedule_many([({"order": 1}, 5), ({"order": 2}, NOW)]), int)
    assert_type(await refund.aschedule(OrderBody(1), 5), DelayedTask)
    await close_order.aschedule({"order": "one"}, 5)  # type: ignore[dict-item]
    await close_order.aschedule({"order": 1}, 5, colour="red")  # type: ignore[call-arg]
    await close_order.aschedule({"order": 1}, at="30m")  # type: ignore[arg-type]
    await close_order.aschedule_many([("order", 5)])  # type: ignore[list-item]
    await refund.aschedule({"id": 1}, at=NOW)  # type: ignore[arg-type]
