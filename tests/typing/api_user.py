"""Use the API as a user's code does; mypy must infer exactly these types.

No test runs this module.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from celery import Celery
from typing_extensions import assert_type

import delaytasks as dt
from delaytasks import DelayedTask, DelayTasks, NewTask

delays = DelayTasks(Celery("shop"), "sqlite://", horizon=20)
NOW = datetime.now(timezone.utc)


@dt.processor("order.close", queue="orders")
def close_order(body: dict[str, int]) -> bool:
    return bool(body)


@delays.processor("order.remind")
def remind(body: dict[str, int], task: DelayedTask) -> None:
    task.check_lease()


def stream() -> Iterator[NewTask | tuple[str, Any, float]]:
    yield NewTask("order.close", {"order": 1}, at=NOW)
    yield ("order.close", {"order": 2}, 1800)


assert_type(close_order({"order": 1}), bool)
assert_type(dt.schedule_delay("order", {"order": 1}, timedelta(minutes=30), key="1"), DelayedTask)
assert_type(delays.schedule_delay("order.close", None, at=NOW, on_conflict="replace"), DelayedTask)
assert_type(delays.schedule_delay("a", {}, 2, key="k", on_conflict="replace"), DelayedTask)
assert_type(delays.schedule_many(stream()), int)
assert_type(delays.cancel(tag="order.close", key="1"), dt.CancelResult)
assert_type(delays.cancel(7).status, dt.Status | None)
assert_type(delays.reschedule(7, 60), DelayedTask)
assert_type(delays.touch(tag="order.close", key="1", delay="1m"), dt.TouchResult | dt.TouchResult)
assert_type(delays.touch([1, "2"], 60), dt.TouchResult)
assert_type(delays.new_id(), int)
assert_type(delays.touch(tag="order.close", key={"1", "2"}, delay=60), dt.TouchResult)
assert_type(delays.touch(tag="order.close", key=["1"], delay=60), dt.TouchResult)
assert_type(delays.rerun("7"), DelayedTask)
assert_type(delays.get(7).status, dt.Status)
assert_type(delays.find(tag="order.close", status=dt.Status.FAILED), dt.Page)
assert_type([task.id for task in delays.find().tasks], list[int])
assert_type(delays.bulk.cancel(tag="order.close", key_prefix="e", on_progress=print), dt.BulkResult)
assert_type(delays.bulk.reschedule(by=timedelta(hours=1), status="HELD", dry_run=True).changed, int)
assert_type(delays.bulk.rerun(60, since=NOW), dt.BulkResult)
assert_type(delays.bulk.log(limit=5), list[dt.LogEntry])

delays.bulk.cancel(colour="red")  # type: ignore[call-arg]
dt.schedule_delay("order.close", {}, [5])  # type: ignore[arg-type]
dt.schedule_delay("order.close", {}, 5, on_conflict="ignore")  # type: ignore[arg-type]
dt.schedule_delay("order.close", {}, 5, colour="red")  # type: ignore[call-arg]


@delays.processor("pay", retries="15s 3m", max_late="1h", keep_result=True)
def pay(body: Any) -> Any:
    return dt.Done({"receipt": 7}) if body else dt.Retry(after="5m", reason="busy")


@delays.processor("report", soft_time_limit=timedelta(minutes=5), time_limit="6m")
def report(body: Any) -> None: ...


delays.processor("report", time_limits=5)  # type: ignore[call-overload]


@delays.processor("store", batch=100)
def store(tasks: list[DelayedTask]) -> dict[int, dt.Retry]:
    return {task.id: dt.Retry("5m") for task in tasks}


@dt.processor("ask", in_flight=50)
async def ask(body: dict[str, int], task: DelayedTask) -> int:
    return body["order"]


assert_type(store([]), dict[int, dt.Retry])
asked: Coroutine[Any, Any, int] = ask({"order": 7}, delays.get(7))
delays.processor("store", batch="many")  # type: ignore[call-overload]

delays.schedule_delay("pay", {}, 5, retries=3)
delays.schedule_delay("pay", {}, 5, retries=dt.RetrySchedule(["1s"] * 3), max_late=60)

assert_type(
    delays.callbacks.post("https://partner.example/paid", {"order": 7}, 60, headers={"X": "y"}),
    DelayedTask,
)
assert_type(delays.callbacks.publish("paid", {"order": 7}, 60, exchange="a", key="7"), DelayedTask)
