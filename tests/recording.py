"""Parts of delaytasks that tests drive by hand: timers, clocks, runners, and loops of events.

A timer records its entries instead of sending them, and a clock stands still until a test moves it.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import event, func, make_url, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from delaytasks import DelayTask, DelayTasks
from delaytasks.core.clock import Clock, to_us
from delaytasks.core.events import Events
from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import Claimed, Entry, Settlement
from delaytasks.core.policies import Policies, Policy
from delaytasks.core.settings import load_settings
from delaytasks.core.states import Status
from delaytasks.core.task import NewTask
from delaytasks.execution.executor import Finish, ProcessorCall
from delaytasks.execution.runner import Report, Runner
from delaytasks.limits.admission import Waitlist
from delaytasks.processors.registry import Registry
from delaytasks.runtime import Runtime, runtime_of
from delaytasks.scheduling.producer import Producer, QueueRouting
from delaytasks.storage.claims import Claims
from delaytasks.storage.sessions import transaction_of
from delaytasks.storage.store import Store
from delaytasks.timers.arming import EtaTimer
from delaytasks.timers.publisher import Publisher
from delaytasks.timers.redis_timer import RedisTimer, Taken, redis_location
from delaytasks.worker.celery_tasks import processes_of
from tests.conftest import settings_for
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


def record(delays: DelayTasks) -> RecordingTimer:
    """Replace the timer of `delays` by a recording one."""
    timer = RecordingTimer()
    runtime_of(delays).producer._timer = timer
    return timer


def record_sweeps(runtime: Runtime, timer: RecordingTimer) -> None:
    """Replace the timer of the sweeps."""
    sweeper: Any = runtime.sweeper
    for part in (sweeper, sweeper._drain_requests, sweeper._pauses):
        part._timer = timer


def runner_of(delays: DelayTasks) -> Runner:
    """Return what runs the tasks of `delays` in this process."""
    return processes_of(runtime_of(delays).celery).runner()


def run_now(delays: DelayTasks, task: DelayTask) -> DelayTask:
    """Run the task in this process as if it was due, and return its row afterwards."""
    there = delays.get(task)
    moved = (
        delays.reschedule(task.id, 0)
        if there.expected_time > runtime_of(delays).clock.now()
        else there
    )
    runner_of(delays).run([Entry(moved.id, moved.version, 0)])
    return delays.get(task)


# -- rows of a store ---------------------------------------------------------------------------


def counted(store: Store) -> dict[Status, int]:
    """Return the number of rows of each status, by counting all rows."""
    t = store.schema.tasks.c
    query = select(t.status, func.count()).group_by(t.status)
    found = dict(store.database.autocommitted(lambda c: [tuple(row) for row in c.execute(query)]))
    return {status: found.get(int(status), 0) for status in Status}


# -- A clock that a test sets by hand -------------------------------------------------------------


class ManualClock(Clock):
    def __init__(self, start: datetime) -> None:
        super().__init__()
        self._now = start

    def now_us(self) -> int:
        return to_us(self._now)

    def advance(self, seconds: float) -> None:
        self._now += timedelta(seconds=seconds)


# -- A Redis timer with a manual clock, for tests on a real Redis ---------------------------------


class RedisTimerHarness:
    """A timer with a private namespace and a manual clock."""

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

    def entry(self, id: int, in_ms: float = 0, **fields: Any) -> Entry:
        return Entry(
            id, fields.pop("version", 0), self.clock.now_us() + int(in_ms * 1000), **fields
        )

    def take(self, most: int = 100, queue: str = "default") -> list[Taken]:
        taken = self.timer.take(dict.fromkeys(self.timer.slots(queue), most))
        assert taken is not None
        return taken

    def take_ids(self, most: int = 100) -> list[int]:
        return sorted(entry.id for some in self.take(most) for entry in some.entries)

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
    if driver == "aiosqlite":  # see tests/conformance/test_transactions.py
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


# -- Runners on a store, for tests of the changes of rows -----------------------------------------


class DisturbedClaims:
    """Claim queries that a test can disturb."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self.after_claim: Callable[[], object] = lambda: None
        self.before_settle: Callable[[Sequence[Settlement]], object] = lambda settlements: None

    def claim(self, entries: Sequence[Entry]) -> Claimed:
        claimed = self._claims.claim(entries)
        self.after_claim()
        return claimed

    def claim_due(self, queue: str, priorities: Sequence[int], limit: int) -> Claimed:
        claimed = self._claims.claim_due(queue, priorities, limit)
        self.after_claim()
        return claimed

    def settle(self, settlements: Sequence[Settlement], on: Any = None) -> set[int]:
        self.before_settle(settlements)
        return self._claims.settle(settlements, on)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._claims, name)


class RunnerHarness:
    """A runner on a store, without a worker."""

    def __init__(self, store: Store, may_detach: bool = False, **changes: Any) -> None:
        url = store.database.url.render_as_string(hide_password=False)
        self.settings = settings_for(url, **{"_chunk_time_budget_s": 5, "tags": "any", **changes})
        self.store = store
        self.registry, self.events, self.timer = Registry(), Events(), RecordingTimer()
        self.clock = Clock(self.store.tasks.now)
        self.waitlist = Waitlist(self.store, self.limited)
        self.claims = DisturbedClaims(
            self.store.claims("worker-1", 0x7F000001, self.waitlist.hold_if_limited)
        )
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.events.subscribe(lambda name, fields: self.told.append((name, fields)))
        self.ran: list[Any] = []
        self.registry.processor("note")(self.ran.append)
        self.runner = self.make_runner(may_detach=may_detach)
        self._ids = IdMaker(lambda: to_us(self.clock.now()) // 1000)
        queues = QueueRouting(self.settings, self.registry)
        to = (self.clock, self._ids, RecordingTimer(), self.registry, queues, self.events)
        self.producer = Producer(self.settings, self.store.tasks, *to)

    def make_runner(self, **options: Any) -> Runner:
        claims: Any = self.claims
        return Runner(
            self.settings,
            claims,
            self.waitlist,
            self.clock,
            self.registry,
            self.timer,
            self.events,
            self.execute,
            lambda session, task: (
                session and transaction_of(session, self.store.database.remedy_at)
            ),
            **options,
        )

    def limited(self) -> Mapping[str, Policy]:
        return Policies(tuple(self.store.policies.read())).limited

    @staticmethod
    def execute(call: ProcessorCall, end: Finish) -> object:
        return end(call(call.read_argument()), None)

    def schedule(
        self, tag: str = "note", body: Any = None, delay: float = 0, **options: Any
    ) -> DelayTask:
        task = self.producer.schedule(NewTask(tag, body, delay, **options), "reject", None)
        if delay:
            return task
        # SQLite's clock has milliseconds, so that a task may not be due yet at the moment of its
        # creation.
        self.change(task, expected_time=task.expected_time - timedelta(milliseconds=10))
        return self.now(task)

    def change(self, task: DelayTask | int, **values: Any) -> None:
        t = self.store.schema.tasks
        with self.store.database.begin() as connection:
            connection.execute(
                update(t)
                .where(t.c.id == (task if isinstance(task, int) else task.id))
                .values(**values)
            )

    def now(self, task: DelayTask) -> DelayTask:
        found = self.store.tasks.get(task.id)
        assert found is not None
        return found

    def run(self, *tasks: DelayTask) -> Report:
        return self.runner.run([self.entry(task) for task in tasks])

    @staticmethod
    def entry(task: DelayTask) -> Entry:
        return Entry.of(task)

    def statuses(self, tasks: Sequence[DelayTask]) -> list[str]:
        return [self.now(task).status.name for task in tasks]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.told if name == event]
