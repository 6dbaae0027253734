"""A runner claims, runs and settles the rows of a chunk on SQLite, within its time and lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from datetime import timedelta
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

from delaytasks import DelayedTask, Retry, Snooze, Status, StoreError, StoreUnavailableError
from delaytasks.core.text import DEFER_MIN_S
from delaytasks.core.workers import ChunkSize
from delaytasks.execution import runner
from delaytasks.execution.chunk import Chunk, TimeBudget
from delaytasks.execution.chunk_runner import TagCosts
from delaytasks.execution.runner import Report
from tests.recording import ManualMonotonic
from tests.unit.conftest import Gate, fail_settlements
from tests.waiting import wait_until
from tests.world import RUNNING, Entry, MakeWorld, Settlement, World

BUDGET_S = 0.1

# -- run and settle the rows of a chunk on SQLite, within its time and its lease ------------------


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


FAILURES: list[BaseException] = [ValueError("as asked"), ValueError("\x00 \ud800")]
FAILURES += [UnsayableError(), SystemExit(3), KeyboardInterrupt()]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_processor_that_raises_fails_only_its_row(world: World, error: BaseException) -> None:
    def fail(body: Any) -> None:
        raise error

    world.delays.processor("fail")(fail)
    world.run(*(tasks := [world.schedule(), world.schedule("fail"), world.schedule()]))
    assert world.statuses(tasks) == ["DONE", "FAILED", "DONE"]
    text = world.read(tasks[1]).error or ""
    assert type(error).__name__ in text
    assert "\x00" not in text
    assert [fields["id"] for fields in world.told("task.failed")] == [tasks[1].id]


def test_an_error_text_is_bounded(make_world: MakeWorld) -> None:
    world = make_world(_max_error_bytes=2000)

    def fail(body: Any) -> None:
        raise ValueError("é" * 100_000)

    world.delays.processor("fail")(fail)
    world.run(task := world.schedule("fail"))
    text = world.read(task).error or ""
    assert len(text.encode()) <= 2000
    assert "characters left out" in text


@pytest.mark.parametrize(("options", "second"), [({}, "NOT_COMPLETE"), ({"batch": 9}, "RUNNING")])
def test_a_worker_that_stops_settles_finished_rows_and_gives_back_the_rest(
    world: World, options: dict[str, Any], second: str
) -> None:
    def stop(_: Any) -> None:
        raise WorkerShutdown(0)

    world.delays.processor("stop", **options)(stop)
    tasks = [world.schedule(tag, priority=5) for tag in ("stop", "stop", "note")]
    tasks.insert(0, world.schedule(priority=9))
    world.broker.lose()
    with pytest.raises(WorkerShutdown):
        world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "RUNNING", second, "NOT_COMPLETE"]
    rest = [task for task in tasks[2:] if world.read(task).status is Status.NOT_COMPLETE]
    assert [world.read(task).runs for task in rest] == [0] * len(rest)
    assert sorted(world.broker.ids) == sorted(task.id for task in rest)


def test_the_highest_priority_runs_first_then_the_oldest(world: World) -> None:
    tasks = [world.schedule(body=f"{priority}", priority=priority) for priority in (0, 9, 5)]
    tasks.append(world.schedule(body="older", priority=5))
    world.change(tasks[-1], expected_time=world.now() - timedelta(seconds=60))
    world.run(*tasks)
    assert world.notes == ["9", "older", "5", "0"]


# -- time limits ---------------------------------------------------------------------------------


def test_finished_rows_are_settled_before_a_row_that_may_be_killed_begins(world: World) -> None:
    seen: dict[int, list[str]] = {}

    def look(body: Any, task: DelayedTask) -> None:
        seen[task.id] = world.statuses(tasks)

    world.delays.processor("look", time_limit=60)(look)
    world.delays.processor("soft", soft_time_limit=60)(world.notes.append)
    settled: list[int] = []
    world.before_settle = lambda settlements: settled.append(len(settlements))
    tasks = [world.schedule(tag) for tag in ("note", "look", "look", "soft")]
    assert world.run(*tasks).ran == 4
    assert seen == {
        tasks[1].id: ["DONE", "RUNNING", "RUNNING", "DONE"],
        tasks[2].id: ["DONE", "DONE", "RUNNING", "DONE"],
    }, "those with a hard limit run last, each when all before it is settled"
    assert settled == [2, 1, 1]


def test_a_row_about_to_begin_is_given_back_after_a_failed_settlement(world: World) -> None:
    world.delays.processor("hard", time_limit=60)(world.notes.append)
    tasks = [world.schedule(body="first"), world.schedule("hard", "second")]
    # The second error is for the settlement of the single row.
    fail_settlements(world, [StoreError("refused")] * 2)
    with pytest.raises(StoreError, match="refused"):
        world.run(*tasks)
    assert world.notes == ["first"]
    assert world.statuses(tasks) == ["DONE", "NOT_COMPLETE"]


@pytest.mark.parametrize("limits", [{"soft_time_limit": 60}, {"time_limit": 60}])
def test_time_limits_that_the_pool_lacks_are_deferred(world: World, limits: dict[str, Any]) -> None:
    world.delays.processor("limited", **limits)(world.notes.append)
    tasks = [world.schedule("limited", "never"), world.schedule(body="free")]
    world.worker(keeps_time_limits=False)
    world.run(*tasks)
    assert world.notes == ["free"]
    left = world.read(tasks[0])
    assert (left.status, left.runs) == (Status.NOT_COMPLETE, 0)
    assert 4 < (left.expected_time - world.now()).total_seconds() <= 5
    assert "let a worker with -P prefork serve the queue default" in (left.error or "")
    assert [fields["tag"] for fields in world.told("task.no_time_limits")] == ["limited"]


# -- the time budget and the lease ---------------------------------------------------------------


@pytest.mark.parametrize("rest_s", [0, 0.05, 0.3], ids=["at once", "while it rests", "asleep"])
def test_after_the_time_budget_rows_are_given_back_and_results_settled_during_a_run(
    make_world: MakeWorld, gate: Gate, pool: Executor, rest_s: float
) -> None:
    """Whatever ran before, and whether the thread of the time budget sleeps."""
    world = make_world(_chunk_time_budget_s=BUDGET_S)
    world.run(world.schedule(body="before"), world.schedule(body="before"))
    time.sleep(rest_s)
    world.delays.processor("wait")(gate)
    done, slow = world.schedule(priority=9), world.schedule("wait", priority=5)
    rest = [world.schedule(body=n) for n in range(3)]
    world.broker.lose()
    running, claimed = pool.submit(world.run, done, slow, *rest), time.monotonic()
    gate.wait_for(1)
    assert world.statuses(rest) == ["RUNNING"] * 3, "all are ours within the box"
    wait_until(lambda: world.count("chunk.gave_back"), 5, "the rest to be given back")
    assert time.monotonic() - claimed >= BUDGET_S
    wait_until(lambda: world.statuses([done]) == ["DONE"], 5, "the first to be settled")
    assert world.statuses([slow, *rest]) == ["RUNNING", *["NOT_COMPLETE"] * 3]
    assert not running.done()
    gate.is_open.set()
    assert running.result(5).ran == 2
    assert world.statuses([slow]) == ["DONE"]
    rest = [world.read(task) for task in rest]
    assert [task.runs for task in rest] == [0, 0, 0], "what did not start was no attempt"
    assert sorted(world.broker.armed) == sorted(map(Entry.of, rest))
    assert (world.count("chunk.gave_back"), world.count("task.lease_lost")) == (3, 0)
    assert world.notes == ["before", "before", None]
    assert world.run(*rest).ran == 3, "and they run elsewhere"


def test_an_error_is_reported_and_the_next_chunk_is_watched() -> None:
    errors, expired = list[Exception](), list[Chunk]()
    budget = TimeBudget(
        BUDGET_S, lambda chunk: expired.append(chunk) or 1 / (len(expired) - 1), errors.append
    )
    for count in (1, 2):
        budget.open(Chunk([], 60, 60))
        wait_until(lambda count=count: len(expired) == count and errors, 5, "the end of its time")  # type: ignore[misc]
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_chunks_that_end_in_time_wake_no_thread_and_are_not_reported() -> None:
    expired, woken = list[Chunk](), list[int]()
    budget: Any = TimeBudget(5, expired.append, lambda error: None)
    for number in range(50):
        budget.open(chunk := Chunk([], 60, 60))
        time.sleep(0.005)
        budget.close(chunk)
        if number == 0:
            budget._changed.notify = lambda: woken.append(1)
    assert (woken, expired) == ([], [])


@pytest.mark.parametrize(("rows", "threads"), [(1, []), (2, ["delaytasks-time-budget"])])
def test_only_several_rows_need_a_time_budget(world: World, rows: int, threads: list[str]) -> None:
    tasks, before = [world.schedule() for _ in range(rows)], set(threading.enumerate())
    world.run(*tasks)
    assert [thread.name for thread in set(threading.enumerate()) - before] == threads
    assert world.statuses(tasks) == ["DONE"] * rows


def test_no_row_is_started_if_its_lease_may_be_over(make_world: MakeWorld) -> None:
    world = make_world(lease=0.2, _chunk_time_budget_s=0.05)
    tasks = [world.schedule() for _ in range(3)]
    # The answer to the claim took longer than the lease.
    world.after_claim = lambda: threading.Event().wait(0.3) and None
    report = world.run(*tasks)
    assert (report.ran, world.notes) == (0, [])
    assert world.statuses(tasks) == ["NOT_COMPLETE"] * 3


def test_a_settlement_is_tried_again_while_the_database_is_unavailable(world: World) -> None:
    fail_settlements(world, [StoreUnavailableError("away")] * 2)
    world.run(task := world.schedule())
    assert world.statuses([task]) == ["DONE"]
    assert world.count("settle.waits") == 2


def test_a_row_that_cannot_be_settled_does_not_affect_other_rows(world: World) -> None:
    tasks = [world.schedule() for _ in range(3)]
    fail_settlements(world, repeat(StoreError("refused")), of=tasks[1])
    with pytest.raises(StoreError):
        world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "RUNNING", "DONE"]
    assert len(world.notes) == 3
    assert (world.count("task.succeeded"), world.count("task.lease_lost")) == (2, 0)


# -- tag costs ------------------------------------------------------------------------------------


def size_after(*reports: Report) -> ChunkSize:
    size = ChunkSize(BUDGET_S, 200)
    for report in reports:
        rows, seconds = report.sample or (report.ran, report.seconds)
        size.learn(rows, seconds)
    return size


def mixed(make_world: MakeWorld, slow: Callable[[Any], object], **changes: Any) -> World:
    """Return a world whose tag "slow" was learned to outlast the time budget."""
    world = make_world(_chunk_time_budget_s=BUDGET_S, **changes)
    waits = threading.Event()

    def run(body: Any) -> None:
        if body == "learn":
            waits.wait(1.2 * 2 * BUDGET_S)
        else:
            slow(body)
            world.notes.append(body)

    world.delays.processor("slow")(run)
    world.run(world.schedule())
    world.run(world.schedule("slow", "learn"))
    world.notes.clear()
    return world


@pytest.mark.parametrize(("priority", "order"), [(0, [1, 2, 0]), (1, [0, 1, 2])])
def test_quick_rows_run_before_a_slow_one_that_leaves_no_time_unless_its_priority_is_higher(
    make_world: MakeWorld, priority: int, order: list[int]
) -> None:
    world = mixed(make_world, lambda body: None)
    slow = world.schedule("slow", 0, priority=priority)
    world.run(slow, world.schedule(body=1), world.schedule(body=2))
    assert world.notes == order


def test_rows_that_fit_the_time_budget_run_by_their_due_times(make_world: MakeWorld) -> None:
    world = make_world()

    def wait(body: Any) -> None:
        threading.Event().wait(0.01)
        world.notes.append(body)

    world.delays.processor("slower")(wait)
    world.run(world.schedule("slower"), world.schedule())
    world.run(*[world.schedule(tag, tag) for tag in ("slower", "note", "slower")])
    assert world.notes[-3:] == ["slower", "note", "slower"]


def outlasting(make_world: MakeWorld) -> World:
    """Return such a world in which a row of the tag runs until its time budget is over."""

    def outlast(body: Any) -> None:
        wait_until(lambda: world.count("chunk.gave_back"), 5, "the end of the time budget")

    world = mixed(make_world, outlast)
    return world


def test_a_slow_row_gives_back_slow_rows_and_no_quick_ones(make_world: MakeWorld) -> None:
    world = outlasting(make_world)
    slow = [world.schedule("slow", number) for number in range(3)]
    quick = [world.schedule(body="quick") for _ in range(20)]
    report = world.run(*slow, *quick)
    assert world.statuses(quick) == ["DONE"] * 20
    assert world.statuses(slow) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert report.ran == 21
    assert report.sample is not None
    assert report.sample.rows == 23, "the rows that were given back count as what they would take"
    assert report.sample.seconds == pytest.approx(3 * BUDGET_S, rel=0.5)


def test_a_slow_row_counts_as_one_time_budget(make_world: MakeWorld) -> None:
    world = mixed(make_world, lambda body: threading.Event().wait(4 * BUDGET_S))
    quick = [world.schedule() for _ in range(19)]
    report = world.run(*quick, world.schedule("slow"))
    assert report.ran == 20
    assert report.seconds > 4 * BUDGET_S
    assert size_after(report, report).rows > 10, "with the whole time it would be 5"


def test_a_chunk_of_slow_rows_makes_the_next_one_small(make_world: MakeWorld) -> None:
    world = outlasting(make_world)
    quick = Report(200, 200, 0.0002)
    report = world.run(*[world.schedule("slow", number) for number in range(40)])
    assert report.ran == 1
    assert size_after(quick, report).rows == 1
    assert size_after(quick, Report(40, 1, report.seconds)).rows > 1, "by the row that ran alone"


def test_unknown_tags_are_not_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[str] = []
    monkeypatch.setattr(TagCosts, "learn", lambda self, tag, *_: learned.append(tag) or 1.0)
    world.run(world.schedule("of another release"), world.schedule())
    assert learned == ["note"]


# -- tags without a processor --------------------------------------------------------------------


#: The tolerance for retry delays, which depend on the time of the measurement.
MOMENT = timedelta(seconds=0.2)
AGES = [(0.0, 5.0), (30.0, 5.0), (100.0, 10.0), (3600.0, 360.0), (24 * 3600.0, 600.0)]


@pytest.mark.parametrize(("age_s", "wait_s"), AGES)
def test_a_task_without_a_processor_waits_a_tenth_of_its_age_and_never_fails(
    world: World, age_s: float, wait_s: float
) -> None:
    task = world.schedule("nobody")
    since = world.now() - timedelta(seconds=age_s)
    world.change(task, create_time=since, expected_time=since)
    world.broker.lose()
    before = world.now()
    world.run(world.read(task))
    after = world.read(task)
    assert (after.status, after.runs, after.version) == (Status.NOT_COMPLETE, 0, 2)
    known = "no such processor, tag=nobody (this worker knows: delaytasks.callback, "
    assert known in (after.error or "")
    ended = world.now()
    assert before - MOMENT <= after.expected_time - timedelta(seconds=wait_s) <= ended + MOMENT
    assert world.told("task.no_processor")[0]["tag"] == "nobody"
    near = wait_s <= (world.delays.settings.horizon_s or 0)
    assert world.broker.ids == ([task.id] if near else []), "armed again when it is near"


@pytest.mark.parametrize("outcome", [Retry(after=1), Snooze(1)])
def test_a_task_whose_processor_vanished_is_tried_again_soon(world: World, outcome: object) -> None:
    """The delay is a tenth of its lateness, whatever its age is."""
    world.delays.processor("gone", retries="1s 1s")(lambda body: outcome)
    task = world.schedule("gone", delay=60)
    world.change(task, create_time=world.now() - timedelta(days=2))
    for _ in range(2):
        world.change(task, expected_time=world.now() - timedelta(seconds=1))
        world.run(world.read(task))
        world.runtime.registry._processors.pop("gone", None)
    wait_s = (world.read(task).expected_time - world.now()).total_seconds()
    assert wait_s == pytest.approx(DEFER_MIN_S, abs=1)


# -- rows with a lost lease ----------------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> ManualMonotonic:
    """The time by which the clock of the runner is ahead."""
    passed = ManualMonotonic()
    passed.at = 0.0
    monkeypatch.setattr(runner, "monotonic", lambda: time.monotonic() + passed.at)
    return passed


def test_recovered_rows_share_the_time_of_a_backlog(world: World, ahead: ManualMonotonic) -> None:
    def wait(seconds: float) -> None:
        world.notes.append(f"waits {seconds:g}")
        ahead.at += seconds

    world.delays.processor("wait")(wait)
    abandoned = [world.schedule("wait", 60), world.schedule(body="lapsed")]
    for lapses, task in enumerate(abandoned, 1):
        world.change(task, lapses=lapses)
    for number in range(20):
        world.schedule(body=number)

    def drain(most: int) -> list[Any]:
        world.notes.clear()
        assert world.drain(most=most).is_full
        return world.notes

    assert drain(2) == [0, 1], "that there are some is not known yet"
    ahead.at += runner.RECOVERED_S
    assert drain(3) == [2, 3, "waits 60"]
    ahead.at += 59
    assert drain(2) == [4, 5], "others have half of the time"
    ahead.at += 2
    assert drain(1) == ["lapsed"]
    ahead.at += runner.RECOVERED_S
    assert drain(2) == [6], "there was none"
    assert drain(2) == [7, 8]


def test_a_recovered_row_that_is_held_is_not_counted(world: World, ahead: ManualMonotonic) -> None:
    world.limit("limited", concurrency=1)
    world.delays.processor("limited")(world.notes.append)
    running, lapsed = world.schedule("limited"), world.schedule("limited")
    world.claim(running, by="worker-2")
    world.change(lapsed, lapses=1)
    for number in range(4):
        world.schedule(body=number)
    assert world.drain(most=2).is_full
    ahead.at += runner.RECOVERED_S
    assert world.drain(most=2).is_full
    assert world.statuses([lapsed]) == ["HELD"]
    assert not world.drain(most=2).is_full, "one row was left"


# -- entries that the claim does not return ------------------------------------------------------


def test_an_early_entry_is_returned_with_the_due_time_of_its_row(world: World) -> None:
    task = world.schedule(delay=20)
    report = world.worker().run_entries([Entry.of(task)._replace(due_us=0)])
    assert report.early == (Entry.of(task),)
    assert (report.claimed, world.notes) == (0, [])
    assert world.count("entry.dropped") == 0


def test_an_entry_that_is_early_within_the_clock_tolerance_is_waited_for(world: World) -> None:
    for _ in range(20):
        task = world.schedule(delay=0.02)
        report = world.run(task)
        assert (report.ran, report.early, world.statuses([task])) == (1, (), ["DONE"])
        done = world.read(task)
        assert done.execution_time is not None
        assert done.execution_time >= task.expected_time, "and not run early"


def test_an_entry_beyond_the_horizon_is_dropped(make_world: MakeWorld) -> None:
    world = make_world(horizon=10)
    task = world.schedule(delay=60)
    report = world.run(task)
    assert (report.early, world.count("entry.dropped")) == ((), 1)
    forever = make_world(horizon=None)
    task = forever.schedule(delay=86400)
    assert [entry.id for entry in forever.run(task).early] == [task.id]


def test_entries_of_rows_that_changed_are_dropped_and_counted(world: World) -> None:
    cancelled, moved, running, done, held = (world.schedule() for _ in range(5))
    good = world.schedule(body="good")
    world.store.tasks.cancel(cancelled.id)
    world.store.tasks.reschedule(moved.id, world.now())
    world.change(running, **RUNNING)
    world.change(done, status=int(Status.DONE))
    world.change(held, status=int(Status.HELD))
    unknown = replace(good, id=good.id + 1)
    report = world.run(cancelled, moved, running, done, held, unknown, good)
    assert (report.ran, report.early, world.notes) == (1, (), ["good"])
    assert world.told("entry.dropped") == [{"count": 6}]


def test_a_stale_entry_does_not_replace_the_current_one(world: World) -> None:
    task = world.schedule(delay=20)
    entry = Entry.of(task)
    for order in ([entry, entry._replace(version=7)], [entry._replace(version=7), entry]):
        assert world.worker().run_entries(order).early == (entry,)


def test_the_reported_duration_of_a_chunk_is_the_time_of_its_processors(world: World) -> None:
    world.after_claim = lambda: threading.Event().wait(0.2) and None
    world.before_settle = lambda settlements: threading.Event().wait(0.2) and None
    began = time.monotonic()
    report = world.run(*[world.schedule() for _ in range(3)])
    assert report.seconds < 0.1 < 0.4 < time.monotonic() - began


# -- a process claims its next chunk and settles its last one while a chunk runs -------------------

# -- in a backlog, a runner claims the next chunk while the current one runs ----------------------


@pytest.fixture
def single(make_world: MakeWorld) -> World:
    """A world whose chunks have one row."""
    return make_world(_chunk_max=1)


def drain(world: World, limit: int = 1) -> Report:
    return world.drain(most=limit, continue_s=60.0)


def backlog(world: World, rows: int, tag: str = "note") -> list[DelayedTask]:
    return [world.schedule(tag, body=number) for number in range(rows)]


def test_a_backlog_is_run_chunk_after_chunk_until_it_is_empty(world: World) -> None:
    tasks = backlog(world, 7)
    report = drain(world, limit=2)
    assert (report.claimed, report.ran, report.is_full) == (7, 7, False)
    assert world.notes == list(range(7))
    assert world.statuses(tasks) == ["DONE"] * 7


def test_while_a_chunk_runs_the_last_one_is_settled_and_one_more_is_claimed(single: World) -> None:
    expected = ["DONE", "RUNNING", "RUNNING", "NOT_COMPLETE"]

    def look(body: int) -> None:
        if body == 1:
            wait_until(lambda: single.statuses(tasks) == expected, 5, "the other thread")

    single.delays.processor("look")(look)
    tasks = backlog(single, 4, "look")
    assert drain(single).ran == 4
    assert single.statuses(tasks) == ["DONE"] * 4


def test_a_chunk_that_waits_for_a_slow_row_is_given_back(
    make_world: MakeWorld, gate: Gate, pool: Executor
) -> None:
    world = make_world(_chunk_time_budget_s=0.1, _chunk_max=1)
    world.delays.processor("slow")(gate)
    tasks = backlog(world, 3, "slow")
    running = pool.submit(drain, world)
    wait_until(lambda: world.statuses(tasks)[1] == "RUNNING", 5, "the claim ahead")
    wait_until(lambda: world.statuses(tasks)[1] == "NOT_COMPLETE", 5, "its return")
    assert world.read(tasks[1]).runs == 0
    gate.is_open.set()
    running.result(5)
    assert world.statuses(tasks[:1]) == ["DONE"]


def test_the_chunk_after_a_slow_row_is_claimed_shortly_before(make_world: MakeWorld) -> None:
    world = make_world(_chunk_time_budget_s=0.2, _chunk_max=1)
    is_claimed, seen = threading.Event(), list[bool]()

    def slow(number: int) -> None:
        if number == 0:
            time.sleep(1)  # the process learns this
            return
        is_claimed.clear()
        time.sleep(0.05)  # a claim that does not wait is done by now
        seen.extend([is_claimed.is_set(), is_claimed.wait(5)])

    world.delays.processor("slow")(slow)
    world.run(world.schedule("slow", 0))
    world.after_claim = is_claimed.set
    tasks = [world.schedule("slow", 1), world.schedule()]
    drain(world)
    assert seen == [False, True]
    assert world.statuses(tasks) == ["DONE", "DONE"]


def test_other_tasks_that_wait_end_the_backlog_of_this_process(single: World) -> None:
    others = [False, True]
    single.worker(others_wait=SimpleNamespace(is_so=lambda: others.pop(0)))
    tasks = backlog(single, 4)
    report = drain(single)
    assert (report.ran, report.is_full) == (2, True)
    assert single.statuses(tasks) == ["DONE", "DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


def test_nothing_is_claimed_ahead_of_a_row_that_may_end_the_process(single: World) -> None:
    seen: list[list[str]] = []
    tasks: list[DelayedTask] = []
    single.delays.processor("limited", time_limit=60)(lambda _: seen.append(single.statuses(tasks)))
    tasks += [single.schedule(), single.schedule("limited"), single.schedule()]
    report = drain(single)
    assert seen == [["DONE", "RUNNING", "NOT_COMPLETE"]]
    assert (report.ran, report.is_full) == (2, True)


def test_a_worker_that_stops_gives_back_the_rows_that_it_claimed_ahead(single: World) -> None:

    def stop(body: Any) -> None:
        wait_until(lambda: single.statuses(tasks)[2] == "RUNNING", 5, "the claim ahead")
        raise WorkerShutdown(0)

    single.delays.processor("stop")(stop)
    tasks = [single.schedule(), single.schedule("stop"), single.schedule(), single.schedule()]
    with pytest.raises(WorkerShutdown):
        drain(single)
    assert single.statuses(tasks) == ["DONE", "RUNNING", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert single.read(tasks[2]).runs == 0


def test_a_claim_ahead_that_fails_does_not_affect_the_chunk_that_runs(single: World) -> None:
    claims: list[int] = []

    def fail_third() -> None:
        claims.append(1)
        if len(claims) == 3:
            raise StoreUnavailableError("away")

    single.after_claim = fail_third
    tasks = backlog(single, 4)
    with pytest.raises(StoreUnavailableError):
        drain(single)
    assert single.statuses(tasks) == ["DONE", "DONE", "RUNNING", "NOT_COMPLETE"], (
        "the answer to the third claim was lost, so that its lease has to end"
    )


def test_a_settlement_that_fails_does_not_affect_the_chunk_that_runs(make_world: MakeWorld) -> None:
    world = make_world(_chunk_max=1, lease=2, _chunk_time_budget_s=0.1)
    tasks = backlog(world, 3)
    fail_settlements(world, repeat(StoreUnavailableError("away")), of=tasks[0])
    with pytest.raises(StoreUnavailableError):
        drain(world)
    assert world.statuses(tasks) == ["RUNNING", "DONE", "NOT_COMPLETE"]


def test_rows_of_a_limited_tag_end_the_backlog_of_this_process(single: World) -> None:
    single.limit("limited", concurrency=1)
    single.delays.processor("limited")(single.notes.append)
    tasks = [single.schedule("limited"), single.schedule(), single.schedule()]
    assert drain(single).ran == 1
    assert single.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


# -- settling later -------------------------------------------------------------------------------


def others(wait: bool) -> Any:
    """Return whether the main process has tasks for this process."""
    return SimpleNamespace(is_so=lambda: wait)


@pytest.fixture
def busy(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose chunks are settled later, also those of empty processors."""
    monkeypatch.setattr(runner, "SLOW_ROW_S", 0.0)
    world = make_world()
    world.worker(may_detach=True, others_wait=others(True))
    return world


@pytest.mark.parametrize("tag", ["note", "concurrent"])
def test_a_chunk_reports_before_it_is_settled_and_the_next_ones_run(
    busy: World, gate: Gate, tag: str
) -> None:
    """At most one chunk is settled later."""
    busy.delays.processor("concurrent", in_flight=2)(busy.notes.append)
    tasks = backlog(busy, 4, tag)

    def hold_first(settlements: Sequence[Settlement]) -> None:
        assert settlements[0].task.id != tasks[0].id or gate.is_open.wait(10)

    busy.before_settle = hold_first
    assert [busy.run(task).ran for task in tasks] == [1] * 4
    assert busy.notes == [0, 1, 2, 3]
    assert busy.statuses(tasks) == ["RUNNING", "DONE", "DONE", "DONE"]
    gate.is_open.set()
    wait_until(lambda: busy.statuses(tasks) == ["DONE"] * 4, 5, "the first settlement")


def test_a_process_that_ends_waits_for_its_settlements(
    busy: World, gate: Gate, pool: Executor
) -> None:
    busy.before_settle = gate
    busy.run(task := busy.schedule())
    finished = pool.submit(busy.worker().finish)
    gate.wait_for(1)
    assert not finished.done()
    gate.is_open.set()
    finished.result(5)
    assert busy.statuses([task]) == ["DONE"]


def test_a_recovered_row_may_kill_the_process_and_waits_for_the_settlement(busy: World) -> None:
    other, seen = busy.schedule(), list[list[str]]()
    busy.delays.processor("poison")(lambda _: seen.append(busy.statuses([other])))
    recovered = busy.schedule("poison")
    busy.change(recovered, lapses=1)
    busy.run(other)
    busy.run(busy.read(recovered))
    assert seen == [["DONE"]]


@pytest.mark.parametrize(
    ("tag", "slow_row_s", "options"),
    [
        ("limited", 0.0, {}),  # its waitlist waits for a slot
        ("note", 10.0, {}),  # quick rows
        ("note", 0.0, {"may_detach": False}),
        ("note", 0.0, {"others_wait": others(False)}),
    ],
)
def test_otherwise_a_chunk_is_settled_before_it_reports(
    world: World, monkeypatch: pytest.MonkeyPatch, tag: str, slow_row_s: float, options: Any
) -> None:
    monkeypatch.setattr(runner, "SLOW_ROW_S", slow_row_s)
    world.worker(**{"may_detach": True, "others_wait": others(True), **options})
    world.limit("limited", concurrency=1)
    world.delays.processor("limited")(world.notes.append)
    threads: list[threading.Thread] = []
    world.before_settle = lambda _: threads.append(threading.current_thread())
    world.run(*(tasks := backlog(world, 2, tag)))
    assert set(threads) == {threading.current_thread()}
    assert world.statuses(tasks) == ["DONE"] * 2
