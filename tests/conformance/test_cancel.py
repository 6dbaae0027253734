"""Cancel tasks that wait and tasks that run, on every database."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import create_engine, text, update
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import CancelResult, DelayedTask, Fail, Retry, Snooze, Status
from tests.world import MonkeyPatch, World

# The answers of `cancel`. tests/conformance/test_moves.py cancels tasks of each status


def test_the_result_says_why_a_task_was_not_cancelled(world: World) -> None:
    world.delays.processor("bad")(lambda body: 1 / 0)
    waits, done, failed = (world.schedule(tag, key="k") for tag in ("waits", "note", "bad"))
    [runs] = world.claim(world.schedule("runs", key="k"))
    world.run(done, failed)
    assert world.cancel(waits)
    assert world.claim(waits) == []
    assert world.count("task.cancelled") == 1
    reasons = {waits: "was cancelled before", done: "is DONE", failed: "is FAILED"}
    for task, reason in {**reasons, runs: "is RUNNING"}.items():
        by_id, by_key = world.cancel(task.id), world.delays.cancel(tag=task.tag, key="k")
        assert (bool(by_id), by_id.reason) == (False, f"task {task.id} {reason}")
        nobody = f"no live task of tag '{task.tag}' has the key 'k'"
        assert by_key.reason == (by_id.reason if task is runs else nobody)
    assert world.cancel(4711).reason == "there is no task 4711"


@pytest.mark.parametrize("was_taken", [False, True], ids=["free", "taken"])
@pytest.mark.parametrize("is_touch", [False, True], ids=["cancel", "touch"])
def test_a_key_that_moved_meanwhile_names_its_new_task(
    world: World, was_taken: bool, is_touch: bool
) -> None:
    """MySQL reads a snapshot of the transaction's start, but the call must still find the task."""
    if not world.has_row_locks:
        pytest.skip("a transaction on SQLite that has read cannot write after another one")
    engine = create_engine(world.url)
    before = world.schedule(key="k") if was_taken else None
    with Session(engine) as session:
        session.execute(text(f"SELECT count(*) FROM {world.table().name}"))
        assert before is None or world.cancel(before)
        task = world.schedule(key="k")
        if is_touch:
            touched = world.delays.touch(tag="note", key=["k"], delay=60, session=session)
            assert touched.gone == []
        else:
            result = world.delays.cancel(tag="note", key="k", session=session)
            assert (bool(result), result.id) == (True, task.id)
        session.commit()
    found = world.read(task)
    assert (found.is_cancelled, found.expected_time == task.expected_time) == (not is_touch,) * 2
    engine.dispose()


# A running task is asked to stop, and is CANCELLED unless it succeeds, on each database


def cancel(world: World, task: DelayedTask) -> CancelResult:
    """Cancel a task that runs, and tell its process, as the main process of its worker does."""
    result: CancelResult = world.cancel(task.id, running=True)
    requests = world.store.tasks.cancel_requests.of(["worker-1"])
    world.worker().processes.memory.ask_to_stop(requests)
    return result


def test_an_open_transaction_that_cancels_a_run_delays_no_other_cancel(world: World) -> None:
    if not world.has_row_locks:
        pytest.skip("SQLite locks the whole database")
    runs = world.claim(*[world.schedule("runs") for _ in range(18)])
    for task in runs[2:]:  # the first request of each row of the counter inserts the row
        assert cancel(world, task).is_requested
    engine = create_engine(world.url)
    with Session(engine) as session:
        assert world.delays.cancel(runs[0].id, running=True, session=session).is_requested
        assert cancel(world, runs[1]).is_requested
        session.rollback()
    engine.dispose()


def run(world: World, end: Callable[[DelayedTask], Any], **options: Any) -> DelayedTask:
    """Run a task that is cancelled while it runs, and ends as `end` says."""

    def work(body: object, task: DelayedTask) -> Any:
        assert not task.is_cancelled
        task.check_lease()
        asked = cancel(world, task)
        assert (asked.is_requested, asked.status) == (True, Status.RUNNING)
        assert world.read(task).version == task.version
        assert task.is_cancelled
        return end(task)

    world.delays.processor("long", **options)(work)
    world.run(task := world.schedule("long", key="k"))
    return world.read(task)


def fail(_: DelayedTask) -> None:
    raise ValueError("broken off")


@pytest.mark.parametrize(
    "end",
    [DelayedTask.check_lease, fail, lambda _: Retry(1), lambda _: Snooze(1), lambda _: Fail("no")],
    ids=["check_lease", "raises", "Retry", "Snooze", "Fail"],
)
def test_a_run_that_stops_is_cancelled_and_not_retried(world: World, end: Any) -> None:
    task = run(world, end, retries="10s 10s")
    assert task.status is Status.CANCELLED
    assert str(task.error).startswith("cancelled by a caller while it ran")
    assert ("broken off" in str(task.error)) is (end is fail)
    assert len(world.told("task.withdrawn")) == 1
    assert not world.told("task.failed") + world.told("task.retry_scheduled")
    assert world.owner("k", "long") is None, "the key is free"
    assert world.read(world.delays.rerun(task)).cancel_request is None


def test_a_run_that_stops_in_the_transaction_of_complete_is_cancelled(world: World) -> None:
    def end(task: DelayedTask) -> None:
        with world.begin() as connection:
            task.complete(connection)
            task.check_lease()

    assert run(world, end, retries="10s").status is Status.CANCELLED


def test_a_run_that_succeeds_nevertheless_is_done(world: World) -> None:
    def end(task: DelayedTask) -> int:
        with pytest.raises(e.TaskCancelledError, match="was cancelled: stop"):
            task.check_lease()
        return 5

    assert run(world, end, keep_result=True).result == 5


def test_a_request_that_comes_too_late_for_its_run_prevents_the_next_one(world: World) -> None:
    ran: list[int] = []

    @world.delays.processor("again")
    def work(body: object, task: DelayedTask) -> Any:
        ran.append(task.runs)
        world.delays.cancel(task, running=True)  # the process hears nothing of it
        return Snooze(0)

    world.run(task := world.schedule("again"))
    waits = world.read(task)
    assert (waits.status, waits.cancel_request) == (Status.NOT_COMPLETE, 1)
    world.change(task, expected_time=task.expected_time)
    world.run(world.read(task))
    ended = world.read(task)
    assert (ended.status, ran) == (Status.CANCELLED, [1])
    assert [told["reason"] for told in world.told("task.withdrawn")] == [ended.error]


def test_a_row_of_the_same_chunk_that_has_not_begun_is_cancelled_too(world: World) -> None:
    tasks: list[DelayedTask] = []

    @world.delays.processor("first")
    def work(body: object) -> None:
        cancel(world, world.read(tasks[1]))

    tasks += [world.schedule("first", priority=9), world.schedule("note", 2)]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "CANCELLED"]
    assert world.notes == []


def test_the_answer_of_cancel_says_that_the_task_was_asked_to_stop(world: World) -> None:
    delays, task = world.delays, world.schedule("mail", key="k")
    [claimed] = world.claim(task)
    numbers = world.store.policies
    before = numbers.unless_known(None).cancel_requests
    result = delays.cancel(tag="mail", key="k", running=True)
    assert (bool(result), result.is_requested, result.status) == (False, True, Status.RUNNING)
    assert numbers.unless_known(None).cancel_requests == before + 1
    found = delays.get(task)
    assert (found.version, found.cancel_request) == (claimed.version, 1)
    with pytest.raises(e.StaleVersionError):
        delays.cancel(task, running=True, version=claimed.version - 1)
    with world.engine.connect() as connection:
        assert delays.cancel(task, running=True, session=connection).is_requested
        connection.rollback()
    assert delays.get(task).cancel_request == 1


def test_a_row_given_back_as_it_stops_is_cancelled(world: World, monkeypatch: MonkeyPatch) -> None:
    delays, task = world.delays, world.schedule("mail")
    world.claim(task)
    requests, t = world.store.tasks.cancel_requests, world.table()
    make = requests.make

    def make_too_late(on: Any, running: DelayedTask) -> bool:
        given_back = {"status": int(Status.NOT_COMPLETE), "version": running.version + 1}
        on.execute(update(t).where(t.c.id == running.id).values(given_back))
        return make(on, running)

    monkeypatch.setattr(requests, "make", make_too_late)
    for one in (task, world.schedule("mail", delay=60)):
        assert delays.cancel(one, running=True)
        assert delays.get(one).is_cancelled


def test_the_other_tasks_of_a_batch_run_again_without_losing_an_attempt(world: World) -> None:
    def work(tasks: list[DelayedTask]) -> None:
        if len(tasks) == 3:
            cancel(world, tasks[1])
        for task in tasks:
            task.check_lease()

    world.delays.processor("batch", batch=10)(work)
    tasks = [world.schedule("batch") for _ in range(3)]
    world.run(*tasks)
    first, cancelled, last = map(world.read, tasks)
    assert cancelled.status is Status.CANCELLED
    for other in (first, last):
        assert (other.status, other.runs) == (Status.NOT_COMPLETE, 0)
    world.run(first, last)
    assert world.statuses([first, last]) == ["DONE", "DONE"]
