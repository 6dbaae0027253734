"""Claim, run and settle the rows of a chunk on SQLite."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from celery.exceptions import WorkerShutdown
from sqlalchemy import insert

from delaytasks import DelayTask, Status
from delaytasks.core.clock import monotonic, to_us
from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.execution import runner
from tests.runner_harness import RunnerHarness
from tests.unit.conftest import Make
from tests.waiting import wait_until

#: The tolerance for retry delays, which depend on the time of the measurement.
MOMENT = timedelta(seconds=0.2)


# -- how a run ends -------------------------------------------------------------------------------


def test_rows_are_run_and_settled_together(bench: RunnerHarness) -> None:
    tasks = [bench.schedule(body=n) for n in range(5)]
    settled: list[int] = []
    bench.claims.before_settle = lambda settlements: settled.append(len(settlements))
    report = bench.run(*tasks)
    assert (report.claimed, report.ran, report.early) == (5, 5, ())
    assert bench.ran == [0, 1, 2, 3, 4]
    assert bench.statuses(tasks) == ["DONE"] * 5
    assert settled == [5]
    done = bench.now(tasks[0])
    assert (done.attempts, done.version, done.worker, done.ip_address) == (
        1,
        2,
        "worker-1",
        "127.0.0.1",
    )
    assert done.execution_time is not None
    assert bench.events.counts["task.succeeded"] == 5


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
def test_a_processor_that_raises_fails_its_row_and_no_other(
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
    bench = make(max_error_bytes=2000)

    def fail(body: Any) -> None:
        raise ValueError("é" * 100_000)

    bench.registry.processor("fail")(fail)
    task = bench.schedule("fail")
    bench.run(task)
    text = bench.now(task).error or ""
    assert len(text.encode()) <= 2000
    assert "characters left out" in text


def test_a_body_that_is_not_json_fails_its_row_and_no_other(bench: RunnerHarness) -> None:
    tasks = [bench.schedule(body=n) for n in range(3)]
    bench.change(tasks[1], message_body="{nope")
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "FAILED", "DONE"]
    assert "JSONDecodeError" in (bench.now(tasks[1]).error or "")
    assert bench.ran == [0, 2]


def test_a_worker_that_is_told_to_stop_settles_what_is_done_and_gives_back_the_rest(
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


# -- time limits ----------------------------------------------------------------------------------


def test_what_is_finished_is_settled_before_a_row_begins_that_may_be_killed(
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


def test_a_row_that_was_to_begin_when_a_settlement_failed_goes_back(bench: RunnerHarness) -> None:
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
def test_rows_with_limits_are_put_off_where_nobody_can_keep_them(
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


# -- the time box and the lease -------------------------------------------------------------------


def test_past_the_time_box_rows_go_back_and_results_are_in_while_a_processor_still_runs(
    make: Make,
) -> None:
    bench = make(chunk_time_box_s=0.1)
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
    assert sorted(bench.timer.armed) == sorted(Entry.of(bench.now(task), to_us) for task in rest)
    assert bench.events.counts["chunk.gave_back"] == 3
    assert bench.events.counts["task.lease_lost"] == 0
    assert bench.ran == [None]
    assert bench.run(*(bench.now(task) for task in rest)).ran == 3, "and they run elsewhere"


def test_each_chunk_has_a_time_box_of_its_own(make: Make) -> None:
    bench = make(chunk_time_box_s=0.1)
    waits: list[DelayTask] = []

    def wait(body: Any) -> None:
        wait_until(
            lambda: bench.now(waits[-1]).status is Status.NOT_COMPLETE,
            5,
            "the other one to be given back",
        )

    bench.registry.processor("wait")(wait)
    for _ in range(3):
        slow, other = bench.schedule("wait", priority=9), bench.schedule()
        waits.append(other)
        bench.run(slow, other)
        assert bench.statuses([slow, other]) == ["DONE", "NOT_COMPLETE"]


def test_a_chunk_within_its_box_gives_nothing_back(bench: RunnerHarness) -> None:
    for _ in range(20):
        bench.run(*[bench.schedule() for _ in range(5)])
    assert bench.events.counts["chunk.gave_back"] == 0
    assert len(bench.ran) == 100


def test_nothing_is_started_when_the_lease_may_be_over(make: Make) -> None:
    bench = make(lease_s=0.2, chunk_time_box_s=0.1)
    tasks = [bench.schedule() for _ in range(3)]
    # The answer to the claim took longer than the lease.
    bench.claims.after_claim = lambda: threading.Event().wait(0.3) and None
    report = bench.run(*tasks)
    assert (report.ran, bench.ran) == (0, [])
    assert bench.statuses(tasks) == ["NOT_COMPLETE"] * 3


def test_what_another_worker_has_by_now_is_not_settled(bench: RunnerHarness) -> None:
    tasks = [bench.schedule() for _ in range(3)]

    def lapse(settlements: Sequence[Settlement]) -> None:
        bench.change(tasks[1], status=int(Status.NOT_COMPLETE), version=7)

    bench.claims.before_settle = lapse
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "NOT_COMPLETE", "DONE"]
    assert [fields["id"] for fields in bench.named("task.lease_lost")] == [tasks[1].id]
    assert bench.events.counts["task.succeeded"] == 2


def test_settling_is_tried_again_while_the_database_is_away(bench: RunnerHarness) -> None:
    failures = [StoreUnavailableError("away"), StoreUnavailableError("away")]

    def fail(settlements: Sequence[Settlement]) -> None:
        if failures:
            raise failures.pop()

    bench.claims.before_settle = fail
    task = bench.schedule()
    bench.run(task)
    assert bench.statuses([task]) == ["DONE"]
    assert bench.events.counts["settle.waits"] == 2


def test_a_row_that_can_not_be_settled_harms_no_neighbour(bench: RunnerHarness) -> None:
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


# -- tags without a processor ---------------------------------------------------------------------

AGES = [(0.0, 5.0), (30.0, 5.0), (100.0, 10.0), (3600.0, 360.0), (24 * 3600.0, 600.0)]


@pytest.mark.parametrize(("age_s", "wait_s"), AGES)
def test_a_tag_without_processor_waits_a_tenth_of_its_age_and_is_never_failed(
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


def test_the_age_counts_from_the_time_a_task_was_meant_for(bench: RunnerHarness) -> None:
    task = bench.schedule("nobody", delay=3600)
    now = bench.clock.now()
    bench.change(task, expected_time=now, create_time=now - timedelta(seconds=3600))
    bench.run(bench.now(task))
    assert (
        now - MOMENT
        <= bench.now(task).expected_time - timedelta(seconds=5)
        <= bench.clock.now() + MOMENT
    )


def test_a_deploy_that_brings_the_processor_runs_the_row(bench: RunnerHarness) -> None:
    task = bench.schedule("later", body=7)
    bench.run(task)
    bench.registry.processor("later")(bench.ran.append)
    bench.change(task, expected_time=bench.clock.now())
    bench.run(bench.now(task))
    assert (bench.ran, bench.statuses([task]), bench.now(task).error) == ([7], ["DONE"], None)


# -- rows with a lost lease -----------------------------------------------------------------------


def test_rows_that_lapsed_before_run_alone(bench: RunnerHarness) -> None:
    tasks = [bench.schedule(body=n) for n in range(5)]
    for task in tasks[1:3]:
        bench.change(task, lapses=1)
    report = bench.run(*tasks)
    assert [fields.get("count", 1) for fields in bench.named("chunk.claimed")] == [3, 1, 1]
    assert (bench.ran[:3], sorted(bench.ran[3:])) == ([0, 3, 4], [1, 2])
    assert report.ran == 5
    assert bench.statuses(tasks) == ["DONE"] * 5
    assert [bench.now(task).lapses for task in tasks] == [0] * 5


def test_rows_that_lapsed_have_a_share_of_a_backlog(
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
        assert bench.runner.drain("default", [0], most).is_full
        return bench.ran

    assert drain(2) == [0, 1], "that there are some is not known yet"
    passed += runner.ABANDONED_S
    assert drain(3) == [2, 3, "waits 60"]
    passed += 59
    assert drain(2) == [4, 5], "others have half of the time"
    passed += 2
    assert drain(1) == ["lapsed"]
    passed += runner.ABANDONED_S
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
    assert bench.runner.drain("default", [0], 2).is_full
    passed += runner.ABANDONED_S
    assert bench.runner.drain("default", [0], 2).is_full
    assert bench.statuses([lapsed]) == ["HELD"]
    assert not bench.runner.drain("default", [0], 2).is_full, "one row was left"


def test_draining_takes_the_oldest_of_the_highest_priority_and_suspects_alone(
    bench: RunnerHarness,
) -> None:
    tasks = [bench.schedule(body=n, priority=n % 2) for n in range(6)]
    abandoned_row = bench.schedule(body="suspect")
    bench.change(abandoned_row, lapses=2)
    other_queue = bench.schedule(queue="other")
    first = bench.runner.drain("default", [0, 1], 3)
    assert (first.claimed, first.ran, first.is_full) == (3, 3, True)
    assert bench.ran == [1, 3, 5]
    second = bench.runner.drain("default", [0, 1], 10)
    assert (second.claimed, second.ran, second.is_full) == (4, 4, True), (
        "a suspect may have followers"
    )
    assert bench.ran[3:] == [0, 2, 4, "suspect"]
    third = bench.runner.drain("default", [0, 1], 10)
    assert (third.claimed, third.ran, third.is_full) == (0, 0, False)
    assert [fields.get("count", 1) for fields in bench.named("chunk.claimed")] == [3, 3, 1]
    assert bench.statuses([*tasks, abandoned_row, other_queue]) == ["DONE"] * 7 + ["NOT_COMPLETE"]


# -- entries that the claim does not return -------------------------------------------------------


def test_an_entry_that_is_early_goes_back_with_the_rows_own_time(bench: RunnerHarness) -> None:
    task = bench.schedule(delay=20)
    report = bench.runner.run([Entry.of(task, to_us)._replace(due_us=0)])
    assert report.early == (Entry.of(task, to_us),)
    assert (report.claimed, bench.ran) == (0, [])
    assert bench.events.counts["entry.dropped"] == 0


def test_an_entry_that_is_early_by_a_blink_is_waited_for(bench: RunnerHarness) -> None:
    for _ in range(20):
        task = bench.schedule(delay=0.02)
        report = bench.run(task)
        assert (report.ran, report.early, bench.statuses([task])) == (1, (), ["DONE"])
        done = bench.now(task)
        assert done.execution_time is not None
        assert done.execution_time >= task.expected_time, "and not run early"


def test_an_entry_beyond_the_horizon_is_dropped(make: Make) -> None:
    bench = make(horizon_s=10)
    task = bench.schedule(delay=60)
    report = bench.run(task)
    assert (report.early, bench.events.counts["entry.dropped"]) == ((), 1)
    forever = make(horizon_s=None)
    task = forever.schedule(delay=86400)
    assert [entry.id for entry in forever.run(task).early] == [task.id]


def test_entries_that_are_not_ours_any_more_are_dropped_and_counted(bench: RunnerHarness) -> None:
    cancelled, moved, running, done, held = (bench.schedule() for _ in range(5))
    good = bench.schedule(body="good")
    bench.store.tasks.cancel(cancelled.id)
    bench.store.tasks.reschedule(moved.id, bench.clock.now())
    bench.change(running, status=int(Status.RUNNING))
    bench.change(done, status=int(Status.DONE))
    bench.change(held, status=int(Status.HELD))
    unknown = replace(good, id=good.id + 1)
    report = bench.run(cancelled, moved, running, done, held, unknown, good)
    assert (report.ran, report.early, bench.ran) == (1, (), ["good"])
    assert bench.named("entry.dropped") == [{"count": 6}]


def test_a_row_that_is_named_twice_runs_once(bench: RunnerHarness) -> None:
    task = bench.schedule()
    assert bench.run(task, task).ran == 1
    assert bench.run(task).ran == 0
    assert bench.ran == [None]


def test_a_stale_entry_does_not_displace_the_one_that_counts(bench: RunnerHarness) -> None:
    task = bench.schedule(delay=20)
    entry = Entry.of(task, to_us)
    for order in ([entry, entry._replace(version=7)], [entry._replace(version=7), entry]):
        assert bench.runner.run(order).early == (entry,)


def test_a_row_of_another_program_with_the_missions_columns_runs(bench: RunnerHarness) -> None:
    with bench.store.database.begin() as connection:
        connection.execute(
            insert(bench.store.schema.tasks).values(tag="note", message_body='"hello"')
        )
    assert bench.runner.drain("default", [0], 10).ran == 1
    assert bench.ran == ["hello"]


def test_a_pace_is_told_by_the_time_of_the_processors_alone(bench: RunnerHarness) -> None:
    bench.claims.after_claim = lambda: threading.Event().wait(0.2) and None
    bench.claims.before_settle = lambda settlements: threading.Event().wait(0.2) and None
    began = time.monotonic()
    report = bench.run(*[bench.schedule() for _ in range(3)])
    assert report.seconds < 0.1 < 0.4 < time.monotonic() - began


def test_an_error_after_the_end_of_a_row_is_logged(
    bench: RunnerHarness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def execute(work: Any, task: DelayTask, end: Any) -> None:
        end(None, None)
        raise ValueError("a receiver's")

    monkeypatch.setattr(bench, "execute", execute)
    bench.runner = bench.make_runner()
    task = bench.schedule()
    bench.run(task)
    assert bench.statuses([task]) == ["DONE"]
    assert "a receiver's" in caplog.text
