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

from delaytasks import DelayTask, Retry, Snooze, Status
from delaytasks.core.clock import monotonic
from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.core.text import DEFER_MIN_S
from delaytasks.core.workers import ChunkSize
from delaytasks.execution import runner
from delaytasks.execution.chunk import Chunk, TimeBudget
from delaytasks.execution.chunk_runner import TagCosts
from delaytasks.execution.runner import Report
from tests.conformance.store_rows import RUNNING
from tests.recording import RunnerHarness
from tests.unit.conftest import Make
from tests.waiting import wait_until

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
def test_a_processor_that_raises_fails_only_its_row(
    bench: RunnerHarness, error: BaseException
) -> None:
    def fail(body: Any) -> None:
        raise error

    bench.registry.processor("fail")(fail)
    tasks = [bench.schedule(), bench.schedule("fail"), bench.schedule()]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "FAILED", "DONE"]
    text = bench.now(tasks[1]).error or ""
    assert type(error).__name__ in text
    assert "\x00" not in text
    assert [fields["id"] for fields in bench.named("task.failed")] == [tasks[1].id]


def test_an_error_text_is_bounded(make: Make) -> None:
    bench = make(_max_error_bytes=2000)

    def fail(body: Any) -> None:
        raise ValueError("é" * 100_000)

    bench.registry.processor("fail")(fail)
    task = bench.schedule("fail")
    bench.run(task)
    text = bench.now(task).error or ""
    assert len(text.encode()) <= 2000
    assert "characters left out" in text


def test_a_worker_that_stops_settles_finished_rows_and_gives_back_the_rest(
    bench: RunnerHarness,
) -> None:
    def stop(body: Any) -> None:
        raise WorkerShutdown(0)

    bench.registry.processor("stop")(stop)
    tasks = [
        bench.schedule(priority=9),
        bench.schedule("stop", priority=5),
        bench.schedule(),
        bench.schedule(),
    ]
    with pytest.raises(WorkerShutdown):
        bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "RUNNING", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert [bench.now(task).attempts for task in tasks[2:]] == [0, 0]
    assert sorted(bench.timer.ids) == sorted(task.id for task in tasks[2:])


def test_the_highest_priority_runs_first_then_the_oldest(bench: RunnerHarness) -> None:
    tasks = [bench.schedule(body=f"{priority}", priority=priority) for priority in (0, 9, 5)]
    tasks.append(bench.schedule(body="older", priority=5))
    bench.change(tasks[-1], expected_time=bench.clock.now() - timedelta(seconds=60))
    bench.run(*tasks)
    assert bench.ran == ["9", "older", "5", "0"]


# -- time limits ---------------------------------------------------------------------------------


def test_finished_rows_are_settled_before_a_row_that_may_be_killed_begins(
    bench: RunnerHarness,
) -> None:
    seen: dict[int, list[str]] = {}

    def look(body: Any, task: DelayTask) -> None:
        seen[task.id] = bench.statuses(tasks)

    bench.registry.processor("look", time_limit=60)(look)
    bench.registry.processor("soft", soft_time_limit=60)(bench.ran.append)
    settled: list[int] = []
    bench.claims.before_settle = lambda settlements: settled.append(len(settlements))
    tasks = [
        bench.schedule(),
        bench.schedule("look"),
        bench.schedule("look"),
        bench.schedule("soft"),
    ]
    assert bench.run(*tasks).ran == 4
    assert seen == {
        tasks[1].id: ["DONE", "RUNNING", "RUNNING", "DONE"],
        tasks[2].id: ["DONE", "DONE", "RUNNING", "DONE"],
    }, "those with a hard limit run last, each when all before it is settled"
    assert settled == [2, 1, 1]


def test_a_row_that_was_about_to_begin_is_given_back_after_a_failed_settlement(
    bench: RunnerHarness,
) -> None:
    bench.registry.processor("hard", time_limit=60)(bench.ran.append)
    tasks = [bench.schedule(body="first"), bench.schedule("hard", "second")]
    # The second error is for the settlement of the single row.
    failures = iter([StoreError("refused")] * 2)

    def fail(settlements: Sequence[Settlement]) -> None:
        for error in failures:
            raise error

    bench.claims.before_settle = fail
    with pytest.raises(StoreError, match="refused"):
        bench.run(*tasks)
    assert bench.ran == ["first"]
    assert bench.statuses(tasks) == ["DONE", "NOT_COMPLETE"]


@pytest.mark.parametrize("limits", [{"soft_time_limit": 60}, {"time_limit": 60}])
def test_rows_with_time_limits_are_deferred_if_the_pool_cannot_keep_them(
    bench: RunnerHarness, limits: dict[str, Any]
) -> None:
    bench.registry.processor("limited", **limits)(bench.ran.append)
    tasks = [bench.schedule("limited", "never"), bench.schedule(body="free")]
    runner = bench.make_runner(keeps_time_limits=False)
    runner.run([bench.entry(task) for task in tasks])
    assert bench.ran == ["free"]
    left = bench.now(tasks[0])
    assert (left.status, left.attempts) == (Status.NOT_COMPLETE, 0)
    assert 4 < (left.expected_time - bench.clock.now()).total_seconds() <= 5
    assert "let a worker with -P prefork serve the queue default" in (left.error or "")
    assert [fields["tag"] for fields in bench.named("task.no_time_limits")] == ["limited"]


# -- the time budget and the lease ---------------------------------------------------------------


def test_after_the_time_budget_rows_are_given_back_and_results_settled_during_a_run(
    make: Make,
) -> None:
    bench = make(_chunk_time_budget_s=0.1)
    began, goes_on = threading.Event(), threading.Event()

    def wait(body: Any) -> None:
        began.set()
        assert goes_on.wait(10)

    bench.registry.processor("wait")(wait)
    done = bench.schedule(priority=9)
    slow = bench.schedule("wait", priority=5)
    rest = [bench.schedule(body=n) for n in range(3)]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bench.run, done, slow, *rest)
        try:
            assert began.wait(5)
            assert bench.statuses(rest) == ["RUNNING"] * 3, "all are ours within the box"
            wait_until(
                lambda: bench.statuses(rest) == ["NOT_COMPLETE"] * 3, 5, "the rest to be given back"
            )
            assert bench.statuses([done, slow]) == ["DONE", "RUNNING"]
            assert not running.done()
        finally:
            goes_on.set()
        assert running.result(5).ran == 2
    assert bench.statuses([slow]) == ["DONE"]
    assert [bench.now(task).attempts for task in rest] == [0, 0, 0], (
        "what did not start was no attempt"
    )
    assert sorted(bench.timer.armed) == sorted(Entry.of(bench.now(task)) for task in rest)
    assert bench.events.counts["chunk.gave_back"] == 3
    assert bench.events.counts["task.lease_lost"] == 0
    assert bench.ran == [None]
    assert bench.run(*(bench.now(task) for task in rest)).ran == 3, "and they run elsewhere"


def test_no_row_is_started_if_its_lease_may_be_over(make: Make) -> None:
    bench = make(lease=0.2, _chunk_time_budget_s=0.05)
    tasks = [bench.schedule() for _ in range(3)]
    # The answer to the claim took longer than the lease.
    bench.claims.after_claim = lambda: threading.Event().wait(0.3) and None
    report = bench.run(*tasks)
    assert (report.ran, bench.ran) == (0, [])
    assert bench.statuses(tasks) == ["NOT_COMPLETE"] * 3


def test_a_settlement_is_tried_again_while_the_database_is_unavailable(
    bench: RunnerHarness,
) -> None:
    failures = [StoreUnavailableError("away"), StoreUnavailableError("away")]

    def fail(settlements: Sequence[Settlement]) -> None:
        if failures:
            raise failures.pop()

    bench.claims.before_settle = fail
    task = bench.schedule()
    bench.run(task)
    assert bench.statuses([task]) == ["DONE"]
    assert bench.events.counts["settle.waits"] == 2


def test_a_row_that_cannot_be_settled_does_not_affect_other_rows(bench: RunnerHarness) -> None:
    tasks = [bench.schedule() for _ in range(3)]

    def refuse(settlements: Sequence[Settlement]) -> None:
        if tasks[1].id in [settlement.task.id for settlement in settlements]:
            raise StoreError("refused")

    bench.claims.before_settle = refuse
    with pytest.raises(StoreError):
        bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "RUNNING", "DONE"]
    assert len(bench.ran) == 3
    assert (bench.events.counts["task.succeeded"], bench.events.counts["task.lease_lost"]) == (2, 0)


# -- tag costs ------------------------------------------------------------------------------------


BUDGET_S = 0.1


def size_after(*reports: Report) -> ChunkSize:
    size = ChunkSize(BUDGET_S, 200)
    for report in reports:
        rows, seconds = report.sample or (report.ran, report.seconds)
        size.learn(rows, seconds)
    return size


def mixed(make: Make, slow: Callable[[Any], object], **changes: Any) -> RunnerHarness:
    """Return a bench whose tag "slow" was learned to outlast the time budget."""
    bench = make(_chunk_time_budget_s=BUDGET_S, **changes)
    waits = threading.Event()

    def run(body: Any) -> None:
        if body == "learn":
            waits.wait(1.2 * 2 * BUDGET_S)
        else:
            slow(body)
            bench.ran.append(body)

    bench.registry.processor("slow")(run)
    bench.run(bench.schedule())
    bench.run(bench.schedule("slow", "learn"))
    bench.ran.clear()
    return bench


def test_quick_rows_run_before_a_slow_one_that_leaves_no_time_for_them(make: Make) -> None:
    bench = mixed(make, lambda body: None)
    bench.run(bench.schedule("slow", 0), bench.schedule(body=1), bench.schedule(body=2))
    assert bench.ran == [1, 2, 0]


def test_a_quick_row_does_not_overtake_a_slow_one_of_a_higher_priority(make: Make) -> None:
    bench = mixed(make, lambda body: None)
    tasks = [bench.schedule("slow", 0, priority=1), bench.schedule(body=1)]
    bench.run(*tasks)
    assert bench.ran == [0, 1]


def test_rows_that_fit_the_time_budget_run_in_the_order_of_their_due_times(make: Make) -> None:
    bench = make()

    def wait(body: Any) -> None:
        threading.Event().wait(0.01)
        bench.ran.append(body)

    bench.registry.processor("slower")(wait)
    bench.run(bench.schedule("slower"), bench.schedule())
    bench.run(*[bench.schedule(tag, tag) for tag in ("slower", "note", "slower")])
    assert bench.ran[-3:] == ["slower", "note", "slower"]


def test_a_slow_row_gives_back_slow_rows_and_no_quick_ones(make: Make) -> None:
    def outlast(body: Any) -> None:
        wait_until(lambda: bench.events.counts["chunk.gave_back"], 5, "the end of the time budget")

    bench = mixed(make, outlast)
    slow = [bench.schedule("slow", number) for number in range(3)]
    quick = [bench.schedule(body="quick") for _ in range(20)]
    report = bench.run(*slow, *quick)
    assert bench.statuses(quick) == ["DONE"] * 20
    assert bench.statuses(slow) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert report.ran == 21
    assert report.sample is not None
    assert report.sample.rows == 23, "the rows that were given back count as what they would take"
    assert report.sample.seconds == pytest.approx(3 * BUDGET_S, rel=0.5)


def test_a_slow_row_counts_as_one_time_budget(make: Make) -> None:
    bench = mixed(make, lambda body: threading.Event().wait(4 * BUDGET_S))
    quick = [bench.schedule() for _ in range(19)]
    report = bench.run(*quick, bench.schedule("slow"))
    assert report.ran == 20
    assert report.seconds > 4 * BUDGET_S
    assert size_after(report, report).rows > 10, "with the whole time it would be 5"


def test_a_chunk_of_slow_rows_makes_the_next_one_small_although_only_one_row_ran(
    make: Make,
) -> None:
    def outlast(body: Any) -> None:
        wait_until(lambda: bench.events.counts["chunk.gave_back"], 5, "the end of the time budget")

    bench = mixed(make, outlast)
    quick = Report(200, 200, 0.0002)
    report = bench.run(*[bench.schedule("slow", number) for number in range(40)])
    assert report.ran == 1
    assert size_after(quick, report).rows == 1
    assert size_after(quick, Report(40, 1, report.seconds)).rows > 1, "by the row that ran alone"


def test_rows_without_a_processor_are_not_remembered(make: Make) -> None:
    bench = make(_chunk_time_budget_s=BUDGET_S, tags="any")
    learned: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        learn = TagCosts.learn

        def note(self: TagCosts, tag: str, rows: int, seconds: float) -> float:
            learned.append(tag)
            return learn(self, tag, rows, seconds)

        patch.setattr(TagCosts, "learn", note)
        bench.run(bench.schedule("of another release"), bench.schedule())
    assert learned == ["note"]


# -- A task that cannot run here is retried after a tenth of its lateness, within limits ----------


TWO_DAYS = timedelta(days=2)


def wait_s(bench: RunnerHarness, task: DelayTask) -> float:
    """Return the time until the next attempt, in seconds."""
    return (bench.now(task).expected_time - bench.clock.now()).total_seconds()


def made_long_ago(bench: RunnerHarness, tag: str = "unknown", **options: object) -> DelayTask:
    task = bench.schedule(tag, delay=60, **options)
    assert task.create_time is not None
    bench.change(task, create_time=task.create_time - TWO_DAYS)
    return bench.now(task)


def make_due(bench: RunnerHarness, task: DelayTask, late_s: float) -> DelayTask:
    """Move the due time as a reschedule, a touch, a retry or a snooze does."""
    bench.change(task, expected_time=bench.clock.now() - timedelta(seconds=late_s))
    return bench.now(task)


@pytest.mark.parametrize(
    "outcome", [lambda: Retry(after=1), lambda: Snooze(1)], ids=["retry", "snooze"]
)
def test_a_task_that_ran_before_its_processor_vanished_is_tried_again_soon(
    bench: RunnerHarness, outcome: Callable[[], object]
) -> None:
    bench.registry.processor("gone", retries="1s 1s")(lambda body: outcome())
    task = make_due(bench, made_long_ago(bench, "gone"), 1)
    bench.run(task)
    del bench.registry._processors["gone"]
    task = make_due(bench, task, 1)
    bench.run(task)
    assert wait_s(bench, task) == pytest.approx(DEFER_MIN_S, abs=1)


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
    bench: RunnerHarness, rows: int, threads: list[str]
) -> None:
    tasks, before = [bench.schedule() for _ in range(rows)], set(threading.enumerate())
    bench.run(*tasks)
    assert [thread.name for thread in set(threading.enumerate()) - before] == threads
    assert bench.statuses(tasks) == ["DONE"] * rows


# -- A runner handles claimed rows, and entries whose rows it cannot claim ------------------------


#: The tolerance for retry delays, which depend on the time of the measurement.
MOMENT = timedelta(seconds=0.2)


# -- tags without a processor --------------------------------------------------------------------
AGES = [(0.0, 5.0), (30.0, 5.0), (100.0, 10.0), (3600.0, 360.0), (24 * 3600.0, 600.0)]


@pytest.mark.parametrize(("age_s", "wait_s"), AGES)
def test_a_task_without_a_processor_waits_a_tenth_of_its_age_and_never_fails(
    bench: RunnerHarness, age_s: float, wait_s: float
) -> None:
    task = bench.schedule("nobody")
    since = bench.clock.now() - timedelta(seconds=age_s)
    bench.change(task, create_time=since, expected_time=since)
    before = bench.clock.now()
    bench.run(bench.now(task))
    after = bench.now(task)
    assert (after.status, after.attempts, after.version) == (Status.NOT_COMPLETE, 0, 2)
    assert "no such processor, tag=nobody (this worker knows: note)" in (after.error or "")
    ended = bench.clock.now()
    assert before - MOMENT <= after.expected_time - timedelta(seconds=wait_s) <= ended + MOMENT
    assert bench.named("task.no_processor")[0]["tag"] == "nobody"
    near = wait_s <= (bench.settings.horizon_s or 0)
    assert bench.timer.ids == ([task.id] if near else []), "armed again when it is near"


# -- rows with a lost lease ----------------------------------------------------------------------


def test_recovered_rows_get_a_share_of_the_time_of_a_backlog(
    bench: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr(runner, "monotonic", lambda: monotonic() + passed)

    def wait(seconds: float) -> None:
        nonlocal passed
        bench.ran.append(f"waits {seconds:g}")
        passed += seconds

    bench.registry.processor("wait")(wait)
    abandoned = [bench.schedule("wait", 60), bench.schedule(body="lapsed")]
    for lapses, task in enumerate(abandoned, 1):
        bench.change(task, lapses=lapses)
    for number in range(20):
        bench.schedule(body=number)

    def drain(most: int) -> list[Any]:
        bench.ran.clear()
        assert bench.runner.run_due("default", [0], most).is_full
        return bench.ran

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
    bench: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr(runner, "monotonic", lambda: monotonic() + passed)
    bench.store.policies.set("tag", "limited", {"concurrency": 1}, "a test")
    bench.registry.processor("limited")(bench.ran.append)
    running, lapsed = bench.schedule("limited"), bench.schedule("limited")
    bench.claims.claim([bench.entry(running)])
    bench.change(lapsed, lapses=1)
    for number in range(4):
        bench.schedule(body=number)
    assert bench.runner.run_due("default", [0], 2).is_full
    passed += runner.RECOVERED_S
    assert bench.runner.run_due("default", [0], 2).is_full
    assert bench.statuses([lapsed]) == ["HELD"]
    assert not bench.runner.run_due("default", [0], 2).is_full, "one row was left"


# -- entries that the claim does not return ------------------------------------------------------


def test_an_early_entry_is_returned_with_the_due_time_of_its_row(bench: RunnerHarness) -> None:
    task = bench.schedule(delay=20)
    report = bench.runner.run([Entry.of(task)._replace(due_us=0)])
    assert report.early == (Entry.of(task),)
    assert (report.claimed, bench.ran) == (0, [])
    assert bench.events.counts["entry.dropped"] == 0


def test_an_entry_that_is_early_within_the_clock_tolerance_is_waited_for(
    bench: RunnerHarness,
) -> None:
    for _ in range(20):
        task = bench.schedule(delay=0.02)
        report = bench.run(task)
        assert (report.ran, report.early, bench.statuses([task])) == (1, (), ["DONE"])
        done = bench.now(task)
        assert done.execution_time is not None
        assert done.execution_time >= task.expected_time, "and not run early"


def test_an_entry_beyond_the_horizon_is_dropped(make: Make) -> None:
    bench = make(horizon=10)
    task = bench.schedule(delay=60)
    report = bench.run(task)
    assert (report.early, bench.events.counts["entry.dropped"]) == ((), 1)
    forever = make(horizon=None)
    task = forever.schedule(delay=86400)
    assert [entry.id for entry in forever.run(task).early] == [task.id]


def test_entries_of_rows_that_changed_are_dropped_and_counted(bench: RunnerHarness) -> None:
    cancelled, moved, running, done, held = (bench.schedule() for _ in range(5))
    good = bench.schedule(body="good")
    bench.store.tasks.cancel(cancelled.id)
    bench.store.tasks.reschedule(moved.id, bench.clock.now())
    bench.change(running, **RUNNING)
    bench.change(done, status=int(Status.DONE))
    bench.change(held, status=int(Status.HELD))
    unknown = replace(good, id=good.id + 1)
    report = bench.run(cancelled, moved, running, done, held, unknown, good)
    assert (report.ran, report.early, bench.ran) == (1, (), ["good"])
    assert bench.named("entry.dropped") == [{"count": 6}]


def test_a_stale_entry_does_not_replace_the_current_one(bench: RunnerHarness) -> None:
    task = bench.schedule(delay=20)
    entry = Entry.of(task)
    for order in ([entry, entry._replace(version=7)], [entry._replace(version=7), entry]):
        assert bench.runner.run(order).early == (entry,)


def test_the_reported_duration_of_a_chunk_is_the_time_of_its_processors(
    bench: RunnerHarness,
) -> None:
    bench.claims.after_claim = lambda: threading.Event().wait(0.2) and None
    bench.claims.before_settle = lambda settlements: threading.Event().wait(0.2) and None
    began = time.monotonic()
    report = bench.run(*[bench.schedule() for _ in range(3)])
    assert report.seconds < 0.1 < 0.4 < time.monotonic() - began
