"""Parts of delaytasks that tests drive by hand: timers, clocks, runners, and loops of events.

A timer records its entries instead of sending them, and a clock stands still until a test moves it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import event, func, make_url, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from delaytasks import DelayedTask, DelayTasks
from delaytasks.broker.arming import EtaTimer, Publisher, Sender
from delaytasks.broker.redis_timer import AHEAD_MS, RETURN_S, RedisTimer, Taken, redis_location
from delaytasks.db.engines import create_sqlite_file
from delaytasks.db.store import Store
from delaytasks.events import Events
from delaytasks.model.clock import Clock, monotonic, to_us
from delaytasks.model.moves import Status
from delaytasks.model.task import Entry
from delaytasks.operate import task_calls
from delaytasks.operate.why import Reason, why
from delaytasks.run.runner import Runner
from delaytasks.runtime import runtime_of
from delaytasks.settings import load_settings
from delaytasks.worker.processes import processes_of
from tests.world.broker import RecordingTimer


def new_key() -> str:
    """Return an encryption key."""
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


class CrashError(BaseException):
    """Simulates the death of the process."""


def delays_on(url: str, **settings: Any) -> DelayTasks:
    """Return a `DelayTasks` with an in-memory broker."""
    app = Celery("test", broker="memory://", set_as_current=False)
    return DelayTasks(app, url, **settings)


def make_tables(delays: DelayTasks) -> Store:
    """Make the tables of `delays`, and return its store."""
    store = runtime_of(delays).store
    create_sqlite_file(store.database.url)
    store.schema.metadata.create_all(store.database.tx)
    return store


def record(delays: DelayTasks) -> RecordingTimer:
    """Replace the timer of `delays` by a recording one."""
    timer = RecordingTimer()
    runtime_of(delays).producer._timer = timer
    return timer


def runner_of(delays: DelayTasks) -> Runner:
    """Return what runs the tasks of `delays` in this process."""
    return processes_of(runtime_of(delays).celery).runner()


def run_now(delays: DelayTasks, task: DelayedTask) -> DelayedTask:
    """Run the task in this process as if it was due, and return its row afterwards."""
    there = delays.get(task)
    is_early = there.expected_time > runtime_of(delays).clock.now()
    moved = delays.reschedule(task.id, 0) if is_early else there
    runner_of(delays).run([Entry(moved.id, moved.version, 0)])
    return delays.get(task)


def explain(delays: DelayTasks, task: DelayedTask | int) -> list[Reason]:
    """Return why a task has not run, as the command `show` and the console say it."""
    return why(runtime_of(delays), delays.get(task))


def record_action(delays: DelayTasks, *words: Any, **options: Any) -> None:
    """Write an entry of the log, as the console does for an action on one task."""
    task_calls.record_action(runtime_of(delays), *words, **options)


@contextmanager
def overheard(store: Store, hear: Callable[[str, Any], object]) -> Iterator[None]:
    """Call `hear` with each statement of our connections and its parameters, before it is sent."""

    def before(_connection: Any, _cursor: Any, statement: str, given: Any, *_: Any) -> None:
        hear(statement, given)

    engines = store.database.auto, store.database.tx
    for engine in engines:
        event.listen(engine, "before_cursor_execute", before)
    try:
        yield
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", before)


@contextmanager
def refusing(delays: DelayTasks, error: Exception, words: str = "") -> Iterator[None]:
    """Raise an error instead of each statement of `delays` that has these words."""

    def refuse(statement: str, _: Any) -> None:
        if words in statement:
            raise error

    with overheard(runtime_of(delays).store, refuse):
        yield


# -- rows of a store ---------------------------------------------------------------------------


def counted(store: Store) -> dict[Status, int]:
    """Return the number of rows of each status, by counting all rows."""
    t = store.schema.tasks.c
    query = select(t.status, func.count()).group_by(t.status)
    found = dict(store.database.autocommitted(lambda c: [tuple(row) for row in c.execute(query)]))
    return {status: found.get(int(status), 0) for status in Status}


def set_columns(store: Store, table: str, row: Any = None, **values: Any) -> None:
    """Set columns of a table directly, as another program does.

    `row` has the column values of the rows that change. Without it, all rows change.
    """
    changed = update(getattr(store.schema, table)).filter_by(**row or {}).values(**values)
    with store.database.begin() as connection:
        connection.execute(changed)


# -- A clock that a test sets by hand -------------------------------------------------------------


class ManualClock(Clock):
    def __init__(self, start: datetime) -> None:
        super().__init__()
        self._now = start

    def now_us(self) -> int:
        return to_us(self._now)

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)


# -- A monotonic clock that a test sets -----------------------------------------------------------


class ManualTime:
    """Replaces `time.monotonic`. With `runs`, it is `at` seconds ahead of the real clock."""

    def __init__(self, at: float = 1000.0, runs: bool = False) -> None:
        self.at, self._runs = at, runs

    def __call__(self) -> float:
        return self.at + monotonic() if self._runs else self.at

    def replace(self, patch: pytest.MonkeyPatch) -> None:
        """Be the clock of all modules of delaytasks that are loaded."""
        own = monotonic.__module__  # other modules may import it from there meanwhile
        loaded = {name: vars(module) for name, module in [*sys.modules.items()] if name != own}
        for name, values in loaded.items():
            if name.startswith("delaytasks.") and values.get("monotonic") is monotonic:
                patch.setitem(values, "monotonic", self)


# -- A Redis timer with a manual clock, for tests on a real Redis ---------------------------------


class RedisTimerHarness:
    """A timer with a private namespace and a manual clock."""

    #: How early entries are taken, and when those return that a poller has not handed on.
    ahead_ms, return_s = AHEAD_MS, RETURN_S

    def __init__(self, url: str, options: dict[str, Any] | None = None, **settings: Any) -> None:
        self.clock = ManualClock(datetime(2030, 1, 1, tzinfo=timezone.utc))
        self.events = Events()
        usual = {"timer": "redis", "namespace": "t" + secrets.token_hex(4), "_publish_limit_s": 10}
        self.settings = load_settings({}, {}, **{**usual, **settings})
        publisher = Publisher(Celery(broker="memory://"), self.settings.namespace, 0.5, self.events)
        location = redis_location(url, None, options)
        self.timer = RedisTimer(
            location, self.settings, EtaTimer(publisher, self.clock), self.clock, self.events
        )
        #: The thread by which the calls of an application arm entries.
        self.sender = Sender(self.timer, self.clock, self.settings.publish_limit_s)

    def entry(self, id: int, in_ms: float = 0, **more: Any) -> Entry:
        return Entry(id, more.pop("version", 0), self.clock.now_us() + int(in_ms * 1000), **more)

    def take(self, most: int = 100, queue: str = "default") -> list[Taken]:
        taken = self.try_take(dict.fromkeys(self.timer.slots(queue), most))
        assert taken is not None
        return taken

    def try_take(self, most: Any, handed_on: Iterable[Taken] = ()) -> list[Taken] | None:
        return self.timer.take(most, handed_on, lambda _: self.settings.grace_s)

    def take_ids(self, most: int = 100) -> list[int]:
        return sorted(entry.id for some in self.take(most) for entry in some.entries)

    def hand_on(self, taken: list[Taken]) -> None:
        """Delete entries that were taken and passed on."""
        self.try_take({}, taken)

    def put(self, late_ms: int, *members: str) -> None:
        """Put these members into each slot, as another program does."""
        at = self.clock.now_us() // 1000 - late_ms
        for slot in self.timer.slots("default"):
            self.timer.link.connect().zadd(self.timer.keys(slot)[0], dict.fromkeys(members, at))

    def lose_slot(self) -> Any:
        """Delete a slot, as a Redis that lost its memory does, and return it."""
        lost = self.timer.slots("default")[3]
        self.timer.link.connect().delete(*self.timer.keys(lost))
        return lost

    def block_slot(self, slot: Any, which: str) -> str:
        """Give a key of a slot another type, and return its name."""
        key: str = self.timer.keys(slot)[("store", "prepare").index(which)]
        self.timer.link.connect().set(key, "a stranger's")
        return key

    def members(self, which: str) -> list[bytes]:
        client, index = self.timer.link.connect(), ("store", "prepare").index(which)
        keys = [self.timer.keys(slot)[index] for slot in self.timer.slots("default")]
        return [member for key in keys for member in client.zrange(key, 0, -1) if member != b"."]

    def close(self) -> None:
        client = self.timer.link.connect()
        for key in client.scan_iter(f"*{self.settings.namespace}*", count=1000):
            client.delete(key)
        self.timer.link.close()


# -- Event loops, asynchronous engines, and a probe for calls that block the thread of a loop -----


#: The asynchronous driver for each driver of our own.
DRIVERS = {"psycopg2": "asyncpg", "psycopg": "psycopg", "pymysql": "asyncmy"}
DRIVERS["pysqlite"] = "aiosqlite"
LIMIT_S = 20


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
    if driver == "aiosqlite":  # see tests/conformance/test_transactions.py
        own = engine.sync_engine
        event.listen(own, "connect", lambda link, _: setattr(link, "isolation_level", None))
        event.listen(own, "begin", lambda link: link.exec_driver_sql("BEGIN"))
    try:
        yield engine
    finally:
        await engine.dispose()


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
