"""A runner claims, runs and settles the rows of a chunk on SQLite, within its time and lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from datetime import timedelta
from itertools import repeat
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

import delaytasks as e
from delaytasks import DelayedTask, Retry, Snooze, Status
from delaytasks.run.calls import WorkerMemory
from tests.unit.conftest import Gate, fail_settlements
from tests.waiting import wait_until
from tests.world import RUNNING, Entry, MainProcess, MakeWorld, Report, World
from tests.world.recording import ManualTime

BUDGET_S = 0.1
#: During a backlog, recovered rows are looked for again after this time.
RECOVERED_S = 1.0

# -- run and settle the rows of a chunk on SQLite, within its time and its lease ------------------


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


FAILURES: list[BaseException] = [ValueError("as asked"), ValueError("\x00 \ud800")]
FAILURES += [UnsayableError(), SystemExit(3), KeyboardInterrupt(), ValueError("é" * 100_000)]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_processor_that_raises_fails_only_its_row(make_world: MakeWorld, error: Any) -> None:
    world = make_world(_max_error_bytes=2000)

    def fail(body: Any) -> None:
        raise error

    world.delays.processor("fail")(fail)
    world.run(*(tasks := [world.schedule(), world.schedule("fail"), world.schedule()]))
    assert world.statuses(tasks) == ["DONE", "FAILED", "DONE"]
    text = world.read(tasks[1]).error or ""
    is_long = error is FAILURES[-1]
    assert ("ééé" in text) == is_long
    assert (type(error).__name__ in text, "characters left out" in text) == (not is_long, is_long)
    assert "\x00" not in text
    assert len(text.encode()) <= 2000
    assert [fields["id"] for fields in world.told("task.failed")] == [tasks[1].id]


@pytest.mark.parametrize(("options", "second"), [({}, "NOT_COMPLETE"), ({"batch": 9}, "RUNNING")])
def test_a_stopping_worker_settles_and_gives_back(world: World, options: Any, second: str) -> None:
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
    fail_settlements(world, [e.StoreError("refused")] * 2)
    with pytest.raises(e.StoreError, match="refused"):
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
    claimed, running = time.monotonic(), pool.submit(world.run, done, slow, *rest)
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


def test_no_row_is_started_after_its_worker_may_count_as_lost(world: World) -> None:
    tasks = [world.schedule() for _ in range(3)]
    world.worker().reported(time.monotonic(), lost_s=0.2)
    world.after_claim = lambda: threading.Event().wait(0.3) and None
    assert world.run(*tasks).ran == 0
    assert world.statuses(tasks) == ["NOT_COMPLETE"] * 3
    assert world.run(*map(world.read, tasks)).ran == 3, "it claims them again"


def test_a_settlement_is_tried_again_while_the_database_is_unavailable(world: World) -> None:
    fail_settlements(world, [e.StoreUnavailableError("away")] * 2)
    world.run(task := world.schedule())
    assert world.statuses([task]) == ["DONE"]
    assert world.count("settle.waits") == 2


def test_a_row_that_cannot_be_settled_does_not_affect_other_rows(world: World) -> None:
    tasks = [world.schedule() for _ in range(3)]
    fail_settlements(world, repeat(e.StoreError("refused")), of=tasks[1])
    with pytest.raises(e.StoreError):
        world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "RUNNING", "DONE"]
    assert len(world.notes) == 3
    assert (world.count("task.succeeded"), world.count("task.lease_lost")) == (2, 0)


# -- tag costs ------------------------------------------------------------------------------------


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
    rows, seconds = report.sample
    assert rows == 23, "the rows that were given back count as what they would take"
    assert seconds == pytest.approx(3 * BUDGET_S, rel=0.5)


def test_a_slow_row_counts_as_one_time_budget(make_world: MakeWorld) -> None:
    world = mixed(make_world, lambda body: threading.Event().wait(4 * BUDGET_S))
    quick = [world.schedule() for _ in range(19)]
    report = world.run(*quick, world.schedule("slow"))
    rows, seconds = report.sample
    assert (report.ran, rows) == (20, 20)
    assert seconds < 3 * BUDGET_S < 4 * BUDGET_S < report.seconds


# -- tags without a processor --------------------------------------------------------------------


#: The tolerance for retry delays, which depend on the time of the measurement.
MOMENT = timedelta(seconds=0.2)
AGES = [(0.0, 5.0), (30.0, 5.0), (100.0, 10.0), (3600.0, 360.0), (24 * 3600.0, 600.0)]


@pytest.mark.parametrize(("age_s", "wait_s"), AGES)
def test_a_task_without_processor_never_fails(world: World, age_s: float, wait_s: float) -> None:
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
def test_a_task_whose_processor_went_is_retried_soon(make_world: MakeWorld, outcome: Any) -> None:
    """The delay is a tenth of its lateness, whatever its age is."""
    world, newer = make_world(), make_world()
    world.delays.processor("gone", retries="1s 1s")(lambda body: outcome)
    task = world.schedule("gone", delay=60)
    world.change(task, create_time=world.now() - timedelta(days=2))
    for each in (world, newer):
        world.change(task, expected_time=world.now() - timedelta(seconds=1))
        each.run(world.read(task))
    wait_s = (world.read(task).expected_time - world.now()).total_seconds()
    assert wait_s == pytest.approx(5, abs=1)


# -- rows with a lost lease ----------------------------------------------------------------------


def test_recovered_rows_share_the_backlogs_time(make_world: MakeWorld, ahead: ManualTime) -> None:
    world = make_world(lease=600)

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
    ahead.at += RECOVERED_S
    assert drain(3) == [2, 3, "waits 60"]
    ahead.at += 59
    assert drain(2) == [4, 5], "others have half of the time"
    ahead.at += 2
    assert drain(1) == ["lapsed"]
    ahead.at += RECOVERED_S
    assert drain(2) == [6], "there was none"
    assert drain(2) == [7, 8]


# -- entries that the claim does not return ------------------------------------------------------


def test_a_drain_names_the_rows_that_its_chunks_have_claimed(world: World) -> None:
    tasks = [world.schedule(priority=priority) for priority in (5, 5, 0, 0, 0, 0)]
    drained = world.drain(most=2, continue_s=60).drained
    assert drained.keys() == {task.id for task in tasks}
    assert all(version > 0 for version in drained.values())


def test_an_early_entry_is_returned_with_the_due_time_of_its_row(world: World) -> None:
    task = world.schedule(delay=20)
    report = world.worker().run_entries([Entry.of(task)._replace(due_us=0)])
    assert report.early == (Entry.of(task),)
    assert (report.claimed, world.notes) == (0, [])
    assert world.count("entry.dropped") == 0


@pytest.mark.parametrize(("horizon", "delay"), [("30s", 50), (None, 86_400)])
def test_an_entry_of_a_touched_row_returns_if_no_sweep_will_arm_it(
    make_world: MakeWorld, horizon: str | None, delay: float
) -> None:
    main = MainProcess(make_world(horizon=horizon), 1)
    near, far = (main.world.schedule(delay=20) for _ in range(2))
    main.world.delays.touch(near.id, delay=delay)
    main.world.delays.touch(far.id, delay=86_400)
    report = main.world.run(near, far)
    kept = [near.id] if horizon else [near.id, far.id]
    assert [entry.id for entry in report.early] == kept
    assert main.world.count("entry.dropped") == len([near, far]) - len(kept)
    main.dispatcher.receive(report.early)
    assert (len(main.runtime.wheel), main.world.count("message.refused")) == (len(kept), 0)


def test_an_entry_that_is_early_within_the_clock_tolerance_is_waited_for(world: World) -> None:
    for _ in range(20):
        task = world.schedule(delay=0.02)
        report = world.run(task)
        assert (report.ran, report.early, world.statuses([task])) == (1, (), ["DONE"])
        done = world.read(task)
        assert done.execution_time is not None
        assert done.execution_time >= task.expected_time, "and not run early"


def test_entries_of_rows_that_changed_are_dropped_and_counted(world: World) -> None:
    cancelled, moved, running, done, held = (world.schedule() for _ in range(5))
    good = world.schedule(body="good")
    world.cancel(cancelled)
    world.delays.reschedule(moved.id, at=world.now())
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


# -- in a backlog, a runner claims the next chunk while the current one runs ----------------------


@pytest.fixture
def single(make_world: MakeWorld) -> World:
    """A world whose chunks have one row."""
    return make_world(_chunk_max=1)


def drain(world: World, limit: int = 1) -> Report:
    return world.drain(most=limit, continue_s=60.0)


def backlog(world: World, rows: int, tag: str = "note") -> list[DelayedTask]:
    return [world.schedule(tag, body=number) for number in range(rows)]


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
        time.sleep(0.05)  # a claim that does not rest is done by now
        seen.extend([is_claimed.is_set(), is_claimed.wait(5)])

    world.delays.processor("slow")(slow)
    world.run(world.schedule("slow", 0))
    world.after_claim = is_claimed.set
    tasks = [world.schedule("slow", 1), world.schedule()]
    drain(world)
    assert seen == [False, True]
    assert world.statuses(tasks) == ["DONE", "DONE"]


def test_other_tasks_that_wait_end_the_backlog_of_this_process(single: World) -> None:
    others = [False, False, True]

    class Memory(WorkerMemory):
        others_wait = property(lambda _: others.pop(0))

    single.worker(memory=Memory.shared())
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
            raise e.StoreUnavailableError("away")

    single.after_claim = fail_third
    tasks = backlog(single, 4)
    with pytest.raises(e.StoreUnavailableError):
        drain(single)
    assert single.statuses(tasks) == ["DONE", "DONE", "RUNNING", "NOT_COMPLETE"], (
        "the answer to the third claim was lost, so that its lease has to end"
    )


def test_a_settlement_that_fails_does_not_affect_the_chunk_that_runs(make_world: MakeWorld) -> None:
    world = make_world(_chunk_max=1, lease=2, _chunk_time_budget_s=0.1)
    tasks = backlog(world, 3)
    fail_settlements(world, repeat(e.StoreUnavailableError("away")), of=tasks[0])
    with pytest.raises(e.StoreUnavailableError):
        drain(world)
    assert world.statuses(tasks) == ["RUNNING", "DONE", "NOT_COMPLETE"]


def test_rows_of_a_limited_tag_end_the_backlog_of_this_process(single: World) -> None:
    single.limit("limited", concurrency=1)
    single.delays.processor("limited")(single.notes.append)
    tasks = [single.schedule("limited"), single.schedule(), single.schedule()]
    assert drain(single).ran == 1
    assert single.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


# -- `check_lease` informs a long processor before its lease ends, without a database query -------


LEASE_S = 60


@pytest.fixture
def leased(make_world: MakeWorld, time: ManualTime) -> World:
    """A world whose monotonic clock stands still."""
    world = make_world(lease=LEASE_S, _chunk_time_budget_s=1)
    world.worker(may_detach=False)
    return world


def test_check_lease_raises_after_two_failed_renewals(leased: World, time: ManualTime) -> None:
    @leased.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        for _ in range(3):
            leased.worker().renewed(time.at, LEASE_S)
            time.at += LEASE_S / 2
            task.check_lease()
        time.at += LEASE_S / 6
        task.check_lease()
        time.at += 1
        with pytest.raises(e.LeaseLostError, match=r"ends in 19\.0 s"):
            task.check_lease()

    leased.run(task := leased.schedule("long"))
    assert leased.statuses([task]) == ["DONE"]


def test_check_lease_raises_before_the_rows_of_a_silent_worker_are_released(
    leased: World, time: ManualTime
) -> None:
    @leased.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        leased.worker().renewed(time.at, LEASE_S)
        leased.worker().reported(time.at, lost_s=15)
        time.at += 10
        task.check_lease()
        time.at += 1
        with pytest.raises(e.LeaseLostError, match=r"ends in 4\.0 s"):
            task.check_lease()
        time.at += 5
        leased.worker().reported(time.at, lost_s=15)
        with pytest.raises(e.LeaseLostError, match="has ended"):
            task.check_lease()

    leased.run(task := leased.schedule("long"))
    assert leased.statuses([task]) == ["DONE"]


def test_the_lease_error_uses_no_attempt(leased: World, time: ManualTime) -> None:
    @leased.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        time.at += LEASE_S
        task.check_lease()

    task = leased.schedule("long")
    leased.broker.lose()
    leased.run(task)
    now = leased.read(task)
    assert (now.status, now.runs, now.error) == (Status.NOT_COMPLETE, 0, None)
    wait_s = (now.expected_time - leased.now()).total_seconds()
    assert leased.delays.settings.sweep_s - 1 < wait_s <= leased.delays.settings.sweep_s + 1
    assert leased.broker.ids == [task.id]
    assert [fields["id"] for fields in leased.told("task.interrupted")] == [task.id]
    assert leased.count("task.failed") == 0


def test_each_task_of_a_batch_can_be_asked_about_and_no_other(world: World) -> None:
    other = world.schedule("note")

    @world.delays.processor("many", batch=5)
    def work(tasks: list[DelayedTask]) -> None:
        for task in tasks:
            task.check_lease()
        other.check_lease()

    world.run(*(tasks := [world.schedule("many") for _ in range(2)]))
    assert all("TaskStateError: task" in (world.read(task).error or "") for task in tasks)
    with pytest.raises(e.TaskStateError, match="check_lease"):
        other.check_lease()


def test_a_lease_error_that_the_processor_itself_creates_is_a_failure(world: World) -> None:
    @world.delays.processor("wrong")
    def work(body: object, task: DelayedTask) -> None:
        raise e.LeaseLostError("as complete() says on a wrong database", task.id)

    world.run(task := world.schedule("wrong"))
    now = world.read(task)
    assert (now.status, now.runs) == (Status.FAILED, 1), "or it would run again and again"
