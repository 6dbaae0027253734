"""A runner claims, runs and settles the rows of a chunk on SQLite, within its time and lease."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from datetime import timedelta
from itertools import repeat
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown

import delaytasks as e
from delaytasks import DelayedTask, Status
from delaytasks.run.calls import WorkerMemory
from tests.unit.conftest import Gate, fail_settlements
from tests.waiting import wait_until
from tests.world import RUNNING, Entry, MakeWorld, Report, Settlement, World
from tests.world.recording import ManualTime

BUDGET_S = 0.1
#: During a backlog, recovered rows are looked for again after this time.
RECOVERED_S = 1.0

# -- run and settle the rows of a chunk on SQLite, within its time and its lease ------------------


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS: list[BaseException] = [ValueError("\x00 \ud800"), ValueError("é" * 100_000)]
ERRORS += [UnsayableError(), SystemExit(3), KeyboardInterrupt()]
FAILURES = [(kind, error) for kind in ("function", "thread", "coroutine") for error in ERRORS]
FAILURES += [("thread", WorkerShutdown(0)), ("coroutine", asyncio.CancelledError("x"))]


@pytest.mark.parametrize(
    ("kind", "error"), FAILURES, ids=lambda of: of if isinstance(of, str) else type(of).__name__
)
def test_a_processor_that_raises_fails_only_its_row(
    make_world: MakeWorld, kind: str, error: BaseException
) -> None:
    world = make_world(_max_error_bytes=2000)

    def fail(body: Any) -> None:
        if body:
            raise error

    async def wait_and_fail(body: Any) -> None:
        await asyncio.sleep(0)
        fail(body)

    options: Any = {"in_flight": 2} if kind == "thread" else {}
    world.delays.processor("fail", **options)(wait_and_fail if kind == "coroutine" else fail)
    world.run(*(tasks := [world.schedule("fail", body) for body in (0, 1, 0)]))
    world.run(after := world.schedule("fail"))
    assert world.statuses([*tasks, after]) == ["DONE", "FAILED", "DONE", "DONE"]
    text, is_long = world.read(tasks[1]).error or "", error is ERRORS[1]
    assert ("ééé" in text, "characters left out" in text) == (is_long, is_long)
    assert type(error).__name__ in text or is_long
    assert "in fail" in text or is_long
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
    rest = [world.read(task) for task in tasks[3 if options else 2 :]]
    assert {task.runs for task in rest} == {0}
    assert sorted(world.broker.ids) == sorted(task.id for task in rest)


# -- time limits ---------------------------------------------------------------------------------


def test_finished_rows_are_settled_before_a_row_that_may_be_killed_begins(world: World) -> None:
    seen: dict[int, list[str]] = {}

    def look(body: Any, task: DelayedTask) -> None:
        seen[task.id] = world.statuses(tasks)

    world.delays.processor("look", time_limit=60)(look)
    world.delays.processor("soft", soft_time_limit=60)(world.notes.append)
    tasks = [world.schedule(tag) for tag in ("note", "look", "look", "soft")]
    assert world.run(*tasks).ran == 4
    assert seen == {
        tasks[1].id: ["DONE", "RUNNING", "RUNNING", "DONE"],
        tasks[2].id: ["DONE", "DONE", "RUNNING", "DONE"],
    }, "those with a hard limit run last, each when all before it is settled"
    # The second error is for the settlement of the single row.
    fail_settlements(world, [e.StoreError("refused")] * 2)
    with pytest.raises(e.StoreError, match="refused"):
        world.run(*(others := [world.schedule(), world.schedule("look")]))
    assert world.statuses(others) == ["DONE", "NOT_COMPLETE"], "the second one does not begin"


@pytest.mark.parametrize("limits", [{"soft_time_limit": 60}, {"time_limit": 60}])
def test_time_limits_that_the_pool_lacks_are_deferred(world: World, limits: dict[str, Any]) -> None:
    world.delays.processor("limited", **limits)(world.notes.append)
    tasks = [world.schedule("limited", "never"), world.schedule(body="free")]
    world.worker(keeps_time_limits=False)
    world.run(*tasks)
    assert world.notes == ["free"]
    left = world.read(tasks[0])
    assert (left.status, left.runs) == (Status.NOT_COMPLETE, 0)
    assert "let a worker with -P prefork serve the queue default" in (left.error or "")
    assert [fields["tag"] for fields in world.told("task.no_time_limits")] == ["limited"]


# -- the time budget and the lease ---------------------------------------------------------------


@pytest.mark.parametrize("rest_s", [0, 0.05, 0.3], ids=["at once", "while it rests", "asleep"])
def test_after_the_time_budget_rows_are_given_back_and_results_settled_during_a_run(
    make_world: MakeWorld, gate: Gate, pool: Executor, rest_s: float
) -> None:
    """Whatever ran before, and whether the thread of the time budget sleeps."""
    world = make_world(_chunk_time_budget_s=BUDGET_S)
    world.run(world.schedule(), world.schedule())
    time.sleep(rest_s)
    world.delays.processor("wait")(gate)
    done, slow = world.schedule(priority=9), world.schedule("wait", priority=5)
    rest = [world.schedule() for _ in range(3)]
    world.broker.lose()
    claimed, running = time.monotonic(), pool.submit(world.run, done, slow, *rest)
    gate.wait_for(1)
    assert world.statuses(rest) == ["RUNNING"] * 3, "all are ours within the budget"
    left = ["DONE", "RUNNING", *["NOT_COMPLETE"] * 3]
    wait_until(lambda: world.statuses([done, slow, *rest]) == left, 5, "the return of the rest")
    assert time.monotonic() - claimed >= BUDGET_S
    gate.is_open.set()
    assert running.result(5).ran == 2
    assert world.statuses([slow]) == ["DONE"]
    rest = [world.read(task) for task in rest]
    assert {task.runs for task in rest} == {0}, "what did not start was no attempt"
    assert sorted(world.broker.armed) == sorted(map(Entry.of, rest))
    assert (world.count("chunk.gave_back"), world.count("task.lease_lost")) == (3, 0)
    assert world.run(*rest).ran == 3, "and they run elsewhere"


SHORT_LEASE = {"lease": 0.2, "_chunk_time_budget_s": 0.05}


@pytest.mark.parametrize("settings", [SHORT_LEASE, {}], ids=["lease", "worker"])
def test_no_row_is_started_if_its_lease_may_be_over_or_its_worker_may_count_as_lost(
    make_world: MakeWorld, settings: Any
) -> None:
    world = make_world(**settings)
    tasks = [world.schedule() for _ in range(3)]
    if not settings:
        world.worker().reported(time.monotonic(), lost_s=0.2)
    world.after_claim = lambda: time.sleep(0.3)  # the time until the answer to a claim
    assert world.run(*tasks).ran == 0
    assert world.statuses(tasks) == ["NOT_COMPLETE"] * 3
    assert world.run(*map(world.read, tasks)).ran == (0 if settings else 3)


def test_settlements_wait_for_the_database_and_a_refused_one_is_alone(world: World) -> None:
    fail_settlements(world, [e.StoreUnavailableError("away")] * 2)
    world.run(first := world.schedule())
    assert (world.statuses([first]), world.count("settle.waits")) == (["DONE"], 2)
    tasks = [world.schedule() for _ in range(3)]
    fail_settlements(world, repeat(e.StoreError("refused")), of=tasks[1])
    with pytest.raises(e.StoreError):
        world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "RUNNING", "DONE"]
    assert (world.count("task.succeeded"), world.count("task.lease_lost")) == (3, 0)


# -- tag costs ------------------------------------------------------------------------------------


def test_quick_rows_run_before_slow_ones_which_are_given_back(make_world: MakeWorld) -> None:
    world = make_world(_chunk_time_budget_s=BUDGET_S)

    def work(body: Any) -> None:
        if body == "outlast":
            wait_until(lambda: world.count("chunk.gave_back"), 5, "the end of the time budget")
        if body is not None:
            time.sleep(3 * BUDGET_S)
        world.notes.append("slow")

    world.delays.processor("slow")(work)
    world.delays.processor("fits")(lambda body: time.sleep(0.01) or world.notes.append("fits"))
    for tag in ("note", "slow", "fits"):  # the process learns how long each takes
        world.run(world.schedule(tag, "learn"))
    slow = [world.schedule("slow", "outlast") for _ in range(3)]
    quick = [world.schedule() for _ in range(20)]
    report = world.run(*slow, *quick)
    assert world.statuses([*quick, *slow]) == ["DONE"] * 21 + ["NOT_COMPLETE"] * 2
    rows, seconds = report.sample
    assert (report.ran, rows) == (21, 23), "rows that are given back count as what they would take"
    assert seconds == pytest.approx(3 * BUDGET_S, rel=0.5), "a slow row counts as one time budget"
    assert report.seconds > 3 * BUDGET_S
    for tag, priority, order in (
        ("slow", 0, [1, 2, "slow"]), ("slow", 1, ["slow", 1, 2]), ("fits", 0, ["fits", 1, 2])
    ):  # fmt: skip
        world.notes.clear()
        first = world.schedule(tag, priority=priority)
        world.run(first, world.schedule(body=1), world.schedule(body=2))
        assert world.notes == order


# -- tags without a processor --------------------------------------------------------------------


AGES = [(0.0, 5.0), (30.0, 5.0), (100.0, 10.0), (3600.0, 360.0), (24 * 3600.0, 600.0)]


@pytest.mark.parametrize(("late_s", "wait_s"), AGES)
def test_a_task_without_processor_never_fails(world: World, late_s: float, wait_s: float) -> None:
    """The delay of the next try is a tenth of its lateness, whatever its age is."""
    task, due = world.schedule("nobody"), world.now() - timedelta(seconds=late_s)
    world.change(task, create_time=due - timedelta(days=2), expected_time=due)
    world.broker.lose()
    world.run(world.read(task))
    after = world.read(task)
    assert (after.status, after.runs) == (Status.NOT_COMPLETE, 0)
    known = "no such processor, tag=nobody (this worker knows: delaytasks.callback, "
    assert known in (after.error or "")
    assert (after.expected_time - world.now()).total_seconds() == pytest.approx(wait_s, abs=0.5)
    near = wait_s <= (world.delays.settings.horizon_s or 0)
    assert world.broker.ids == ([task.id] if near else []), "armed again when it is near"


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

    #: Seconds that pass, the rows of the next drain, and what it runs.
    steps: list[tuple[float, int, list[Any]]] = [
        (0, 2, [0, 1]),  # that there are recovered rows is not known yet
        (RECOVERED_S, 3, [2, 3, "waits 60"]),
        (59, 2, [4, 5]),  # others have half of the time
        (2, 1, ["lapsed"]),
        (RECOVERED_S, 2, [6]),  # there was none
        (0, 2, [7, 8]),
    ]
    for seconds, most, ran in steps:
        ahead.at += seconds
        world.notes.clear()
        assert world.drain(most=most).is_full
        assert world.notes == ran


# -- entries that the claim does not return ------------------------------------------------------


def test_entries_of_rows_that_changed_are_dropped_and_early_ones_returned(world: World) -> None:
    cancelled, moved, running, done, held, good = (world.schedule(body=n) for n in range(6))
    early, near, far = (world.schedule(delay=20) for _ in range(3))
    world.cancel(cancelled)
    world.delays.reschedule(moved.id, at=world.now())
    world.change(running, **RUNNING)
    world.change(done, status=int(Status.DONE))
    world.change(held, status=int(Status.HELD))
    world.delays.touch(near.id, delay=50)
    world.delays.touch(far.id, delay=86_400)  # a sweep will arm it
    unknown = replace(good, id=good.id + 1_000_000)
    changed = map(Entry.of, (cancelled, moved, running, done, held, unknown, good, far))
    kept = [Entry.of(early), Entry.of(world.read(near))]
    stale = kept[0]._replace(version=7)
    report = world.worker().run_entries(
        [*changed, *(one._replace(due_us=0) for one in kept), stale]
    )
    assert (report.ran, sorted(report.early), world.notes) == (1, sorted(kept), [5])
    assert world.told("entry.dropped") == [{"count": 8}]
    assert world.worker().run_entries([stale, kept[0]]).early == (kept[0],)


# -- in a backlog, a runner claims the next chunk while the current one runs ----------------------


@pytest.fixture
def single(make_world: MakeWorld) -> World:
    """A world whose chunks have one row."""
    return make_world(_chunk_max=1)


def drain(world: World) -> Report:
    return world.drain(most=1, continue_s=60.0)


def backlog(world: World, *tags: str) -> list[DelayedTask]:
    return [world.schedule(tag, body=number) for number, tag in enumerate(tags)]


def test_while_a_chunk_runs_the_last_one_is_settled_and_one_more_is_claimed(single: World) -> None:
    expected = ["DONE", "RUNNING", "RUNNING", "NOT_COMPLETE"]

    def look(body: int) -> None:
        if body == 1:
            wait_until(lambda: single.statuses(tasks) == expected, 5, "the other thread")

    single.delays.processor("look")(look)
    tasks = backlog(single, *["look"] * 4)
    report = drain(single)
    assert (report.ran, single.statuses(tasks)) == (4, ["DONE"] * 4)
    assert report.drained.keys() == {task.id for task in tasks}
    assert all(version > 0 for version in report.drained.values())


def test_a_chunk_that_waits_for_a_slow_row_is_given_back(
    make_world: MakeWorld, gate: Gate, pool: Executor
) -> None:
    world = make_world(_chunk_time_budget_s=0.1, _chunk_max=1)
    world.delays.processor("slow")(gate)
    tasks = backlog(world, *["slow"] * 3)
    running = pool.submit(drain, world)
    for status in ("RUNNING", "NOT_COMPLETE"):
        wait_until(lambda to=status: world.statuses(tasks)[1] == to, 5, status)  # type: ignore[misc]
    assert world.read(tasks[1]).runs == 0
    gate.is_open.set()
    running.result(5)
    assert world.statuses(tasks[:1]) == ["DONE"]


def test_other_tasks_that_wait_end_the_backlog_of_this_process(single: World) -> None:
    others = [False, False, True]

    class Memory(WorkerMemory):
        others_wait = property(lambda _: others.pop(0))

    single.worker(memory=Memory.shared())
    tasks, report = backlog(single, *["note"] * 4), drain(single)
    assert (report.ran, report.is_full) == (2, True)
    assert single.statuses(tasks) == ["DONE", "DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


@pytest.mark.parametrize("options", [{"time_limit": 60}, {}], ids=["time", "concurrency"])
def test_nothing_is_claimed_ahead_of_a_row_that_may_end_the_process_or_has_a_limit(
    single: World, options: Any
) -> None:
    seen: list[list[str]] = []
    tasks: list[DelayedTask] = []
    single.delays.processor("limited", **options)(lambda _: seen.append(single.statuses(tasks)))
    if not options:
        single.limit("limited", concurrency=1)
    tasks += backlog(single, "limited", "note", "note")
    report = drain(single)
    assert (seen, report.ran) == ([["RUNNING", "NOT_COMPLETE", "NOT_COMPLETE"]], 1)
    assert single.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE"]


def test_a_worker_that_stops_in_a_backlog_gives_back_what_is_claimed_ahead(single: World) -> None:
    def stop(body: Any) -> None:
        wait_until(lambda: single.statuses(tasks)[2] == "RUNNING", 5, "the claim ahead")
        raise WorkerShutdown(0)

    single.delays.processor("stop")(stop)
    tasks = backlog(single, "note", "stop", "note", "note")
    with pytest.raises(WorkerShutdown):
        drain(single)
    assert single.statuses(tasks) == ["DONE", "RUNNING", "NOT_COMPLETE", "NOT_COMPLETE"]
    assert single.read(tasks[3]).runs == 0


# -- `check_lease` informs a long processor before its lease ends, without a database query -------


LEASE_S = 60


@pytest.fixture
def leased(make_world: MakeWorld, time: ManualTime) -> World:
    """A world whose monotonic clock stands still."""
    world = make_world(lease=LEASE_S, _chunk_time_budget_s=1)
    world.worker(may_detach=False)
    return world


def test_check_lease_raises_before_a_lease_ends(leased: World, time: ManualTime) -> None:
    worker = leased.worker()

    @leased.delays.processor("long")
    def work(body: object, task: DelayedTask) -> None:
        for lost_s, safe_s, left in ((None, LEASE_S * 2 / 3, r"19\.0"), (15, 10, r"4\.0")):
            worker.renewed(time.at, LEASE_S)
            if lost_s:  # others release the rows of a silent worker
                worker.reported(time.at, lost_s)
            time.at += safe_s  # two renewals have failed
            task.check_lease()
            time.at += 1
            with pytest.raises(e.LeaseLostError, match=rf"ends in {left} s"):
                task.check_lease()
        time.at += 5
        worker.reported(time.at, lost_s=15)
        with pytest.raises(e.LeaseLostError, match="has ended"):
            task.check_lease()
        task.check_lease()

    task = leased.schedule("long")
    leased.broker.lose()
    leased.run(task)
    now = leased.read(task)
    assert (now.status, now.runs, now.error) == (Status.NOT_COMPLETE, 0, None)
    assert (now.expected_time - leased.now()).total_seconds() == pytest.approx(5, abs=1)
    assert leased.broker.ids == [task.id]
    assert [fields["id"] for fields in leased.told("task.interrupted")] == [task.id]


def test_a_lease_error_that_the_processor_itself_creates_is_a_failure(world: World) -> None:
    @world.delays.processor("wrong")
    def work(body: object, task: DelayedTask) -> None:
        raise e.LeaseLostError("as complete() says on a wrong database", task.id)

    world.run(task := world.schedule("wrong"))
    now = world.read(task)
    assert (now.status, now.runs) == (Status.FAILED, 1), "or it would run again and again"


# -- a chunk of slow rows is settled by another thread while entries wait for its process ---------


def serve(world: World, others_wait: bool = True, may_detach: bool = True) -> None:
    """Register slow processors in a process for which the main process has entries, or none."""
    memory = WorkerMemory.shared()
    memory.others_wait = others_wait
    world.worker(may_detach=may_detach, memory=memory)

    def work(task: Any) -> None:
        time.sleep(0.002)
        world.notes.append(task)

    world.delays.processor("slow")(work)
    world.delays.processor("limited")(work)
    world.delays.processor("concurrent", in_flight=2)(work)


@pytest.mark.parametrize("tag", ["slow", "concurrent"])
def test_a_chunk_reports_before_it_is_settled(world: World, gate: Gate, tag: str) -> None:
    """Only one chunk is settled later, so that a locked row delays no others."""
    serve(world)
    tasks = [world.schedule(tag) for _ in range(4)]

    def hold_first(settlements: Sequence[Settlement]) -> None:
        assert settlements[0].task.id != tasks[0].id or gate.is_open.wait(10)

    world.before_settle = hold_first
    assert [world.run(task).ran for task in tasks] == [1] * 4
    assert world.statuses(tasks) == ["RUNNING", "DONE", "DONE", "DONE"]
    gate.is_open.set()
    wait_until(lambda: world.statuses(tasks) == ["DONE"] * 4, 5, "the first settlement")


def test_a_process_that_ends_awaits_the_settlement(
    world: World, gate: Gate, pool: Executor
) -> None:
    serve(world)
    world.before_settle = gate
    world.run(task := world.schedule("slow"))
    finished = pool.submit(world.worker().finish)
    gate.wait_for(1)
    assert not finished.done()
    gate.is_open.set()
    finished.result(5)
    assert world.statuses([task]) == ["DONE"]


def test_a_recovered_row_which_may_kill_the_process_awaits_the_settlement(world: World) -> None:
    serve(world)
    other, seen = world.schedule("slow"), list[list[str]]()
    world.delays.processor("poison")(lambda _: seen.append(world.statuses([other])))
    recovered = world.schedule("poison")
    world.change(recovered, lapses=1)
    world.run(other)
    world.run(world.read(recovered))
    assert seen == [["DONE"]]


@pytest.mark.parametrize(
    ("tag", "options"),
    [
        ("limited", {}),  # its waitlist waits for a slot
        ("slow", {"may_detach": False}),
        ("slow", {"others_wait": False}),
        ("quick", {}),
    ],
)
def test_otherwise_a_chunk_is_settled_before_it_reports(
    world: World, tag: str, options: dict[str, bool]
) -> None:
    serve(world, **options)
    world.limit("limited", concurrency=1)
    world.delays.processor("quick")(lambda _: None)
    threads = list[threading.Thread]()
    world.before_settle = lambda _: threads.append(threading.current_thread())
    number = 50 if tag == "quick" else 2  # the mean of more rows is short on any machine
    world.run(*(tasks := [world.schedule(tag) for _ in range(number)]))
    assert set(threads) == {threading.current_thread()}
    assert world.statuses(tasks) == ["DONE"] * number
