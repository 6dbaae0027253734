"""Use the API as a user's code does. mypy and pyright check this module.

Both must infer exactly these types, and report exactly the lines that are marked. No test runs this
module.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from typing_extensions import assert_type

import delaytasks as dt
from delaytasks import DelayedTask, DelayTasks, NewTask

delays = DelayTasks(Celery("shop"), "sqlite://", horizon=20)
shards = dt.Shards([delays])
NOW = datetime.now(timezone.utc)
assert_type(dt.current_delays(), DelayTasks)


# -- processors and their handles -----------------------------------------------------------------


@dataclass
class OrderBody:
    id: int


@delays.processor("order.close", queue="orders", retries="15s 3m", max_late="1h", keep_result=True)
def close_order(body: dict[str, int]) -> bool:
    return bool(body)


@dt.processor("order.remind", soft_time_limit=timedelta(minutes=5), time_limit="6m")
def remind(body: OrderBody, task: DelayedTask) -> None:
    task.check_lease()


@dt.processor("order.ask", in_flight=50)
async def ask(body: str, task: DelayedTask) -> int:
    return len(body)


@delays.processor("order.refund", schema=OrderBody)
def refund(body: OrderBody, task: DelayedTask) -> None: ...


def parse(body: list[int]) -> OrderBody:
    return OrderBody(body[0])


@delays.processor("order.ship", schema=parse)
def ship(body: OrderBody) -> None: ...


@delays.processor("order.store", batch=100)
def store(bodies: list[dict[str, int]], tasks: list[DelayedTask]) -> dict[int, dt.Retry]:
    return {task.id: dt.Retry("5m") for task in tasks}


@delays.processor("order.count", batch=100, schema=OrderBody)
def count(tasks: list[DelayedTask]) -> int:
    return len(tasks)


@delays.recurring("0 9 * * mon-fri", tz="Europe/Berlin")
@delays.processor("report.send", retries=dt.RetrySchedule.LEVELS)
def send_report(body: Any, task: DelayedTask) -> dt.Outcome:
    return dt.Snooze("1h") if body else dt.Done({"receipt": 7})


handle: dt.Processor[Any, ..., dt.Outcome] = send_report
delays.processor("report", time_limits=5)  # type: ignore[call-overload]
delays.processor("store", batch="many")  # type: ignore[call-overload]

assert_type(close_order({"order": 1}), bool)
assert_type(close_order.tag, str)
assert_type(close_order.schedule({"order": 1}, "30m", key="1"), DelayedTask)
assert_type(close_order.schedule_many([({"order": 1}, 5), ({"order": 2}, NOW)], priority=3), int)
close_order.schedule({"order": "one"}, 5)  # type: ignore[dict-item]
close_order.schedule({"order": 1}, 5, colour="red")  # type: ignore[call-arg]
close_order.schedule({"order": 1}, at="30m")  # type: ignore[arg-type]
close_order.schedule_many([("order", 5)])  # type: ignore[list-item]
close_order("order")  # type: ignore[arg-type]
remind.schedule(OrderBody(1), timedelta(hours=1))
remind(OrderBody(1), delays.get(7))
remind.schedule({"id": 1}, 5)  # type: ignore[arg-type]
asked: Coroutine[Any, Any, int] = ask("how", delays.get(7))
ask.schedule(5, 5)  # type: ignore[arg-type]
refund.schedule({"id": 1}, 5)  # type: ignore[arg-type]
ship.schedule([1], 5)
ship(OrderBody(1))
assert_type(store([{"order": 1}], []), dict[int, dt.Retry])
count.schedule(OrderBody(1), 5)
assert_type(count([]), int)
send_report.schedule({"a": [1]}, 5)

# -- calls ----------------------------------------------------------------------------------------


def stream() -> Iterator[NewTask | tuple[str, Any, float]]:
    yield NewTask("order.close", {"order": 1}, at=NOW)
    yield ("order.close", {"order": 2}, 1800)


assert_type(dt.schedule_delay("order", {"order": 1}, timedelta(minutes=30), key="1"), DelayedTask)
assert_type(delays.schedule_delay("order.close", None, at=NOW, on_conflict="replace"), DelayedTask)
delays.schedule_delay("pay", {}, 5, retries=dt.RetrySchedule(["1s"] * 3), max_late=60)
assert_type(delays.schedule_many(stream()), int)
assert_type(delays.cancel(7).status, dt.Status | None)
assert_type(delays.touch([1, "2"], 60), dt.TouchResult)
assert_type(delays.touch(tag="order.close", key={"1", "2"}, delay=60), dt.TouchResult)
assert_type(delays.bulk.cancel(tag="order.close", key_prefix="e", on_progress=print), dt.BulkResult)
assert_type(shards.each(DelayTasks.new_id), dict[int, int])
assert_type(shards.any(DelayTasks.new_id), int)
delays.apply_async(send_report, countdown=60)
with delays.transaction(object()):
    delays.bulk.cancel(colour="red")  # type: ignore[call-arg]
dt.schedule_delay("order.close", {}, [5])  # type: ignore[arg-type]
dt.schedule_delay("order.close", {}, 5, colour="red")  # type: ignore[call-arg]


def reason_of(error: dt.DelayTaskError) -> str | int | None:
    if isinstance(error, dt.InvalidInputError):
        return assert_type(error.argument, str)
    return assert_type(error.id, int | None) if isinstance(error, dt.OutcomeUnknownError) else None


# -- asynchronous twins, which all have the parameters and the result of their methods -------------


async def use_asyncio() -> None:
    assert_type(await delays.aschedule_delay("order.close", {"order": 1}, 5), DelayedTask)
    assert_type(await delays.atouch(tag="order.close", key=["1"], delay=60), dt.TouchResult)
    assert_type(await delays.bulk.acancel(tag="order.close"), dt.BulkResult)
    assert_type(await shards.aeach(DelayTasks.new_id), dict[int, int])
    assert_type(await close_order.aschedule({"order": 1}, at=NOW, on_conflict="keep"), DelayedTask)
    assert_type(await close_order.aschedule_many([({"order": 1}, 5), ({"order": 2}, NOW)]), int)
    await delays.aschedule_delay("order.close", {}, object())  # type: ignore[arg-type]
    await dt.aschedule_delay("order.close", {}, 5, colour="red")  # type: ignore[call-arg]
    await delays.bulk.acancel(colour="red")  # type: ignore[call-arg]
    await close_order.aschedule({"order": "one"}, 5)  # type: ignore[dict-item]
