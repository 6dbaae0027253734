"""Event loops, asynchronous engines, and a probe for calls that block the thread of a loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import event, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from delaytasks import DelayTask, DelayTasks
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import runtime_of
from tests.recording import RecordingTimer

#: The asynchronous driver for each driver of our own.
DRIVERS = {
    "psycopg2": "asyncpg",
    "psycopg": "psycopg",
    "pymysql": "asyncmy",
    "pysqlite": "aiosqlite",
}
LIMIT_S = 20
#: The longest time for which one turn may occupy the thread of the event loop.
MOST_BLOCKED_S = 0.02


def run(awaitable: Awaitable[Any]) -> Any:
    """Run a test's coroutine, with a deadline."""

    async def limited() -> Any:
        return await asyncio.wait_for(awaitable, LIMIT_S)

    return asyncio.run(limited())


@asynccontextmanager
async def engine_at(url: str, driver: str | None = None) -> AsyncIterator[AsyncEngine]:
    """Yield an asynchronous engine on a database of the tests."""
    place = make_url(url)
    driver = driver or DRIVERS[place.get_driver_name()]
    pytest.importorskip(driver)
    engine = create_async_engine(place.set(drivername=f"{place.get_backend_name()}+{driver}"))
    if driver == "aiosqlite":  # see tests/conformance/transactions/shop.py
        event.listen(
            engine.sync_engine, "connect", lambda link, _: setattr(link, "isolation_level", None)
        )
        event.listen(engine.sync_engine, "begin", lambda link: link.exec_driver_sql("BEGIN"))
    try:
        yield engine
    finally:
        await engine.dispose()


def own_threads(delays: DelayTasks) -> set[int]:
    """Return the set to which each statement of our own connections adds its thread."""
    seen: set[int] = set()
    database = runtime_of(delays).store.database
    for engine in (database.auto, database.tx):
        event.listen(engine, "before_cursor_execute", lambda *_: seen.add(threading.get_ident()))
    return seen


class WaitingTimer(RecordingTimer):
    """Arms only after the event loop has done something else."""

    def __init__(self) -> None:
        super().__init__()
        self.loop_goes_on = threading.Event()
        self.is_arming = threading.Event()

    def arm(self, entries: Iterable[Entry]) -> bool:
        self.is_arming.set()
        assert self.loop_goes_on.wait(LIMIT_S), "the event loop waits for the broker"
        return super().arm(entries)


async def let_arm(timer: WaitingTimer, work: Awaitable[Any]) -> Any:
    """Await `work`, and let the timer arm as soon as the event loop has a turn meanwhile."""
    task = asyncio.ensure_future(work)
    while not timer.is_arming.is_set():
        await asyncio.sleep(0)
    timer.loop_goes_on.set()
    return await task


def run_timed(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[list[float]], Awaitable[list[DelayTask]]]
) -> tuple[list[DelayTask], float]:
    """Run `work` up to five times; return its results, and the longest turn of the best run.

    `work` gets the list to which each turn of the event loop adds its seconds of CPU time. CPU time
    is measured because calls that wait are found by the threads of statements. A collection of
    garbage would take longer than any turn.
    """
    took: list[float] = []
    turn: Any = asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def timed(loop: Any) -> None:
        began = time.thread_time()
        turn(loop)
        took.append(time.thread_time() - began)

    monkeypatch.setattr(asyncio.BaseEventLoop, "_run_once", timed)
    results: list[DelayTask] = []
    longest_s = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            took.clear()
            results += run(work(took))
            longest_s = min(longest_s, max(took))
            if longest_s < MOST_BLOCKED_S:
                break
    finally:
        gc.enable()
    return results, longest_s
