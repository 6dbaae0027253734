"""A loop continues after failures. A dead or stuck loop gets a fresh thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from delaytasks.core import loop as loop_module
from delaytasks.core.events import Events
from delaytasks.core.loop import Loop
from delaytasks.worker import worker_runtime as runtime_module
from delaytasks.worker.worker_runtime import SUSPENDED_S, WATCHDOG_S, Watchdog
from tests.unit.manual_monotonic import ManualMonotonic
from tests.waiting import wait_until


class Work:
    """The function of a loop. The next turn calls `plan`, if a test has set one.

    Each turn records its thread in `threads`.
    """

    def __init__(self, stuck_s: float = 10.0) -> None:
        self.threads: list[threading.Thread] = []
        self.plan: Callable[[], None] | None = None
        self.goes_on = threading.Event()
        self.reconnected: list[threading.Thread] = []
        self.events = Events()
        self.told: list[dict[str, Any]] = []
        self.events.subscribe(
            lambda name, fields: self.told.append(fields) if name == "loop.restarted" else None
        )
        self.loop = Loop("work", self.turn, self.events, stuck_s, self.reconnect)
        self.loop.start()
        self.take_turn()

    def turn(self) -> None:
        self.threads.append(threading.current_thread())
        plan, self.plan = self.plan, None
        if plan is not None:
            plan()

    def reconnect(self) -> None:
        self.reconnected.append(threading.current_thread())

    def take_turn(self, plan: Callable[[], None] | None = None) -> threading.Thread:
        """Take one turn that calls `plan`, and return the thread of that turn."""
        turns, self.plan = len(self.threads), plan
        self.loop.wake()
        wait_until(lambda: len(self.threads) > turns, 5, "the next turn", 0.001)
        return self.threads[-1]

    def hang(self) -> None:
        assert self.goes_on.wait(30)

    def rest(self) -> None:
        life = self.loop._current
        assert life is not None
        wait_until(lambda: life.began is None, 5, "the turn to end", 0.001)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> ManualMonotonic:
    time = ManualMonotonic()
    for module in (loop_module, runtime_module):
        monkeypatch.setattr(module, "monotonic", time)
    return time


@pytest.fixture
def work(time: ManualMonotonic) -> Iterator[Work]:
    work = Work()
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
    work.loop.check()
    assert work.told == []


def test_a_thread_that_died_is_replaced_and_counted(work: Work) -> None:
    thread = work.take_turn(die)
    thread.join(5)
    assert not work.loop.info()["is_alive"]
    work.loop.check()
    assert work.told == [{"loop": "work", "reason": "dead"}]
    assert work.take_turn() not in (thread, None)
    assert work.events.counts["loop.failed"] == 1, "what it died of"
    assert work.loop.info() == {"is_alive": True, "turned_s_ago": 0, "restarts": 1}
    work.loop.check()
    assert work.loop.info()["restarts"] == 1
    assert work.reconnected == []


def test_a_thread_that_is_stuck_is_replaced_by_one_with_fresh_connections(
    work: Work, time: ManualMonotonic
) -> None:
    stuck = work.take_turn(work.hang)
    time.at += 10
    work.loop.check()
    assert work.told == [], "it has ten seconds"
    time.at += 0.1
    work.loop.check()
    assert work.told == [{"loop": "work", "reason": "stuck"}]
    fresh = work.take_turn()
    assert fresh is not stuck
    assert work.reconnected == [fresh]


def test_a_stuck_thread_that_continues_takes_no_further_turn(
    work: Work, time: ManualMonotonic
) -> None:
    stuck = work.take_turn(work.hang)
    turns = work.threads.count(stuck)
    time.at += 11
    work.loop.check()
    fresh = work.take_turn()
    work.rest()
    work.goes_on.set()
    stuck.join(5)
    assert not stuck.is_alive()
    assert work.take_turn() is fresh
    assert work.threads.count(stuck) == turns


def test_a_replaced_turn_ends_at_its_next_step(work: Work, time: ManualMonotonic) -> None:
    ended_by: list[BaseException] = []

    def step() -> None:
        work.hang()
        try:
            work.events.attempt(
                "work", "a stage that goes on after errors", work.loop.report_progress
            )
        except BaseException as error:
            ended_by.append(error)
            raise

    stuck = work.take_turn(step)
    time.at += 11
    work.loop.check()
    work.take_turn()
    work.goes_on.set()
    stuck.join(5)
    assert [type(error).__name__ for error in ended_by] == ["ReplacedError"]
    assert work.events.counts["loop.failed"] == 0, "nothing of it is an error"


def test_a_long_turn_that_makes_progress_is_not_stuck(work: Work, time: ManualMonotonic) -> None:
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
        time.at += 9
        work.loop.check()
        step.set()
        wait_until(lambda number=number: number in done, 5, "the step", 0.001)  # type: ignore[misc]
    assert work.told == []
    time.at += 11
    work.loop.check()
    assert [fields["reason"] for fields in work.told] == ["stuck"]


def test_an_idle_loop_is_not_stuck(work: Work, time: ManualMonotonic) -> None:
    work.rest()
    time.at += 3600
    work.loop.check()
    assert work.told == []


def test_each_thread_that_is_stuck_in_a_row_is_given_twice_the_time(
    work: Work, time: ManualMonotonic
) -> None:
    work.take_turn(work.hang)
    time.at += 11
    work.plan = work.hang  # the fresh thread hangs in its first turn
    work.loop.check()
    wait_until(lambda: work.reconnected and work.plan is None, 5, "the fresh thread", 0.001)
    time.at += 19
    work.loop.check()
    assert len(work.told) == 1
    time.at += 2
    work.loop.check()
    assert len(work.told) == 2
    work.take_turn()
    work.rest()
    work.take_turn(work.hang)
    time.at += 11
    work.loop.check()
    assert len(work.told) == 3, "one that ended its turn begins anew"


def test_a_stopped_loop_is_not_started_again(work: Work) -> None:
    work.rest()
    work.loop.stop()
    work.loop.check()
    assert work.told == []
    assert not work.loop.info()["is_alive"]


def test_no_loop_is_stuck_because_the_whole_process_was_suspended(
    work: Work, time: ManualMonotonic
) -> None:
    watchdog = Watchdog(work.events, [work.loop])
    work.take_turn(work.hang)
    time.at += SUSPENDED_S + 100
    watchdog.check()
    assert work.told == []
    time.at += WATCHDOG_S
    watchdog.check()
    assert [fields["reason"] for fields in work.told] == ["stuck"], (
        "it is, if it does not go on now"
    )
