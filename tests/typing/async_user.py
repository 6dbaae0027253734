"""A coroutine of a user. The type checkers find nothing but the errors that are marked."""

from __future__ import annotations

from celery import Celery
from typing_extensions import assert_type

import delaytasks
from delaytasks import BulkResult, CancelResult, DelayedTask, DelayTasks, Policy, TouchResult

delays = DelayTasks(Celery("shop"), "sqlite://")


async def use_asyncio() -> None:
    assert_type(await delays.aschedule_delay("order.close", {"order": 1}, 5), DelayedTask)
    assert_type(await delays.aschedule_many([("order.close", {"order": 2}, 1800)]), int)
    assert_type(await delays.acancel(tag="order.close", key="1"), CancelResult)
    assert_type(await delays.atouch([1, "2"], 60), TouchResult)
    assert_type(await delays.atouch(tag="order.close", key=["1"], delay=60), TouchResult)
    assert_type((await delays.afind(status="FAILED")).tasks, list[DelayedTask])
    assert_type(await delays.bulk.acancel(tag="order.close"), BulkResult)
    assert_type(await delays.policies.aset(tag="order.close", concurrency=2), Policy)
    receipt: str = await delays.aresult(7, "30s")
    assert receipt == await delays.aresult(tag="order.close", key="1")
    async for finding in delays.acheck():
        assert_type(finding.tag, str)
    await delays.aschedule_delay("order.close", {}, object())  # type: ignore[arg-type]
    await delaytasks.aschedule_delay("order.close", {}, 5, colour="red")  # type: ignore[call-arg]
    await delays.bulk.acancel(colour="red")  # type: ignore[call-arg]
