"""Threads of this package: loops, pools, the availability of services, and latest values."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
from kombu.asynchronous import Hub
from sqlalchemy import text

from delaytasks import StoreUnavailableError
from delaytasks.core import loop as loops
from delaytasks.core.events import Events
from delaytasks.core.loop import Availability, Latest, Loop, ThreadPool
from delaytasks.storage.database import Database
from delaytasks.storage.engines import ForkGate
from delaytasks.twins import STARTS_PER_TURN, LoopTurns
from delaytasks.worker import worker_runtime as runtime_module
from delaytasks.worker.celery_patches import let_threads_wake
from delaytasks.worker.worker_runtime import SUSPENDED_S, WATCHDOG_S, Watchdog
from tests.waiting import wait_until
from tests.world.recording import ManualMonotonic

CLOCKED = [loops, runtime_module]

# -- A loop continues after failures. A dead or stuck loop gets a fresh thread --------------------


class Work:
    """The function of a loop with ten seconds for a turn. The next turn calls `plan`, if it is set.

    Each turn records its thread in `threads`.
    """

    def __init__(self, time: ManualMonotonic) -> None:
        self.time = time
        self.threads: list[threading.Thread] = []
        self.plan: Callable[[], None] | None = None
        self.goes_on = threading.Event()
        self.reconnected: list[threading.Thread] = []
        self.events = Events()
        self.reasons: list[str] = []
        restarted = "loop.restarted", "work"
        self.events.subscribe(
            lambda name, fields: (
                (name, fields.get("loop")) == restarted and self.reasons.append(fields["reason"])
            )
        )
        self.loop = Loop(
            "work",
            self.turn,
            self.events,
            10.0,
            lambda: self.reconnected.append(threading.current_thread()),
        )
        self.loop.start()
        self.take_turn()

    def turn(self) -> None:
        self.threads.append(threading.current_thread())
        plan, self.plan = self.plan, None
        if plan is not None:
            plan()

    def take_turn(self, plan: Callable[[], None] | None = None) -> threading.Thread:
        """Take one turn that calls `plan`, and return the thread of that turn."""
        turns, self.plan = len(self.threads), plan
        self.loop.wake()
        wait_until(lambda: len(self.threads) > turns, 5, "the next turn", 0.001)
        return self.threads[-1]

    def checked_after(self, seconds: float) -> list[str]:
        """Check the loop later, and return the reasons for which it was restarted until then."""
        self.time.at += seconds
        self.loop.check()
        return self.reasons

    def hang(self) -> None:
        assert self.goes_on.wait(30)

    def rest(self) -> None:
        life = self.loop._current
        assert life is not None
        wait_until(lambda: life.began is None, 5, "the turn to end", 0.001)


@pytest.fixture
def work(time: ManualMonotonic) -> Iterator[Work]:
    work = Work(time)
    yield work
    work.goes_on.set()
    work.loop.stop()


def die() -> None:
    raise SystemExit


def test_a_turn_that_fails_is_reported_and_the_same_thread_continues(work: Work) -> None:
    def fail() -> None:
        raise ValueError("as asked")

    thread = work.take_turn(fail)
    wait_until(lambda: work.events.counts["loop.failed"], 5, "the failure to be told")
    assert work.take_turn() is thread
    assert work.checked_after(0) == []


def test_a_thread_that_died_is_replaced_and_counted(work: Work) -> None:
    thread = work.take_turn(die)
    thread.join(5)
    assert not work.loop.info()["is_alive"]
    assert work.checked_after(0) == ["dead"]
    assert work.take_turn() not in (thread, None)
    assert work.events.counts["loop.failed"] == 1, "what it died of"
    assert work.loop.info() == {"is_alive": True, "turned_s_ago": 0, "restarts": 1}
    assert work.checked_after(0) == ["dead"]
    assert work.reconnected == []


def test_a_thread_that_is_stuck_is_replaced_by_one_with_fresh_connections(work: Work) -> None:
    stuck = work.take_turn(work.hang)
    turns = work.threads.count(stuck)
    assert work.checked_after(10) == [], "it has ten seconds"
    assert work.checked_after(0.1) == ["stuck"]
    fresh = work.take_turn()
    assert fresh is not stuck
    assert work.reconnected == [fresh]
    work.rest()
    work.goes_on.set()
    stuck.join(5)
    assert not stuck.is_alive()
    assert work.take_turn() is fresh
    assert work.threads.count(stuck) == turns, "it takes no further turn"


def test_a_replaced_turn_ends_at_its_next_step(work: Work) -> None:
    ended_by: list[BaseException] = []

    def step() -> None:
        work.hang()
        try:
            work.events.attempt("work", "a stage that fails", work.loop.report_progress)
        except BaseException as error:
            ended_by.append(error)
            raise

    stuck = work.take_turn(step)
    work.checked_after(11)
    work.take_turn()
    work.goes_on.set()
    stuck.join(5)
    assert [type(error).__name__ for error in ended_by] == ["ReplacedError"]
    assert work.events.counts["loop.failed"] == 0, "nothing of it is an error"


def test_a_long_turn_that_makes_progress_is_not_stuck(work: Work) -> None:
    steps = [threading.Event() for _ in range(3)]
    done: list[int] = []

    def go() -> None:
        for number, step in enumerate(steps):
            assert step.wait(5)
            work.loop.report_progress()
            done.append(number)
        work.hang()

    work.take_turn(go)
    for number, step in enumerate(steps):
        assert work.checked_after(9) == []
        step.set()
        wait_until(lambda number=number: number in done, 5, "the step", 0.001)  # type: ignore[misc]
    assert work.checked_after(11) == ["stuck"]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_idle_or_stopped_loop_is_not_started_again(work: Work, is_stopped: bool) -> None:
    work.rest()
    if is_stopped:
        work.loop.stop()
    assert work.checked_after(3600) == []
    assert work.loop.info()["is_alive"] is not is_stopped


def test_each_thread_that_is_stuck_in_a_row_is_given_twice_the_time(work: Work) -> None:
    work.take_turn(work.hang)
    work.time.at += 11
    work.plan = work.hang  # the fresh thread hangs in its first turn
    work.loop.check()
    wait_until(lambda: work.reconnected and work.plan is None, 5, "the fresh thread", 0.001)
    assert len(work.checked_after(19)) == 1
    assert len(work.checked_after(2)) == 2
    work.take_turn()
    work.rest()
    work.take_turn(work.hang)
    assert len(work.checked_after(11)) == 3, "one that ended its turn begins anew"


def test_no_loop_is_stuck_because_the_whole_process_was_suspended(work: Work) -> None:
    watchdog = Watchdog(work.events, [work.loop])
    work.take_turn(work.hang)
    work.time.at += SUSPENDED_S + 100
    watchdog.check()
    assert work.reasons == []
    work.time.at += WATCHDOG_S
    watchdog.check()
    assert work.reasons == ["stuck"], "it is, if it does not go on now"


# -- availability reports each change of a service once, and a failure begins a rest --------------


THREADS = 8


def test_only_changes_of_the_state_are_reported() -> None:
    told: list[str] = []
    broker = Availability(told.append, lambda: told.append("up"))
    broker.answered()
    broker.failed("first")
    broker.failed("second")
    assert not broker.is_up
    broker.answered()
    broker.answered()
    assert broker.is_up
    assert told == ["first", "up"]


def test_after_a_failure_the_service_is_not_used_for_a_while(time: ManualMonotonic) -> None:
    broker = Availability(lambda error: None)
    assert not broker.is_resting
    broker.failed("away")
    assert broker.is_resting
    time.at += loops.SERVICE_REST_S - 0.01
    broker.failed("still")
    time.at += 0.5
    assert broker.is_resting, "each failure begins a rest"
    time.at += loops.SERVICE_REST_S
    assert not broker.is_resting
    assert not broker.is_up, "nobody has asked"
    broker.failed("away")
    broker.answered()
    assert not broker.is_resting


def test_threads_that_notice_a_failure_simultaneously_report_it_once() -> None:
    class Watched(Availability):
        """Let another thread run between the read of the state and its change."""

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "is_up":
                sleep(0)
            super().__setattr__(name, value)

    told: list[str] = []
    broker = Watched(told.append, lambda: told.append("up"))
    start = threading.Barrier(THREADS)

    def find_out(_: int) -> None:
        for _ in range(200):
            start.wait()
            broker.failed("down")
            start.wait()
            broker.answered()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(find_out, range(THREADS)))
    assert told == ["down", "up"] * 200


# -- the latest value, here a forecast, is kept, and callers rarely wait for a new one ------------


class Forecasts:
    """Makes forecasts, which are numbers here, in the calling thread."""

    def __init__(self, time: ManualMonotonic) -> None:
        self.time, self.takes_s, self.made = time, 0.125, 0
        self.error: Exception | None = None
        self.kept: Any = Latest("forecast", self.make)

    def make(self) -> Any:
        self.time.at += self.takes_s
        self.made += 1
        if self.error is not None:
            raise self.error
        return self.made

    def after(self, seconds: float) -> Any:
        self.time.at += seconds
        return self.kept.get()


@pytest.fixture
def forecasts(time: ManualMonotonic, monkeypatch: pytest.MonkeyPatch) -> Forecasts:
    monkeypatch.setattr(loops, "within", lambda _, work: work())
    monkeypatch.setattr(loops, "in_background", lambda work, *_, **__: work() or True)
    return Forecasts(time)


@pytest.mark.parametrize(
    ("takes_s", "rest_s"),
    [(0.125, loops.RENEW_S), (1, loops.RENEW_SHARE), (300, loops.MOST_RENEW_S)],
)
def test_slow_forecasts_are_infrequent(forecasts: Forecasts, takes_s: float, rest_s: float) -> None:
    forecasts.takes_s = takes_s
    assert forecasts.after(0) == (1, takes_s)
    assert forecasts.after(rest_s - 1) == (1, takes_s + rest_s - 1)
    assert forecasts.after(1) == (2, takes_s)


def test_after_an_error_the_last_forecast_is_kept_until_it_is_too_old(forecasts: Forecasts) -> None:
    assert forecasts.after(0) == (1, 0.125)
    forecasts.error = StoreUnavailableError("down")
    assert forecasts.after(loops.RENEW_S) == (1, loops.RENEW_S + 0.25)
    assert forecasts.after(loops.RENEW_S) is None
    forecasts.error = None
    assert forecasts.after(loops.RENEW_S - 1) is None, "after an error, the database rests as well"
    assert forecasts.after(1) == (4, 0.125)


def test_callers_get_the_last_forecast_while_a_thread_makes_a_new_one(
    time: ManualMonotonic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "FIRST_WAIT_S", 30.0)
    made, goes_on = list[int](), threading.Event()

    def make() -> Any:
        made.append(1)
        assert len(made) == 1 or goes_on.wait(30)
        return len(made)

    kept: Any = Latest("forecast", make)

    def found() -> Any:
        recent = kept.get()
        return recent and recent[0]

    assert found() == 1
    time.at += loops.RENEW_S
    assert [found(), found()] == [1, 1]
    time.at += loops.RENEW_S + 1
    assert found() is None, "it is too old, and the thread still works"
    goes_on.set()
    wait_until(lambda: found() == 2, 20, "the new forecast")
    assert len(made) == 2


# -- waking ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reset", [False, True])
def test_another_thread_wakes_an_event_loop_that_waits(is_reset: bool) -> None:
    hub, called = Hub(), list[int]()
    let_threads_wake(hub)
    hub.timer.max_interval = 60
    hub.call_later(60, lambda: None)
    if is_reset:  # a worker that loses its broker resets the hub
        hub.call_soon(lambda: None)
        next(hub.create_loop())
        hub.reset()
    is_over = threading.Event()
    silent, other_end = socket.socketpair()
    hub.add_reader(silent, lambda: None)

    def run() -> None:
        loop = hub.create_loop()
        while not is_over.is_set():
            next(loop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        for number in range(3):
            hub.call_soon(called.append, number)
            wait_until(lambda number=number: len(called) > number, 5, "the loop to wake")  # type: ignore[misc]
    finally:
        is_over.set()
        hub.call_soon(called.append, 3)
        thread.join(5)
        silent.close()
        other_end.close()
        hub.close()
    assert not thread.is_alive()


# -- A child that is forked while a thread uses SQLite can use SQLite, too ------------------------


def test_a_child_forked_during_a_write_is_not_locked_out(sqlite_path: Callable[[], str]) -> None:
    database = Database(sqlite_path())
    database.autocommitted(lambda c: c.execute(text("CREATE TABLE t (n integer)")))
    writes, ends = threading.Event(), threading.Event()

    def write() -> None:
        with database.begin() as connection:
            connection.execute(text("INSERT INTO t VALUES (1)"))
            writes.set()
            ends.wait(10)

    thread = threading.Thread(target=write)
    thread.start()
    assert writes.wait(10)
    threading.Timer(0.3, ends.set).start()
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # without the alarm, a blocked child would wait for 30 seconds
        database.autocommitted(lambda c: c.execute(text("INSERT INTO t VALUES (2)")))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert database.autocommitted(lambda c: c.execute(text("SELECT count(*) FROM t")).scalar()) == 2
    database.dispose()


def test_a_fork_waits_for_threads_in_the_gate_and_no_thread_enters_meanwhile() -> None:
    gate, order = ForkGate(), list[str]()
    gate.enter()
    forks = threading.Thread(target=lambda: (gate._before(), order.append("forked"), gate._after()))
    forks.start()
    wait_until(lambda: gate._is_forking, 5, "the fork to wait")
    enters = threading.Thread(target=lambda: (gate.enter(), order.append("entered")))
    enters.start()
    assert order == []
    gate.leave()
    forks.join(5)
    enters.join(5)
    assert order == ["forked", "entered"]


# -- the parts that run the asynchronous twins: threads, turns of the event loop, iterators -------


def test_a_forked_child_has_its_own_threads() -> None:
    pool = ThreadPool(1, "test")
    assert pool.submit(os.getpid).result(10) == os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if pool.submit(os.getpid).result(10) == os.getpid() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()


def test_a_pool_that_was_closed_starts_threads_again() -> None:
    pool = ThreadPool(1, "test")
    for _ in range(2):
        assert pool.submit(os.getpid).result(10) == os.getpid()
        pool.close()


def test_calls_start_in_their_order_and_a_few_in_each_turn_of_the_event_loop() -> None:
    started: list[int] = []
    turns: list[int] = []

    async def start(turn: LoopTurns, number: int) -> None:
        await turn.wait()
        started.append(number)

    async def go() -> None:
        turn = LoopTurns()
        calls = [asyncio.create_task(start(turn, number)) for number in range(100)]
        calls[50].cancel()
        while len(started) < 99:
            before = len(started)
            await asyncio.sleep(0)
            turns.append(len(started) - before)
        await start(turn, 100)

    asyncio.run(go())
    assert started == [*range(50), *range(51, 101)]
    assert max(turns) <= STARTS_PER_TURN
