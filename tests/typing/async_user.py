"""A coroutine of a user. The type checkers find nothing but the errors that are marked."""

from __future__ import annotations

from celery import Celery
from typing_extensions import assert_type

import delaytasks as dt
from delaytasks import DelayedTask, DelayTasks

delays = DelayTasks(Celery("shop"), "sqlite://")
shards = dt.Shards([delays])


async def use_asyncio() -> None:
    assert_type(await delays.aschedule_delay("order.close", {"order": 1}, 5), DelayedTask)
    assert_type(await delays.aschedule_many([("order.close", {"order": 2}, 1800)]), int)
    assert_type(await delays.acancel(tag="order.close", key="1"), dt.CancelResult)
    assert_type(await delays.atouch([1, "2"], 60), dt.TouchResult)
    assert_type(await delays.atouch(tag="order.close", key=["1"], delay=60), dt.TouchResult)
    assert_type((await delays.afind(status="FAILED")).tasks, list[DelayedTask])
    assert_type(await delays.bulk.acancel(tag="order.close"), dt.BulkResult)
    assert_type(await delays.policies.aset(tag="order.close", concurrency=2), dt.Policy)
    receipt: str = await delays.aresult(7, "30s")
    assert receipt == await delays.aresult(tag="order.close", key="1")
    assert_type(await delays.aget(7), DelayedTask)
    assert_type((await delays.aget(7, attempts=True)).attempts, tuple[dt.Attempt, ...])
    assert_type(await delays.areschedule(7, "5m"), DelayedTask)
    assert_type(await delays.arerun(7), DelayedTask)
    assert_type(await delays.atouch(7, "5m"), dt.TouchResult)
    assert_type(await delays.aforecast(), dt.Forecast)
    await delays.aapply_async("shop.remind", (7,), countdown=60)
    assert_type(await delays.bulk.areschedule(by="1h", status="HELD"), dt.BulkResult)
    assert_type(await delays.bulk.arerun(tag="order.close"), dt.BulkResult)
    assert_type(await delays.bulk.alog(), list[dt.LogEntry])
    assert_type(await delays.policies.apause(tag="order.close"), dt.Policy)
    assert_type(await delays.policies.aresume(tag="order.close"), dt.Policy)
    assert_type(await delays.policies.alist(), list[dt.Policy])
    await delays.policies.aremove(tag="order.close")
    assert_type(await delays.callbacks.apost("https://partner.example", {}, 60), DelayedTask)
    assert_type(await delays.callbacks.apublish("invoices", {}, 60), DelayedTask)
    assert_type(await delays.recurring.aset("daily", "report", every="1d"), dt.RecurringSchedule)
    assert_type(await delays.recurring.aget("daily"), dt.RecurringSchedule)
    assert_type(await delays.recurring.alist(), list[dt.RecurringSchedule])
    assert_type(await delays.recurring.apause("daily"), dt.RecurringSchedule)
    assert_type(await delays.recurring.aresume("daily"), dt.RecurringSchedule)
    assert_type(await delays.recurring.aschedule_now("daily"), DelayedTask)
    await delays.recurring.aremove("daily")
    assert_type(await shards.aeach(DelayTasks.new_id), dict[int, int])
    assert_type(await shards.aany(DelayTasks.new_id), int)
    assert_type(await delays.acheck(), list[dt.Finding])
    await delays.aschedule_delay("order.close", {}, object())  # type: ignore[arg-type]
    await dt.aschedule_delay("order.close", {}, 5, colour="red")  # type: ignore[call-arg]
    await delays.bulk.acancel(colour="red")  # type: ignore[call-arg]
    await shards.aclose()
