"""A processor completes its task in its own transaction: the effect and DONE are committed
together or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, func, insert, select
from sqlalchemy.orm import Session

from delaytasks.core.errors import InvalidScheduleError, LeaseLostError, NotRunningError
from delaytasks.core.states import Status
from delaytasks.core.task import Cancel, DelayTask, Fail, Snooze
from delaytasks.storage.store import Store
from tests.recording import RunnerHarness

credits = Table("complete_credits", MetaData(), Column("task", Integer))


@pytest.fixture
def bench(store: Store) -> Iterator[RunnerHarness]:
    with store.database.begin() as connection:
        credits.create(connection)
    yield RunnerHarness(store)
    with store.database.begin() as connection:
        credits.drop(connection)


@contextlib.contextmanager
def of_session(bench: RunnerHarness) -> Iterator[Any]:
    with Session(bench.store.database.tx) as session, session.begin():
        yield session


@contextlib.contextmanager
def of_connection(bench: RunnerHarness) -> Iterator[Any]:
    with bench.store.database.begin() as connection:
        yield connection


@pytest.fixture(params=[of_session, of_connection], ids=["session", "connection"])
def begin(request: pytest.FixtureRequest) -> Any:
    return request.param


def effects(bench: RunnerHarness) -> int:
    with bench.store.database.begin() as connection:
        return int(connection.execute(select(func.count()).select_from(credits)).scalar_one())


def processes(bench: RunnerHarness, work: Callable[[DelayTask], Any], **options: Any) -> None:
    bench.registry.processor("credit", **options)(lambda body, task: work(task))


def test_the_effect_and_done_are_one_transaction(bench: RunnerHarness, begin: Any) -> None:
    claimed: list[DelayTask] = []

    def work(task: DelayTask) -> None:
        claimed.append(task)
        with begin(bench) as session:
            session.execute(insert(credits).values(task=1))
            task.complete(session, result={"credited": 1})
            # No other transaction sees the result yet.
        assert bench.now(task).status is Status.DONE

    processes(bench, work)
    task = bench.schedule("credit", key="7")
    bench.run(task)
    done = bench.now(task)
    assert (done.status, done.version, done.result, done.lease_until) == (
        Status.DONE,
        claimed[0].version + 1,
        {"credited": 1},
        None,
    )
    assert effects(bench) == 1
    assert bench.events.counts["task.succeeded"] == 1
    assert bench.events.counts["task.lease_lost"] == 0
    assert bench.schedule("credit", key="7").id != task.id, "its key is free"


def test_a_rollback_of_the_transaction_also_undoes_done(bench: RunnerHarness, begin: Any) -> None:
    def work(task: DelayTask) -> None:
        with begin(bench) as session:
            session.execute(insert(credits).values(task=1))
            task.complete(session)
            raise ConnectionError("busy")

    processes(bench, work, retries="10s")
    task = bench.schedule("credit")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).attempts) == (Status.NOT_COMPLETE, 1)
    assert effects(bench) == 0


def roll_back(bench: RunnerHarness, begin: Any, task: DelayTask) -> None:
    with contextlib.suppress(ConnectionError), begin(bench) as session:
        session.execute(insert(credits).values(task=1))
        task.complete(session)
        raise ConnectionError("busy")


def test_a_processor_that_rolls_back_and_returns_has_a_failed_attempt(
    bench: RunnerHarness, begin: Any
) -> None:
    processes(bench, lambda task: roll_back(bench, begin, task), retries="10s")
    task = bench.schedule("credit")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).attempts) == (Status.NOT_COMPLETE, 1)
    [attempt] = bench.store.tasks.attempts(task.id)
    assert "its transaction was rolled back" in (attempt.error or "")
    assert effects(bench) == 0
    assert not bench.named("task.left_open")
    assert not bench.named("task.lease_lost")


def test_a_processor_that_rolls_back_can_return_another_outcome(
    bench: RunnerHarness, begin: Any
) -> None:
    outcomes = iter([Snooze("10s"), Cancel("not now"), Fail("never")])

    def work(task: DelayTask) -> Any:
        roll_back(bench, begin, task)
        return next(outcomes)

    processes(bench, work)
    left = []
    for _ in range(3):
        task = bench.schedule("credit")
        bench.run(task)
        left.append((bench.now(task).status, bench.now(task).attempts))
    assert left == [(Status.NOT_COMPLETE, 0), (Status.CANCELLED, 1), (Status.FAILED, 1)]


def test_a_rollback_of_the_savepoint_also_undoes_done(bench: RunnerHarness) -> None:
    def work(task: DelayTask) -> None:
        with of_session(bench) as session:
            session.execute(insert(credits).values(task=1))
            nested = session.begin_nested()
            task.complete(session)
            nested.rollback()

    processes(bench, work)
    task = bench.schedule("credit")
    bench.run(task)
    assert bench.now(task).status is Status.FAILED
    assert "its transaction was rolled back" in (bench.now(task).error or "")
    assert effects(bench) == 1


def test_a_run_that_lost_its_task_leaves_no_effect(bench: RunnerHarness, begin: Any) -> None:
    lost: list[LeaseLostError] = []

    def work(task: DelayTask) -> None:
        bench.change(task, lease_until=bench.clock.now() - timedelta(seconds=1))
        assert bench.store.sweeps.recover(5, 10).total == 1
        try:
            with begin(bench) as session:
                session.execute(insert(credits).values(task=1))
                task.complete(session)
        except LeaseLostError as error:
            lost.append(error)
            raise

    processes(bench, work)
    task = bench.schedule("credit")
    bench.run(task)
    assert [error.id for error in lost] == [task.id]
    assert (bench.now(task).status, bench.now(task).lapses) == (Status.NOT_COMPLETE, 1)
    assert effects(bench) == 0


def test_an_error_after_the_commit_leaves_the_task_done(bench: RunnerHarness) -> None:
    def work(task: DelayTask) -> None:
        with of_session(bench) as session:
            task.complete(session)
        raise ValueError("too late")

    processes(bench, work, retries="10s")
    task = bench.schedule("credit")
    bench.run(task)
    assert bench.now(task).status is Status.DONE
    assert len(bench.named("task.raised_late")) == 1


def test_a_transaction_that_is_left_open_is_reported_and_its_task_lapses(
    bench: RunnerHarness,
) -> None:
    sessions: list[Session] = []

    def work(task: DelayTask) -> None:
        sessions.append(Session(bench.store.database.tx))
        task.complete(sessions[0])

    processes(bench, work)
    task = bench.schedule("credit")
    bench.run(task)
    assert len(bench.named("task.left_open")) == 1
    sessions[0].close()
    assert bench.now(task).status is Status.RUNNING, "its lease ends some time"


def test_an_error_with_an_open_transaction_does_not_prevent_settling_other_rows(
    bench: RunnerHarness,
) -> None:
    sessions: list[Session] = []

    def work(task: DelayTask) -> None:
        sessions.append(Session(bench.store.database.tx))
        sessions[0].execute(insert(credits).values(task=1))
        task.complete(sessions[0])
        raise ValueError("and nobody rolls back")

    processes(bench, work, retries="10s")
    task, neighbour = bench.schedule("credit"), bench.schedule()
    settled: list[int] = []

    def note(settlements: Any) -> None:
        settled.extend(each.task.id for each in settlements)
        if bench.store.database.can.begins_late:  # SQLite has one writer at a time
            sessions[0].close()

    bench.claims.before_settle = note
    try:
        bench.run(task, neighbour)
    finally:
        sessions[0].close()
    assert settled == [neighbour.id]
    assert bench.now(neighbour).status is Status.DONE
    assert len(bench.named("task.left_open")) == 1
    assert (bench.now(task).status, effects(bench)) == (Status.RUNNING, 0), (
        "its lease ends some time"
    )


def test_complete_is_for_the_run_of_the_task(bench: RunnerHarness) -> None:
    other = bench.schedule("credit")
    errors: list[Exception] = []

    def work(task: DelayTask) -> None:
        for call in (lambda: other.complete(object()), lambda: task.complete()):
            try:
                call()
            except Exception as error:
                errors.append(error)

    processes(bench, work)
    bench.run(bench.schedule("credit"))
    with pytest.raises(NotRunningError):
        other.complete()
    assert [type(error) for error in errors] == [NotRunningError, InvalidScheduleError]


@pytest.mark.parametrize("is_async", [False, True])
def test_concurrent_rows_are_completed_each_in_its_own_transaction(
    bench: RunnerHarness, begin: Any, is_async: bool
) -> None:
    turn = threading.Lock()  # SQLite has one writer at a time

    def work(body: Any, task: DelayTask) -> None:
        with turn, begin(bench) as session:
            session.execute(insert(credits).values(task=body))
            task.complete(session, result=body)
            if body == 3:
                raise ConnectionError("busy")

    async def work_on_loop(body: Any, task: DelayTask) -> None:
        await asyncio.to_thread(work, body, task)

    bench.registry.processor("credit", in_flight=5, retries="10s")(
        work_on_loop if is_async else work
    )
    tasks = [bench.schedule("credit", n) for n in range(10)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE"] * 3 + ["NOT_COMPLETE"] + ["DONE"] * 6
    assert bench.now(tasks[9]).result == 9
    assert effects(bench) == 9
    assert bench.events.counts["task.lease_lost"] == 0


def test_a_batch_is_completed_in_the_transaction_of_its_writes(bench: RunnerHarness) -> None:
    def work(tasks: list[DelayTask]) -> None:
        with of_session(bench) as session:
            session.execute(insert(credits), [{"task": task.body} for task in tasks])
            for task in tasks:
                task.complete(session)

    bench.registry.processor("credit", batch=10)(work)
    tasks = [bench.schedule("credit", n, key=str(n)) for n in range(5)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE"] * 5
    assert effects(bench) == 5
    assert bench.events.counts["task.succeeded"] == 5
