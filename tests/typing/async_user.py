"""A coroutine of a user. The type checkers find nothing but the errors that are marked."""

from __future__ import annotations

from celery import Celery
from typing_extensions import assert_type

import delaytasks
from delaytasks import BulkResult, CancelResult, DelayTask, DelayTasks, Policy, TouchResult

delays = DelayTasks(Celery("shop"), "sqlite://")


async def use_asyncio() -> None:
    assert_type(await delays.aschedule_delay("order.close", {"order": 1}, 5), DelayTask)
    assert_type(await delays.aschedule_many([("order.close", {"order": 2}, 1800)]), int)
    assert_type(await delays.acancel(tag="order.close", key="1"), CancelResult)
    assert_type(await delays.atouch_many([1, "2"], 60), TouchResult[int])
    assert_type(await delays.atouch_many(tag="order.close", keys=["1"], delay=60), TouchResult[str])
    assert_type((await delays.afind(status="FAILED")).tasks, list[DelayTask])
    assert_type(await delays.bulk.acancel(tag="order.close"), BulkResult)
    assert_type(await delays.policies.aset(tag="order.close", concurrency=2), Policy)
    assert_type(await delays.await_(7, "30s"), DelayTask)
    assert_type(await delays.await_(tag="order.close", key="1"), DelayTask)
    async for finding in delays.acheck():
        assert_type(finding.tag, str)
    await delays.aschedule_delay("order.close", {}, object())  # type: ignore[arg-type]
    await delaytasks.aschedule_delay("order.close", {}, 5, colour="red")  # type: ignore[call-arg]
    await delays.bulk.acancel(colour="red")  # type: ignore[call-arg]
