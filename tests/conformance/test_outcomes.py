"""Outcomes and the transactions that complete a task."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import Cancel, DelayedTask, Done, Fail, Retry, Snooze, Status
from tests.world import World

# How attempts end, on each database: retry schedules, outcomes, attempts


def returns(world: World, tag: str, value: Any, **options: Any) -> None:
    world.delays.processor(tag, **options)(lambda body: value)


def wait_s(world: World, task: DelayedTask) -> float:
    """Return the wait to the millisecond, since the clock of SQLite counts no shorter times."""
    return round((task.expected_time - world.now()).total_seconds(), 3)


def test_a_retry_schedule_with_two_delays_allows_three_runs(world: World) -> None:
    def busy(body: Any) -> None:
        raise ConnectionError("busy")

    world.delays.processor("pay", retries="10s 60s")(busy)
    task = world.schedule("pay", key="7")
    world.broker.lose()
    world.run(task)
    first = world.read(task)
    assert [(entry.id, entry.version) for entry in world.broker.armed] == [(task.id, first.version)]
    with pytest.raises(e.DuplicateTaskError):
        world.schedule("pay", key="7")
    assert (first.status, first.runs, first.lapses) == (Status.NOT_COMPLETE, 1, 0)
    assert 9 < wait_s(world, first) <= 10
    assert "busy" in str(first.error)
    second = world.run_again(task)
    assert len(world.broker.armed) == 1, "the second retry is beyond the horizon"
    assert second.status is Status.NOT_COMPLETE
    assert 59 < wait_s(world, second) <= 60
    third = world.run_again(task)
    assert (third.status, third.runs) == (Status.FAILED, 3)
    assert world.schedule("pay", key="7").id != task.id, "its key is free"
    for number, one in enumerate(kept := world.attempts(task), 1):
        assert (one.number, one.worker) == (number, "worker-1")
        assert one.began <= one.ended  # type: ignore[operator]
        assert "ConnectionError: busy" in str(one.error)
    assert len(kept) == 3


# -- outcomes -------------------------------------------------------------------------------------


RESULTS: list[Any] = [({"paid": 7}, {"paid": 7}, 0), (Done([1, "é"]), [1, "é"], 0)]
UNSTORABLE = (object(), iter([1]), range(3), "x" * 10**5, float("nan"))
RESULTS += [(None, None, 0), *((value, None, 1) for value in UNSTORABLE)]


@pytest.mark.parametrize(("value", "kept", "dropped"), RESULTS)
def test_a_result_is_stored_if_asked_for(world: World, value: Any, kept: Any, dropped: int) -> None:
    returns(world, "pay", value, keep_result=True)
    returns(world, "forget", value)
    world.run(task := world.schedule("pay"), forgotten := world.schedule("forget"))
    for done, result in ((task, kept), (forgotten, None)):
        assert (world.read(done).status, world.read(done).result) == (Status.DONE, result)
    assert len([told["error"] for told in world.told("result.dropped")]) == dropped


# -- expiry and keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["processor", "task"])
def test_an_expired_task_is_cancelled(world: World, where: str) -> None:
    own: Any = {"max_late": "1m"} if where == "task" else {}
    returns(world, "pay", None, max_late="1d" if own else "1m")
    world.run(in_time := world.schedule("pay", **own))
    late = world.schedule("pay", **own)
    world.change(late, expected_time=world.now() - timedelta(seconds=61))
    world.run(world.read(late))
    found = world.read(late)
    assert (found.status, found.runs, found.execution_time) == (Status.CANCELLED, 0, None)
    assert "expired" in (found.error or "")
    assert world.read(in_time).status is Status.DONE


def test_a_task_whose_key_went_to_another_one_does_not_run_again(world: World) -> None:
    newer: list[DelayedTask] = []

    @world.delays.processor("pay", retries="10s")
    def pay(body: Any) -> None:
        newer.append(world.schedule("pay", "newer", 60, key="7", on_conflict="replace"))
        raise ConnectionError("busy")

    world.run(older := world.schedule("pay", key="7"))
    assert world.read(older).status is Status.FAILED
    error = str(world.read(older).error)
    assert "ConnectionError: busy" in error
    assert "its key '7' went to another task" in error
    assert world.read(newer[0]).status is Status.NOT_COMPLETE
    with pytest.raises(e.DuplicateTaskError):
        world.schedule("pay", key="7")


def test_a_batch_ends_each_of_its_tasks_and_keeps_their_failed_attempts(world: World) -> None:
    def work(tasks: list[DelayedTask]) -> Any:
        retry = Retry(after="5m", reason="busy")
        return [Done(7), retry, Snooze("30m"), Cancel("closed"), Fail("no")]

    world.delays.processor("batch", batch=10, retries="10s", keep_result=True)(work)
    tasks = [world.schedule("batch", key=str(n)) for n in range(5)]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED", "FAILED"]
    assert world.read(tasks[0]).result == 7
    assert [round(wait_s(world, task), -1) for task in map(world.read, tasks[1:3])] == [300, 1800]
    kept = [[attempt.error for attempt in world.attempts(task)] for task in tasks]
    assert kept == [[], ["busy"], [], [], ["no"]]
    assert world.read(tasks[3]).error == "closed"
    for ended in (0, 3, 4):
        assert world.schedule("batch", key=str(ended)).id != tasks[ended].id, "its key is free"


# A processor completes its task in its own transaction: the effect and DONE are committed
# together or not at all


credits = Table("complete_credits", MetaData(), Column("task", Integer))


@pytest.fixture
def credit_world(world: World) -> Iterator[World]:
    credits.create(world.engine)
    yield world
    credits.drop(world.engine)


@contextlib.contextmanager
def of_session(credit_world: World) -> Iterator[Any]:
    with Session(credit_world.engine) as session, session.begin():
        yield session


@pytest.fixture(params=[of_session, World.begin], ids=["session", "connection"])
def begin(request: pytest.FixtureRequest) -> Any:
    return request.param


def effects(credit_world: World) -> int:
    return len(credit_world.rows(select(credits)))


def processes(credit_world: World, work: Callable[[DelayedTask], Any], **options: Any) -> None:
    credit_world.delays.processor("credit", **options)(lambda body, task: work(task))


def run_one(credit_world: World, work: Callable[[DelayedTask], Any], **options: Any) -> DelayedTask:
    """Run a task with this processor, and return it afterwards."""
    processes(credit_world, work, **options)
    credit_world.run(task := credit_world.schedule("credit"))
    return credit_world.read(task)


def test_the_effect_and_done_are_one_transaction(credit_world: World, begin: Any) -> None:
    claimed: list[DelayedTask] = []

    def work(task: DelayedTask) -> None:
        claimed.append(task)
        with begin(credit_world) as session:
            session.execute(insert(credits).values(task=1))
            task.complete(session, result={"credited": 1})
            # No other transaction sees the result yet.
        assert credit_world.read(task).status is Status.DONE

    processes(credit_world, work)
    task = credit_world.schedule("credit", key="7")
    credit_world.change(task, lapses=1)
    credit_world.run(task)
    done = credit_world.read(task)
    assert (done.status, done.version) == (Status.DONE, claimed[0].version + 1)
    assert (done.result, done.lease_until, done.lapses) == ({"credited": 1}, None, 0)
    assert effects(credit_world) == 1
    assert credit_world.count("task.succeeded") == 1
    assert credit_world.count("task.lease_lost") == 0
    assert credit_world.owner("7", "credit") is None, "its key is free"


def test_a_rollback_also_undoes_done_and_the_outcome_counts(
    credit_world: World, begin: Any
) -> None:
    outcomes: list[Any] = [None, Snooze("10s"), Cancel("not now"), Fail("never"), ValueError("no")]
    tasks = [credit_world.schedule("credit") for _ in outcomes]

    def work(task: DelayedTask) -> Any:
        outcome = outcomes.pop(0)
        with contextlib.suppress(ConnectionError), begin(credit_world) as session:
            session.execute(insert(credits).values(task=1))
            task.complete(session)
            raise outcome if isinstance(outcome, Exception) else ConnectionError("busy")
        return outcome

    processes(credit_world, work, retries="10s")
    for task in tasks:
        credit_world.run(task)
    assert [(one.status.name, one.runs) for one in map(credit_world.read, tasks)] == [
        ("NOT_COMPLETE", 1), ("NOT_COMPLETE", 0), ("CANCELLED", 1), ("FAILED", 1),
        ("NOT_COMPLETE", 1),
    ]  # fmt: skip
    [attempt] = credit_world.attempts(tasks[0])
    assert "its transaction was rolled back" in (attempt.error or "")
    assert effects(credit_world) == 0
    assert not credit_world.told("task.left_open") + credit_world.told("task.lease_lost")


def test_a_rollback_of_the_savepoint_also_undoes_done(credit_world: World) -> None:
    def work(task: DelayedTask) -> None:
        with of_session(credit_world) as session:
            session.execute(insert(credits).values(task=1))
            nested = session.begin_nested()
            task.complete(session)
            nested.rollback()

    found = run_one(credit_world, work)
    assert found.status is Status.FAILED
    assert "its transaction was rolled back" in (found.error or "")
    assert effects(credit_world) == 1


def test_a_run_that_lost_its_task_leaves_no_effect(credit_world: World, begin: Any) -> None:
    def work(task: DelayedTask) -> None:
        assert credit_world.lapse(task) == 1
        lost = pytest.raises(e.LeaseLostError)
        with lost as caught, begin(credit_world) as session:
            session.execute(insert(credits).values(task=1))
            task.complete(session)
        assert caught.value.id == task.id
        credit_world.notes.append("lost")
        raise caught.value

    found = run_one(credit_world, work)
    assert (found.status, found.lapses) == (Status.NOT_COMPLETE, 1)
    assert (credit_world.notes, effects(credit_world)) == (["lost"], 0)


def test_an_error_after_the_commit_leaves_the_task_done(credit_world: World) -> None:
    def work(task: DelayedTask) -> None:
        with of_session(credit_world) as session:
            task.complete(session)
        raise ValueError("too late")

    assert run_one(credit_world, work, retries="10s").status is Status.DONE
    assert len(credit_world.told("task.raised_late")) == 1


def test_a_transaction_left_open_is_reported_and_stops_no_other_settlement(
    credit_world: World,
) -> None:
    sessions: list[Session] = []

    def work(task: DelayedTask) -> None:
        sessions.append(Session(credit_world.engine))
        sessions[0].execute(insert(credits).values(task=1))
        task.complete(sessions[0])
        raise ValueError("and nobody rolls back")

    processes(credit_world, work, retries="10s")
    task, neighbour = credit_world.schedule("credit"), credit_world.schedule()
    settled: list[int] = []

    def note(settlements: Any) -> None:
        settled.extend(each.task.id for each in settlements)
        if not credit_world.has_row_locks:  # SQLite has one writer at a time
            sessions[0].close()

    credit_world.before_settle = note
    try:
        credit_world.run(task, neighbour)
    finally:
        sessions[0].close()
    assert settled == [neighbour.id]
    assert credit_world.read(neighbour).status is Status.DONE
    assert len(credit_world.told("task.left_open")) == 1
    assert credit_world.statuses([task]) == ["RUNNING"], "its lease ends some time"
    assert effects(credit_world) == 0


def test_complete_is_for_the_run_of_the_task(credit_world: World) -> None:
    other = credit_world.schedule("credit")

    def work(task: DelayedTask) -> None:
        with pytest.raises(e.TaskStateError):
            other.complete(object())
        with pytest.raises(e.InvalidInputError):
            task.complete()

    assert run_one(credit_world, work).status is Status.DONE, "the errors were raised"
    with pytest.raises(e.TaskStateError):
        other.complete()


def test_rows_in_flight_complete_in_own_transactions(credit_world: World) -> None:
    turn = threading.Lock()  # SQLite has one writer at a time

    def complete(body: Any, task: DelayedTask) -> None:
        with turn, of_session(credit_world) as session:
            session.execute(insert(credits).values(task=body))
            task.complete(session, result=body)
            if body == 3:
                raise ConnectionError("busy")

    async def work(body: Any, task: DelayedTask) -> None:
        await asyncio.to_thread(complete, body, task)

    credit_world.delays.processor("credit", in_flight=5, retries="10s")(work)
    tasks = [credit_world.schedule("credit", n) for n in range(10)]
    credit_world.run(*tasks)
    assert credit_world.statuses(tasks) == ["DONE"] * 3 + ["NOT_COMPLETE"] + ["DONE"] * 6
    assert credit_world.read(tasks[9]).result == 9
    assert effects(credit_world) == 9
    assert credit_world.count("task.lease_lost") == 0


def test_a_batch_is_completed_in_the_transaction_of_its_writes(credit_world: World) -> None:
    def work(tasks: list[DelayedTask]) -> None:
        with of_session(credit_world) as session:
            session.execute(insert(credits), [{"task": task.body} for task in tasks])
            for task in tasks:
                task.complete(session)

    credit_world.delays.processor("credit", batch=10)(work)
    tasks = [credit_world.schedule("credit", n, key=str(n)) for n in range(5)]
    credit_world.run(*tasks)
    assert credit_world.statuses(tasks) == ["DONE"] * 5
    assert effects(credit_world) == 5
    assert credit_world.count("task.succeeded") == 5
