"""Outcomes and the transactions that complete a task."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select, update
from sqlalchemy.orm import Session

from delaytasks.core.errors import (
    DuplicateTaskError,
    InvalidInputError,
    LeaseLostError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.states import Status
from delaytasks.core.task import Cancel, DelayTask, Done, Fail, NewTask, Retry, Snooze
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now
from tests.recording import RunnerHarness

# How attempts end, on each database: retry schedules, outcomes, attempts


@pytest.fixture
def bench(store: Store) -> RunnerHarness:
    return RunnerHarness(store)


def run_again(bench: RunnerHarness, task: DelayTask) -> DelayTask:
    """Make the task due, run it again, and return it."""
    bench.change(task, expected_time=bench.clock.now() - timedelta(milliseconds=10))
    bench.run(bench.now(task))
    return bench.now(task)


def returns(bench: RunnerHarness, tag: str, value: Any, **options: Any) -> None:
    bench.registry.processor(tag, **options)(lambda body: value)


def raises(bench: RunnerHarness, tag: str, error: BaseException, **options: Any) -> None:
    def fail(body: Any) -> None:
        raise error

    bench.registry.processor(tag, **options)(fail)


def wait_s(bench: RunnerHarness, task: DelayTask) -> float:
    return (task.expected_time - bench.clock.now()).total_seconds()


def test_a_retry_schedule_with_two_delays_allows_three_runs(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError("busy"), retries="10s 60s")
    task = bench.schedule("pay")
    bench.run(task)
    first = bench.now(task)
    assert (first.status, first.attempts, first.lapses) == (Status.NOT_COMPLETE, 1, 0)
    assert 9 < wait_s(bench, first) <= 10
    assert first.error is not None
    assert "busy" in first.error
    second = run_again(bench, task)
    assert second.status is Status.NOT_COMPLETE
    assert 59 < wait_s(bench, second) <= 60
    third = run_again(bench, task)
    assert (third.status, third.attempts) == (Status.FAILED, 3)
    kept = bench.store.tasks.attempts(task.id)
    assert [(one.number, one.worker) for one in kept] == [(n, "worker-1") for n in (1, 2, 3)]
    for one in kept:
        assert one.began is not None
        assert one.began <= one.ended
        assert one.error is not None
        assert "ConnectionError: busy" in one.error


def test_a_retry_that_is_due_within_the_horizon_is_armed(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError(), retries="10s 1h")
    task = bench.schedule("pay")
    bench.run(task)
    [entry] = bench.timer.armed
    assert (entry.id, entry.version) == (task.id, bench.now(task).version)
    bench.timer.armed.clear()
    run_again(bench, task)
    assert bench.timer.armed == []


def test_a_task_that_succeeds_after_a_retry_is_done_and_keeps_its_failed_attempts(
    bench: RunnerHarness,
) -> None:
    answers = [ConnectionError("first"), None]

    @bench.registry.processor("pay", retries="1s 1s")
    def pay(body: Any) -> None:
        error = answers.pop(0)
        if error is not None:
            raise error

    task = bench.schedule("pay")
    bench.run(task)
    done = run_again(bench, task)
    assert (done.status, done.attempts, done.error) == (Status.DONE, 2, None)
    assert [one.number for one in bench.store.tasks.attempts(task.id)] == [1]


def test_a_success_leaves_no_attempt(bench: RunnerHarness) -> None:
    task = bench.schedule()
    bench.run(task)
    assert bench.store.tasks.attempts(task.id) == []


def test_a_task_may_have_its_own_retry_schedule(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError())
    task = bench.schedule("pay", retries=RetrySchedule("30s"))
    assert bench.now(task).retry_schedule == RetrySchedule("30s")
    bench.run(task)
    assert 29 < wait_s(bench, bench.now(task)) <= 30
    assert run_again(bench, task).status is Status.FAILED


def test_an_error_without_a_retry_schedule_fails_the_task_without_a_retry(
    bench: RunnerHarness,
) -> None:
    raises(bench, "pay", ValueError("wrong account"), retries={ValueError: None, Exception: "10s"})
    task = bench.schedule("pay")
    bench.run(task)
    assert bench.now(task).status is Status.FAILED


@pytest.mark.slow
def test_the_last_fifty_attempts_are_kept(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError(), retries=RetrySchedule.fixed(0, times=60))
    task = bench.schedule("pay")
    for _ in range(60):
        run_again(bench, task)
    assert [one.number for one in bench.store.tasks.attempts(task.id)] == list(range(11, 61))
    run_again(bench, task)
    bench.store.tasks.rerun(task.id, bench.store.tasks.now())  # counts attempts from 1 again
    for _ in range(55):
        run_again(bench, task)
    assert [one.number for one in bench.store.tasks.attempts(task.id)] == list(range(6, 56))


def test_a_lapse_is_an_attempt_that_failed(bench: RunnerHarness) -> None:
    task = bench.schedule()
    bench.claims.claim([bench.entry(task)])
    bench.change(task, lease_until=bench.clock.now() - timedelta(seconds=1))
    bench.store.sweeps.recover(5, 10)
    [kept] = bench.store.tasks.attempts(task.id)
    assert (kept.number, kept.worker) == (1, "worker-1")
    assert "lost its lease" in (kept.error or "")


# -- outcomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, Done(), 7, "text"])
def test_anything_that_is_no_outcome_is_success(bench: RunnerHarness, value: Any) -> None:
    returns(bench, "pay", value)
    task = bench.schedule("pay")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).result) == (Status.DONE, None)


@pytest.mark.parametrize(
    ("value", "kept", "dropped"),
    [
        ({"paid": 7}, {"paid": 7}, 0),
        (Done([1, "é"]), [1, "é"], 0),
        (None, None, 0),
        *((value, None, 1) for value in (object(), "x" * 100_000, float("nan"))),
    ],
)
def test_a_result_is_stored_if_the_processor_has_keep_result_and_it_can_be_stored(
    bench: RunnerHarness, value: Any, kept: Any, dropped: int
) -> None:
    returns(bench, "pay", value, keep_result=True)
    task = bench.schedule("pay")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).result) == (Status.DONE, kept)
    assert len(bench.named("result.dropped")) == dropped


def test_retry_with_a_time_waits_for_it_and_uses_one_retry_delay(bench: RunnerHarness) -> None:
    returns(bench, "pay", Retry(after="5m", reason="the bank is closed"), retries="10s")
    task = bench.schedule("pay")
    bench.run(task)
    first = bench.now(task)
    assert (first.status, first.attempts, first.error) == (
        Status.NOT_COMPLETE,
        1,
        "the bank is closed",
    )
    assert 299 < wait_s(bench, first) <= 300
    assert run_again(bench, task).status is Status.FAILED


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Retry(), "Retry() without after= needs a retry schedule"),
        (Retry(after=-1), "after is"),
        (Snooze("soon"), "after is"),
        (Snooze(float("inf")), "after is"),
    ],
)
def test_an_invalid_outcome_fails_the_task_with_an_explanation(
    bench: RunnerHarness, value: Any, says: str
) -> None:
    returns(bench, "pay", value)
    task = bench.schedule("pay")
    bench.run(task)
    assert bench.now(task).status is Status.FAILED
    assert f"InvalidInputError: {says}" in (bench.now(task).error or "")


def test_snooze_uses_no_attempt(bench: RunnerHarness) -> None:
    returns(bench, "pay", Snooze("1h"), retries="10s")
    task = bench.schedule("pay")
    for _ in range(3):
        snoozed = run_again(bench, task)
        assert (snoozed.status, snoozed.attempts, snoozed.error) == (Status.NOT_COMPLETE, 0, None)
        assert 3599 < wait_s(bench, snoozed) <= 3600
    assert bench.store.tasks.attempts(task.id) == []


def test_cancel_ends_the_task_and_frees_its_key(bench: RunnerHarness) -> None:
    returns(bench, "pay", Cancel("paid by other means"), retries="10s")
    task = bench.schedule("pay", key="7")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).error) == (
        Status.CANCELLED,
        "paid by other means",
    )
    assert bench.schedule("pay", key="7").id != task.id, "its key is free"


def test_fail_uses_no_further_retry(bench: RunnerHarness) -> None:
    returns(bench, "pay", Fail("no such account"), retries="10s")
    task = bench.schedule("pay")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).error) == (Status.FAILED, "no such account")
    assert len(bench.store.tasks.attempts(task.id)) == 1


# -- expiry and keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["processor", "task"])
def test_an_expired_task_is_cancelled(bench: RunnerHarness, where: str) -> None:
    returns(
        bench, "pay", None, **({"expires": "1m"} if where == "processor" else {"expires": "1d"})
    )
    late = bench.schedule("pay", **({"expires": "1m"} if where == "task" else {}))
    bench.change(late, expected_time=bench.clock.now() - timedelta(seconds=61))
    bench.run(bench.now(late))
    found = bench.now(late)
    assert (found.status, found.attempts, found.execution_time) == (Status.CANCELLED, 0, None)
    assert "expired" in (found.error or "")
    in_time = bench.schedule("pay")
    bench.run(in_time)
    assert bench.now(in_time).status is Status.DONE


def test_a_task_whose_key_went_to_another_one_does_not_run_again(bench: RunnerHarness) -> None:
    newer: list[DelayTask] = []

    @bench.registry.processor("pay", retries="10s")
    def pay(body: Any) -> None:
        new = NewTask("pay", "newer", 60, key="7")
        newer.append(bench.producer.schedule(new, "replace", None))
        raise ConnectionError("busy")

    older = bench.schedule("pay", key="7")
    bench.run(older)
    assert bench.now(older).status is Status.FAILED
    assert "its key '7' went to another task" in (bench.now(older).error or "")
    assert bench.now(newer[0]).status is Status.NOT_COMPLETE
    with pytest.raises(DuplicateTaskError):
        bench.schedule("pay", key="7")


def test_a_task_keeps_its_key_until_its_last_retry(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError(), retries="10s")
    task = bench.schedule("pay", key="7")
    bench.run(task)
    with pytest.raises(DuplicateTaskError):
        bench.schedule("pay", key="7")
    assert run_again(bench, task).status is Status.FAILED
    assert bench.schedule("pay", key="7").id != task.id


def test_attempts_are_deleted_with_their_task(bench: RunnerHarness) -> None:
    raises(bench, "pay", ValueError())
    task = bench.schedule("pay")
    bench.run(task)
    old = bench.clock.now() - timedelta(days=1)
    bench.change(task, expected_time=old, update_time=old)
    assert bench.store.sweeps.purge(3600, 10) == 1
    with pytest.raises(TaskNotFoundError):
        bench.store.tasks.attempts(task.id)


def test_a_task_that_is_retried_while_it_would_be_purged_keeps_its_attempts(
    bench: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises(bench, "pay", ValueError())
    task, other = bench.schedule("pay"), bench.schedule("pay")
    bench.run(task, other)
    old = bench.clock.now() - timedelta(days=1)
    for each in (task, other):
        bench.change(each, expected_time=old, update_time=old)
    sweeps = bench.store.sweeps
    lock_all = sweeps._keys.lock_all  # runs between the read and the delete

    def retried_meanwhile(on: Any, tasks: Any) -> Any:
        t = bench.store.schema.tasks
        on.execute(update(t).where(t.c.id == task.id).values(update_time=db_now()))
        return lock_all(on, tasks)

    monkeypatch.setattr(sweeps._keys, "lock_all", retried_meanwhile)
    assert sweeps.purge(3600, 10) == 1
    assert len(bench.store.tasks.attempts(task.id)) == 1


def test_a_batch_ends_each_of_its_tasks_and_keeps_their_failed_attempts(
    bench: RunnerHarness,
) -> None:
    def work(tasks: list[DelayTask]) -> Any:
        return [Done(7), Retry(reason="busy"), Snooze("30m"), Cancel("closed"), Fail("no")]

    bench.registry.processor("batch", batch=10, retries="10s", keep_result=True)(work)
    tasks = [bench.schedule("batch", key=str(n)) for n in range(5)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED", "FAILED"]
    assert bench.now(tasks[0]).result == 7
    kept = [[attempt.error for attempt in bench.store.tasks.attempts(task.id)] for task in tasks]
    assert kept == [[], ["busy"], [], [], ["no"]]
    assert bench.schedule("batch", key="0").id != tasks[0].id, "its key is free"


# A processor completes its task in its own transaction: the effect and DONE are committed
# together or not at all


credits = Table("complete_credits", MetaData(), Column("task", Integer))


@pytest.fixture
def credit_bench(store: Store) -> Iterator[RunnerHarness]:
    with store.database.begin() as connection:
        credits.create(connection)
    yield RunnerHarness(store)
    with store.database.begin() as connection:
        credits.drop(connection)


@contextlib.contextmanager
def of_session(credit_bench: RunnerHarness) -> Iterator[Any]:
    with Session(credit_bench.store.database.tx) as session, session.begin():
        yield session


@contextlib.contextmanager
def of_connection(credit_bench: RunnerHarness) -> Iterator[Any]:
    with credit_bench.store.database.begin() as connection:
        yield connection


@pytest.fixture(params=[of_session, of_connection], ids=["session", "connection"])
def begin(request: pytest.FixtureRequest) -> Any:
    return request.param


def effects(credit_bench: RunnerHarness) -> int:
    with credit_bench.store.database.begin() as connection:
        return int(connection.execute(select(func.count()).select_from(credits)).scalar_one())


def processes(
    credit_bench: RunnerHarness, work: Callable[[DelayTask], Any], **options: Any
) -> None:
    credit_bench.registry.processor("credit", **options)(lambda body, task: work(task))


def test_the_effect_and_done_are_one_transaction(credit_bench: RunnerHarness, begin: Any) -> None:
    claimed: list[DelayTask] = []

    def work(task: DelayTask) -> None:
        claimed.append(task)
        with begin(credit_bench) as session:
            session.execute(insert(credits).values(task=1))
            task.complete(session, result={"credited": 1})
            # No other transaction sees the result yet.
        assert credit_bench.now(task).status is Status.DONE

    processes(credit_bench, work)
    task = credit_bench.schedule("credit", key="7")
    credit_bench.run(task)
    done = credit_bench.now(task)
    assert (done.status, done.version, done.result, done.lease_until) == (
        Status.DONE,
        claimed[0].version + 1,
        {"credited": 1},
        None,
    )
    assert effects(credit_bench) == 1
    assert credit_bench.events.counts["task.succeeded"] == 1
    assert credit_bench.events.counts["task.lease_lost"] == 0
    assert credit_bench.schedule("credit", key="7").id != task.id, "its key is free"


def test_a_rollback_of_the_transaction_also_undoes_done(
    credit_bench: RunnerHarness, begin: Any
) -> None:
    def work(task: DelayTask) -> None:
        with begin(credit_bench) as session:
            session.execute(insert(credits).values(task=1))
            task.complete(session)
            raise ConnectionError("busy")

    processes(credit_bench, work, retries="10s")
    task = credit_bench.schedule("credit")
    credit_bench.run(task)
    assert (credit_bench.now(task).status, credit_bench.now(task).attempts) == (
        Status.NOT_COMPLETE,
        1,
    )
    assert effects(credit_bench) == 0


def roll_back(credit_bench: RunnerHarness, begin: Any, task: DelayTask) -> None:
    with contextlib.suppress(ConnectionError), begin(credit_bench) as session:
        session.execute(insert(credits).values(task=1))
        task.complete(session)
        raise ConnectionError("busy")


def test_a_processor_that_rolls_back_and_returns_has_a_failed_attempt(
    credit_bench: RunnerHarness, begin: Any
) -> None:
    processes(credit_bench, lambda task: roll_back(credit_bench, begin, task), retries="10s")
    task = credit_bench.schedule("credit")
    credit_bench.run(task)
    assert (credit_bench.now(task).status, credit_bench.now(task).attempts) == (
        Status.NOT_COMPLETE,
        1,
    )
    [attempt] = credit_bench.store.tasks.attempts(task.id)
    assert "its transaction was rolled back" in (attempt.error or "")
    assert effects(credit_bench) == 0
    assert not credit_bench.named("task.left_open")
    assert not credit_bench.named("task.lease_lost")


def test_a_processor_that_rolls_back_can_return_another_outcome(
    credit_bench: RunnerHarness, begin: Any
) -> None:
    outcomes = iter([Snooze("10s"), Cancel("not now"), Fail("never")])

    def work(task: DelayTask) -> Any:
        roll_back(credit_bench, begin, task)
        return next(outcomes)

    processes(credit_bench, work)
    left = []
    for _ in range(3):
        task = credit_bench.schedule("credit")
        credit_bench.run(task)
        left.append((credit_bench.now(task).status, credit_bench.now(task).attempts))
    assert left == [(Status.NOT_COMPLETE, 0), (Status.CANCELLED, 1), (Status.FAILED, 1)]


def test_a_rollback_of_the_savepoint_also_undoes_done(credit_bench: RunnerHarness) -> None:
    def work(task: DelayTask) -> None:
        with of_session(credit_bench) as session:
            session.execute(insert(credits).values(task=1))
            nested = session.begin_nested()
            task.complete(session)
            nested.rollback()

    processes(credit_bench, work)
    task = credit_bench.schedule("credit")
    credit_bench.run(task)
    assert credit_bench.now(task).status is Status.FAILED
    assert "its transaction was rolled back" in (credit_bench.now(task).error or "")
    assert effects(credit_bench) == 1


def test_a_run_that_lost_its_task_leaves_no_effect(credit_bench: RunnerHarness, begin: Any) -> None:
    lost: list[LeaseLostError] = []

    def work(task: DelayTask) -> None:
        credit_bench.change(task, lease_until=credit_bench.clock.now() - timedelta(seconds=1))
        assert credit_bench.store.sweeps.recover(5, 10).total == 1
        try:
            with begin(credit_bench) as session:
                session.execute(insert(credits).values(task=1))
                task.complete(session)
        except LeaseLostError as error:
            lost.append(error)
            raise

    processes(credit_bench, work)
    task = credit_bench.schedule("credit")
    credit_bench.run(task)
    assert [error.id for error in lost] == [task.id]
    assert (credit_bench.now(task).status, credit_bench.now(task).lapses) == (
        Status.NOT_COMPLETE,
        1,
    )
    assert effects(credit_bench) == 0


def test_an_error_after_the_commit_leaves_the_task_done(credit_bench: RunnerHarness) -> None:
    def work(task: DelayTask) -> None:
        with of_session(credit_bench) as session:
            task.complete(session)
        raise ValueError("too late")

    processes(credit_bench, work, retries="10s")
    task = credit_bench.schedule("credit")
    credit_bench.run(task)
    assert credit_bench.now(task).status is Status.DONE
    assert len(credit_bench.named("task.raised_late")) == 1


def test_a_transaction_that_is_left_open_is_reported_and_its_task_lapses(
    credit_bench: RunnerHarness,
) -> None:
    sessions: list[Session] = []

    def work(task: DelayTask) -> None:
        sessions.append(Session(credit_bench.store.database.tx))
        task.complete(sessions[0])

    processes(credit_bench, work)
    task = credit_bench.schedule("credit")
    credit_bench.run(task)
    assert len(credit_bench.named("task.left_open")) == 1
    sessions[0].close()
    assert credit_bench.now(task).status is Status.RUNNING, "its lease ends some time"


def test_an_error_with_an_open_transaction_does_not_prevent_settling_other_rows(
    credit_bench: RunnerHarness,
) -> None:
    sessions: list[Session] = []

    def work(task: DelayTask) -> None:
        sessions.append(Session(credit_bench.store.database.tx))
        sessions[0].execute(insert(credits).values(task=1))
        task.complete(sessions[0])
        raise ValueError("and nobody rolls back")

    processes(credit_bench, work, retries="10s")
    task, neighbour = credit_bench.schedule("credit"), credit_bench.schedule()
    settled: list[int] = []

    def note(settlements: Any) -> None:
        settled.extend(each.task.id for each in settlements)
        if credit_bench.store.database.can.begins_late:  # SQLite has one writer at a time
            sessions[0].close()

    credit_bench.claims.before_settle = note
    try:
        credit_bench.run(task, neighbour)
    finally:
        sessions[0].close()
    assert settled == [neighbour.id]
    assert credit_bench.now(neighbour).status is Status.DONE
    assert len(credit_bench.named("task.left_open")) == 1
    assert (credit_bench.now(task).status, effects(credit_bench)) == (Status.RUNNING, 0), (
        "its lease ends some time"
    )


def test_complete_is_for_the_run_of_the_task(credit_bench: RunnerHarness) -> None:
    other = credit_bench.schedule("credit")
    errors: list[Exception] = []

    def work(task: DelayTask) -> None:
        for call in (lambda: other.complete(object()), lambda: task.complete()):
            try:
                call()
            except Exception as error:
                errors.append(error)

    processes(credit_bench, work)
    credit_bench.run(credit_bench.schedule("credit"))
    with pytest.raises(TaskStateError):
        other.complete()
    assert [type(error) for error in errors] == [TaskStateError, InvalidInputError]


@pytest.mark.parametrize("is_async", [False, True])
def test_concurrent_rows_are_completed_each_in_its_own_transaction(
    credit_bench: RunnerHarness, begin: Any, is_async: bool
) -> None:
    turn = threading.Lock()  # SQLite has one writer at a time

    def work(body: Any, task: DelayTask) -> None:
        with turn, begin(credit_bench) as session:
            session.execute(insert(credits).values(task=body))
            task.complete(session, result=body)
            if body == 3:
                raise ConnectionError("busy")

    async def work_on_loop(body: Any, task: DelayTask) -> None:
        await asyncio.to_thread(work, body, task)

    credit_bench.registry.processor("credit", in_flight=5, retries="10s")(
        work_on_loop if is_async else work
    )
    tasks = [credit_bench.schedule("credit", n) for n in range(10)]
    credit_bench.run(*tasks)
    assert credit_bench.statuses(tasks) == ["DONE"] * 3 + ["NOT_COMPLETE"] + ["DONE"] * 6
    assert credit_bench.now(tasks[9]).result == 9
    assert effects(credit_bench) == 9
    assert credit_bench.events.counts["task.lease_lost"] == 0


def test_a_batch_is_completed_in_the_transaction_of_its_writes(credit_bench: RunnerHarness) -> None:
    def work(tasks: list[DelayTask]) -> None:
        with of_session(credit_bench) as session:
            session.execute(insert(credits), [{"task": task.body} for task in tasks])
            for task in tasks:
                task.complete(session)

    credit_bench.registry.processor("credit", batch=10)(work)
    tasks = [credit_bench.schedule("credit", n, key=str(n)) for n in range(5)]
    credit_bench.run(*tasks)
    assert credit_bench.statuses(tasks) == ["DONE"] * 5
    assert effects(credit_bench) == 5
    assert credit_bench.events.counts["task.succeeded"] == 5
