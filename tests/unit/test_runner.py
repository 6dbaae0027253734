"""A runner claims, runs and settles the rows of a chunk on SQLite, within its time and lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

from delaytasks import DelayedTask, Retry, Snooze, Status, StoreError, StoreUnavailableError
from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.core.text import DEFER_MIN_S
from delaytasks.core.workers import ChunkSize
from delaytasks.execution import runner
from delaytasks.execution.chunk import Chunk, TimeBudget
from delaytasks.execution.chunk_runner import TagCosts
from delaytasks.execution.runner import Report
from tests.waiting import wait_until
from tests.world import RUNNING, MakeWorld, World

# -- run and settle the rows of a chunk on SQLite, within its time and its lease ------------------


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


FAILURES = [
    ValueError("as asked"),
    ValueError("\x00 \ud800"),
    UnsayableError(),
    SystemExit(3),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_processor_that_raises_fails_only_its_row(world: World, error: BaseException) -> None:
    def fail(body: Any) -> None:
        raise error

    world.delays.processor("fail")(fail)
    tasks = [world.schedule(), world.schedule("fail"), world.schedule()]
    world.run(*tasks)
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
    task = world.schedule("fail")
    world.run(task)
    text = world.read(task).error or ""
    assert len(text.encode()) <= 2000
    assert "characters left out" in text


def test_a_worker_that_stops_settles_finished_rows_and_gives_back_the_rest(world: World) -> None:
    def stop(body: Any) -> None:
        raise WorkerShutdown(0)

    world.delays.processor("stop")(stop)
    tasks = [
        world.schedule(priority=9),
        world.schedule("stop", priority=5),
        world.schedule(),
        world.schedule(),
    ]
    world.broker.lose()
    with pytest.raises(WorkerShutdown):
        world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "RUNNING", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert [world.read(task).runs for task in tasks[2:]] == [0, 0]
    assert sorted(world.broker.ids) == sorted(task.id for task in tasks[2:])


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
    tasks = [
        world.schedule(),
        world.schedule("look"),
        world.schedule("look"),
        world.schedule("soft"),
    ]
    assert world.run(*tasks).ran == 4
    assert seen == {
        tasks[1].id: ["DONE", "RUNNING", "RUNNING", "DONE"],
        tasks[2].id: ["DONE", "DONE", "RUNNING", "DONE"],
    }, "those with a hard limit run last, each when all before it is settled"
    assert settled == [2, 1, 1]


def test_a_row_that_was_about_to_begin_is_given_back_after_a_failed_settlement(
    world: World,
) -> None:
    world.delays.processor("hard", time_limit=60)(world.notes.append)
    tasks = [world.schedule(body="first"), world.schedule("hard", "second")]
    # The second error is for the settlement of the single row.
    failures = iter([StoreError("refused")] * 2)

    def fail(settlements: Sequence[Settlement]) -> None:
        for error in failures:
            raise error

    world.before_settle = fail
    with pytest.raises(StoreError, match="refused"):
        world.run(*tasks)
    assert world.notes == ["first"]
    assert world.statuses(tasks) == ["DONE", "NOT_COMPLETE"]


@pytest.mark.parametrize("limits", [{"soft_time_limit": 60}, {"time_limit": 60}])
def test_rows_with_time_limits_are_deferred_if_the_pool_cannot_keep_them(
    world: World, limits: dict[str, Any]
) -> None:
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


def test_after_the_time_budget_rows_are_given_back_and_results_settled_during_a_run(
    make_world: MakeWorld,
) -> None:
    world = make_world(_chunk_time_budget_s=0.1)
    began, goes_on = threading.Event(), threading.Event()

    def wait(body: Any) -> None:
        began.set()
        assert goes_on.wait(10)

    world.delays.processor("wait")(wait)
    done = world.schedule(priority=9)
    slow = world.schedule("wait", priority=5)
    rest = [world.schedule(body=n) for n in range(3)]
    world.broker.lose()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(world.run, done, slow, *rest)
        try:
            assert began.wait(5)
            assert world.statuses(rest) == ["RUNNING"] * 3, "all are ours within the box"
            wait_until(
                lambda: world.statuses(rest) == ["NOT_COMPLETE"] * 3, 5, "the rest to be given back"
            )
            assert world.statuses([done, slow]) == ["DONE", "RUNNING"]
            assert not running.done()
        finally:
            goes_on.set()
        assert running.result(5).ran == 2
    assert world.statuses([slow]) == ["DONE"]
    assert [world.read(task).runs for task in rest] == [0, 0, 0], (
        "what did not start was no attempt"
    )
    assert sorted(world.broker.armed) == sorted(Entry.of(world.read(task)) for task in rest)
    assert world.count("chunk.gave_back") == 3
    assert world.count("task.lease_lost") == 0
    assert world.notes == [None]
    assert world.run(*(world.read(task) for task in rest)).ran == 3, "and they run elsewhere"


def test_no_row_is_started_if_its_lease_may_be_over(make_world: MakeWorld) -> None:
    world = make_world(lease=0.2, _chunk_time_budget_s=0.05)
    tasks = [world.schedule() for _ in range(3)]
    # The answer to the claim took longer than the lease.
    world.after_claim = lambda: threading.Event().wait(0.3) and None
    report = world.run(*tasks)
    assert (report.ran, world.notes) == (0, [])
    assert world.statuses(tasks) == ["NOT_COMPLETE"] * 3


def test_a_settlement_is_tried_again_while_the_database_is_unavailable(world: World) -> None:
    failures = [StoreUnavailableError("away"), StoreUnavailableError("away")]

    def fail(settlements: Sequence[Settlement]) -> None:
        if failures:
            raise failures.pop()

    world.before_settle = fail
    task = world.schedule()
    world.run(task)
    assert world.statuses([task]) == ["DONE"]
    assert world.count("settle.waits") == 2


def test_a_row_that_cannot_be_settled_does_not_affect_other_rows(world: World) -> None:
    tasks = [world.schedule() for _ in range(3)]

    def refuse(settlements: Sequence[Settlement]) -> None:
        if tasks[1].id in [settlement.task.id for settlement in settlements]:
            raise StoreError("refused")

    world.before_settle = refuse
    with pytest.raises(StoreError):
        world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "RUNNING", "DONE"]
    assert len(world.notes) == 3
    assert (world.count("task.succeeded"), world.count("task.lease_lost")) == (2, 0)


# -- tag costs ------------------------------------------------------------------------------------


BUDGET_S = 0.1


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


def test_quick_rows_run_before_a_slow_one_that_leaves_no_time_for_them(
    make_world: MakeWorld,
) -> None:
    world = mixed(make_world, lambda body: None)
    world.run(world.schedule("slow", 0), world.schedule(body=1), world.schedule(body=2))
    assert world.notes == [1, 2, 0]


def test_a_quick_row_does_not_overtake_a_slow_one_of_a_higher_priority(
    make_world: MakeWorld,
) -> None:
    world = mixed(make_world, lambda body: None)
    tasks = [world.schedule("slow", 0, priority=1), world.schedule(body=1)]
    world.run(*tasks)
    assert world.notes == [0, 1]


def test_rows_that_fit_the_time_budget_run_in_the_order_of_their_due_times(
    make_world: MakeWorld,
) -> None:
    world = make_world()

    def wait(body: Any) -> None:
        threading.Event().wait(0.01)
        world.notes.append(body)

    world.delays.processor("slower")(wait)
    world.run(world.schedule("slower"), world.schedule())
    world.run(*[world.schedule(tag, tag) for tag in ("slower", "note", "slower")])
    assert world.notes[-3:] == ["slower", "note", "slower"]


def test_a_slow_row_gives_back_slow_rows_and_no_quick_ones(make_world: MakeWorld) -> None:
    def outlast(body: Any) -> None:
        wait_until(lambda: world.count("chunk.gave_back"), 5, "the end of the time budget")

    world = mixed(make_world, outlast)
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


def test_a_chunk_of_slow_rows_makes_the_next_one_small_although_only_one_row_ran(
    make_world: MakeWorld,
) -> None:
    def outlast(body: Any) -> None:
        wait_until(lambda: world.count("chunk.gave_back"), 5, "the end of the time budget")

    world = mixed(make_world, outlast)
    quick = Report(200, 200, 0.0002)
    report = world.run(*[world.schedule("slow", number) for number in range(40)])
    assert report.ran == 1
    assert size_after(quick, report).rows == 1
    assert size_after(quick, Report(40, 1, report.seconds)).rows > 1, "by the row that ran alone"


def test_rows_without_a_processor_are_not_remembered(make_world: MakeWorld) -> None:
    world = make_world(_chunk_time_budget_s=BUDGET_S, tags="any")
    learned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        learn = TagCosts.learn

        def note(self: TagCosts, tag: str, rows: int, seconds: float) -> float:
            learned.append(tag)
            return learn(self, tag, rows, seconds)

        patch.setattr(TagCosts, "learn", note)
        world.run(world.schedule("of another release"), world.schedule())
    assert learned == ["note"]


# -- A task that cannot run here is retried after a tenth of its lateness, within limits ----------


TWO_DAYS = timedelta(days=2)


def wait_s(world: World, task: DelayedTask) -> float:
    """Return the time until the next attempt, in seconds."""
    return (world.read(task).expected_time - world.now()).total_seconds()


def made_long_ago(world: World, tag: str = "unknown", **options: object) -> DelayedTask:
    task = world.schedule(tag, delay=60, **options)
    assert task.create_time is not None
    world.change(task, create_time=task.create_time - TWO_DAYS)
    return world.read(task)


def make_due(world: World, task: DelayedTask, late_s: float) -> DelayedTask:
    """Move the due time as a reschedule, a touch, a retry or a snooze does."""
    world.change(task, expected_time=world.now() - timedelta(seconds=late_s))
    return world.read(task)


@pytest.mark.parametrize(
    "outcome", [lambda: Retry(after=1), lambda: Snooze(1)], ids=["retry", "snooze"]
)
def test_a_task_that_ran_before_its_processor_vanished_is_tried_again_soon(
    world: World, outcome: Callable[[], object]
) -> None:
    world.delays.processor("gone", retries="1s 1s")(lambda body: outcome())
    task = make_due(world, made_long_ago(world, "gone"), 1)
    world.run(task)
    del world.runtime.registry._processors["gone"]
    task = make_due(world, task, 1)
    world.run(task)
    assert wait_s(world, task) == pytest.approx(DEFER_MIN_S, abs=1)


# -- one thread ends the time budgetes of all chunks of a process ---------------------------------


BOX_S = 0.1


class Boxes:
    def __init__(self, budget_s: float = BOX_S) -> None:
        self.expired: list[Chunk] = []
        self.errors: list[Exception] = []
        self.box = TimeBudget(budget_s, self._expire, self.errors.append)

    def _expire(self, chunk: Chunk) -> None:
        self.expired.append(chunk)

    def chunk(self) -> Chunk:
        chunk = Chunk([], 60, 60)
        self.box.open(chunk)
        return chunk


@pytest.mark.parametrize(
    "rest_s", [0, BOX_S / 2, BOX_S * 3], ids=["at once", "while it rests", "when it sleeps"]
)
def test_an_open_chunk_is_reported_after_its_time_budget_whatever_ran_before(rest_s: float) -> None:
    boxes = Boxes()
    boxes.box.close(boxes.chunk())
    time.sleep(rest_s)
    began, chunk = monotonic(), boxes.chunk()
    wait_until(lambda: boxes.expired, 5, "the end of its time")
    assert boxes.expired == [chunk]
    assert monotonic() - began >= BOX_S


def test_chunks_that_end_in_time_wake_no_thread_and_are_not_reported() -> None:
    boxes = Boxes(budget_s=5)
    boxes.box.close(boxes.chunk())
    woken = []
    boxes.box._changed.notify = lambda: woken.append(1)  # type: ignore[assignment, method-assign, misc]
    for _ in range(50):
        chunk = boxes.chunk()
        time.sleep(0.005)
        boxes.box.close(chunk)
    assert woken == []
    assert boxes.expired == []


def test_an_error_is_reported_and_the_next_chunk_is_watched() -> None:
    boxes = Boxes()
    boxes.box._expire = lambda chunk: 1 / 0  # type: ignore[assignment]
    boxes.chunk()
    wait_until(lambda: boxes.errors, 5, "the error")
    boxes.box._expire = boxes._expire
    chunk = boxes.chunk()
    wait_until(lambda: boxes.expired == [chunk], 5, "the next one")


@pytest.mark.parametrize(("rows", "threads"), [(1, []), (2, ["delaytasks-time-budget"])])
def test_a_single_row_needs_no_thread_for_its_time_budget(
    world: World, rows: int, threads: list[str]
) -> None:
    tasks, before = [world.schedule() for _ in range(rows)], set(threading.enumerate())
    world.run(*tasks)
    assert [thread.name for thread in set(threading.enumerate()) - before] == threads
    assert world.statuses(tasks) == ["DONE"] * rows


# -- A runner handles claimed rows, and entries whose rows it cannot claim ------------------------


#: The tolerance for retry delays, which depend on the time of the measurement.
MOMENT = timedelta(seconds=0.2)


# -- tags without a processor --------------------------------------------------------------------
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
    assert "no such processor, tag=nobody (this worker knows: delaytasks.callback, " in (
        after.error or ""
    )
    ended = world.now()
    assert before - MOMENT <= after.expected_time - timedelta(seconds=wait_s) <= ended + MOMENT
    assert world.told("task.no_processor")[0]["tag"] == "nobody"
    near = wait_s <= (world.delays.settings.horizon_s or 0)
    assert world.broker.ids == ([task.id] if near else []), "armed again when it is near"


# -- rows with a lost lease ----------------------------------------------------------------------


def test_recovered_rows_get_a_share_of_the_time_of_a_backlog(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr(runner, "monotonic", lambda: monotonic() + passed)

    def wait(seconds: float) -> None:
        nonlocal passed
        world.notes.append(f"waits {seconds:g}")
        passed += seconds

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
    passed += runner.RECOVERED_S
    assert drain(3) == [2, 3, "waits 60"]
    passed += 59
    assert drain(2) == [4, 5], "others have half of the time"
    passed += 2
    assert drain(1) == ["lapsed"]
    passed += runner.RECOVERED_S
    assert drain(2) == [6], "there was none"
    assert drain(2) == [7, 8]


def test_a_recovered_row_that_is_held_is_not_counted_for_the_next_chunk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr(runner, "monotonic", lambda: monotonic() + passed)
    world.store.policies.set("tag", "limited", {"concurrency": 1}, "a test")
    world.delays.processor("limited")(world.notes.append)
    running, lapsed = world.schedule("limited"), world.schedule("limited")
    world.claim(running, by="worker-2")
    world.change(lapsed, lapses=1)
    for number in range(4):
        world.schedule(body=number)
    assert world.drain(most=2).is_full
    passed += runner.RECOVERED_S
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
