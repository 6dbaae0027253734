"""Cancel tasks that wait and tasks that run, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
from sqlalchemy import create_engine, text, update
from sqlalchemy.orm import Session

from delaytasks import (
    CancelResult,
    DelayedTask,
    DelayTasks,
    Fail,
    Retry,
    Snooze,
    StaleVersionError,
    Status,
    TaskCancelledError,
    TaskStateError,
)
from delaytasks.core.errors import TaskNotFoundError
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.recording import delays_on, record, run_now
from tests.refusals import invalid, raised
from tests.world import World

# The answers of `cancel`, by id and by key, with and without a session, on every database


Name = Callable[[DelayedTask], dict[str, Any]]
NAMES: list[Name] = [
    lambda task: {"task": task.id},
    lambda task: {"tag": task.tag, "key": task.key},
]
by_name = pytest.mark.parametrize("name", NAMES, ids=["id", "key"])


class CancelCaller:
    """Call one `DelayTasks` with a session or without one."""

    def __init__(
        self, delays: DelayTasks, session: Callable[[], AbstractContextManager[Session | None]]
    ) -> None:
        self.delays = delays
        self._session = session

    def cancel(self, **arguments: Any) -> CancelResult:
        with self._session() as session:
            result = self.delays.cancel(session=session, **arguments)
            if session is not None:
                session.commit()
            return result

    def schedule(self, tag: str = "mail") -> DelayedTask:
        return self.delays.schedule_delay(tag, {}, 0, key="k")

    def refuses(self, error: type[TaskStateError], **arguments: Any) -> None:
        with pytest.raises(error) as caught:
            raised(self.cancel(**arguments))
        assert type(caught.value) is error


@pytest.fixture(params=["alone", "session"])
def place(
    request: pytest.FixtureRequest, store: Store, database_url: str
) -> Iterator[CancelCaller]:
    delays = delays_on(database_url, table_prefix="s_")
    record(delays)
    delays.processor("mail")(lambda body: None)
    delays.processor("bad")(lambda body: 1 / 0)
    engine = create_engine(database_url)

    @contextmanager
    def session() -> Iterator[Session]:
        with Session(engine) as made:
            yield made

    yield CancelCaller(delays, nullcontext if request.param == "alone" else session)
    delays.close()
    engine.dispose()


def claim(store: Store) -> None:
    assert store.claims("w", None).claim_due("default", [0], 1)


@by_name
def test_a_task_that_waits_is_cancelled_and_never_starts(
    place: CancelCaller, store: Store, name: Name
) -> None:
    task = place.schedule()
    result = place.cancel(**name(task))
    assert result
    assert (result.id, result.status) == (task.id, Status.CANCELLED)
    assert not store.claims("w", None).claim_due("default", [0], 1)
    assert place.delays.events.counts["task.cancelled"] == 1


@by_name
def test_the_second_cancel_reports_that_there_is_nothing_to_cancel(
    place: CancelCaller, name: Name
) -> None:
    task = place.schedule()
    assert place.cancel(**name(task))
    again = place.cancel(**name(task))
    assert not again
    is_by_id = "task" in name(task)
    assert (again.id, again.status) == ((task.id, Status.CANCELLED) if is_by_id else (None, None))
    nobody = "no live task of tag 'mail' has the key 'k'"
    assert again.reason == (f"task {task.id} was cancelled before" if is_by_id else nobody)
    assert place.delays.events.counts["task.cancelled"] == 1


@by_name
def test_a_task_that_runs_is_not_cancelled_and_the_result_says_so(
    place: CancelCaller, store: Store, name: Name
) -> None:
    task = place.schedule()
    claim(store)
    result = place.cancel(**name(task))
    assert not result
    assert (result.id, result.status) == (task.id, Status.RUNNING)
    assert f"task {task.id} (mail) runs since" in result.reason
    place.refuses(TaskStateError, **name(task))
    assert place.delays.get(task).status is Status.RUNNING


@by_name
@pytest.mark.parametrize(("tag", "status"), [("mail", Status.DONE), ("bad", Status.FAILED)])
def test_a_task_that_ran_is_not_cancelled_and_the_result_says_so(
    place: CancelCaller, name: Name, tag: str, status: Status
) -> None:
    task = place.schedule(tag)
    assert run_now(place.delays, task).status is status
    result = place.cancel(**name(task))
    assert not result
    if "task" in name(task):
        assert (result.id, result.status) == (task.id, status)
        assert result.reason == f"task {task.id} has ended: it is {status.name}"
        place.refuses(TaskStateError, **name(task))
    else:
        assert (result.id, result.status) == (None, None)
        assert result.reason == f"no live task of tag '{tag}' has the key 'k'"
        place.refuses(TaskNotFoundError, **name(task))
    assert place.delays.get(task).status is status


def test_cancelling_an_unknown_task_reports_that_there_is_nothing_to_cancel(
    place: CancelCaller,
) -> None:
    result = place.cancel(task=4711)
    assert not result
    assert (result.id, result.status, result.reason) == (4711, None, "there is no task 4711")
    place.refuses(TaskNotFoundError, task=4711)
    assert not place.cancel(tag="mail", key="never")
    place.refuses(TaskNotFoundError, tag="mail", key="never")


def test_a_stale_version_and_a_bad_id_are_errors(place: CancelCaller) -> None:
    task = place.schedule()
    with pytest.raises(StaleVersionError):
        place.cancel(task=task, version=7)
    with invalid("id"):
        place.cancel(task="seven")
    assert place.delays.get(task).status is Status.NOT_COMPLETE


def test_the_payment_of_a_customer_who_pays_while_the_order_closes_is_kept(
    place: CancelCaller, store: Store, database_url: str
) -> None:
    """This is the flow of the docs: the cancel is part of the transaction that writes the
    payment."""
    engine = create_engine(database_url)
    place.schedule()
    claim(store)
    with Session(engine) as session:
        paid = place.delays.schedule_delay("mail", {"paid": True}, 60, session=session)
        assert not place.delays.cancel(tag="mail", key="k", session=session)
        session.commit()
    assert place.delays.get(paid).body == {"paid": True}
    engine.dispose()


@pytest.mark.parametrize("was_taken", [False, True], ids=["free", "taken"])
def test_a_key_that_was_taken_after_the_transaction_began_names_the_task_that_now_has_it(
    place: CancelCaller, store: Store, database_url: str, was_taken: bool
) -> None:
    """MySQL reads a snapshot of the transaction's start, but `cancel` must still find the task."""
    if not database_url.startswith(("mysql", "postgresql")):
        pytest.skip(
            "a transaction on SQLite that has read cannot write once another one has written"
        )
    engine = create_engine(database_url)
    before = place.schedule() if was_taken else None
    with Session(engine) as session:
        session.execute(text("SELECT count(*) FROM s_yb_delay_task_message"))
        assert before is None or place.delays.cancel(before.id)
        task = place.schedule()
        result = place.delays.cancel(tag="mail", key="k", session=session)
        assert (bool(result), result.id) == (True, task.id)
        session.commit()
    assert place.delays.get(task).status is Status.CANCELLED
    engine.dispose()


def test_a_key_that_the_transaction_itself_took_over_names_its_own_task(
    place: CancelCaller, store: Store, database_url: str
) -> None:
    engine = create_engine(database_url)
    place.schedule()
    claim(store)
    with Session(engine) as session:
        own = place.delays.schedule_delay(
            "mail", {}, 60, key="k", on_conflict="replace", session=session
        )
        result = place.delays.cancel(tag="mail", key="k", session=session)
        assert (bool(result), result.id) == (True, own.id)
        session.commit()
    engine.dispose()


# A running task is asked to stop, and is CANCELLED unless it succeeds, on each database


def cancel(world: World, task: DelayedTask) -> DelayedTask | None:
    """Cancel a task that runs, and tell its process, as the main process of its worker does."""
    found = world.store.tasks.cancel(task.id, running=True)
    tell(world)
    return found


def tell(world: World) -> None:
    requests = world.store.tasks.cancel_requests.of(["worker-1"])
    world.worker().processes.requested_runs.record(requests)


def run(world: World, end: Callable[[DelayedTask], Any], **options: Any) -> DelayedTask:
    """Run a task that is cancelled while it runs, and ends as `end` says."""

    def work(body: object, task: DelayedTask) -> Any:
        assert not task.is_cancelled
        task.check_lease()
        left = cancel(world, task)
        assert left is not None
        assert (left.status, left.version) == (Status.RUNNING, task.version)
        assert task.is_cancelled
        return end(task)

    world.delays.processor("long", **options)(work)
    task = world.schedule("long", key="k")
    world.run(task)
    return world.read(task)


def fail(_: DelayedTask) -> None:
    raise ValueError("broken off")


@pytest.mark.parametrize(
    "end",
    [DelayedTask.check_lease, fail, lambda _: Retry(1), lambda _: Snooze(1), lambda _: Fail("no")],
    ids=["check_lease", "raises", "Retry", "Snooze", "Fail"],
)
def test_a_run_that_stops_is_cancelled_and_not_retried(
    world: World, end: Callable[[DelayedTask], Any]
) -> None:
    task = run(world, end, retries="10s 10s")
    assert task.status is Status.CANCELLED
    assert str(task.error).startswith("cancelled by a caller while it ran")
    assert ("broken off" in str(task.error)) is (end is fail)
    assert len(world.told("task.withdrawn")) == 1
    assert not world.told("task.failed") + world.told("task.retry_scheduled")
    assert world.store.tasks.id_of_key("long", "k") is None, "the key is free"


def test_a_run_that_succeeds_nevertheless_is_done(world: World) -> None:
    assert run(world, lambda _: 5, keep_result=True).result == 5


def test_check_lease_says_that_the_task_was_cancelled(world: World) -> None:
    told: list[TaskCancelledError] = []

    def end(task: DelayedTask) -> None:
        with pytest.raises(TaskCancelledError, match="was cancelled: stop") as caught:
            task.check_lease()
        told.append(caught.value)

    assert run(world, end).status is Status.DONE
    assert told


def test_a_request_that_comes_too_late_for_its_run_prevents_the_next_one(
    world: World,
) -> None:
    ran: list[int] = []

    @world.delays.processor("again")
    def work(body: object, task: DelayedTask) -> Any:
        ran.append(task.runs)
        world.store.tasks.cancel(task.id, running=True)  # the process hears nothing of it
        return Snooze(0)

    task = world.schedule("again")
    world.run(task)
    waits = world.read(task)
    assert (waits.status, waits.cancel_request) == (Status.NOT_COMPLETE, 1)
    world.change(task, expected_time=task.expected_time)
    world.run(world.read(task))
    ended = world.read(task)
    assert (ended.status, ran) == (Status.CANCELLED, [1])


def test_a_row_of_the_same_chunk_that_has_not_begun_is_cancelled_too(
    world: World,
) -> None:
    tasks: list[DelayedTask] = []

    @world.delays.processor("first")
    def work(body: object) -> None:
        cancel(world, world.read(tasks[1]))

    tasks += [world.schedule("first", priority=9), world.schedule("note", 2)]
    world.run(*tasks)
    assert world.statuses(tasks) == ["DONE", "CANCELLED"]
    assert world.notes == []


def test_a_rerun_forgets_the_request(world: World) -> None:
    cancelled = run(world, fail)
    world.delays.processor("other")(lambda body: None)
    again = world.store.tasks.rerun(cancelled.id, cancelled.expected_time)
    assert world.read(again).cancel_request is None
    assert world.store.tasks.cancel_requests.of(["worker-1"]) == []


def test_a_request_is_for_one_run_of_the_row(world: World) -> None:
    task = run(world, fail)
    assert world.worker().processes.requested_runs.has(task.id, task.version - 1)
    assert not world.worker().processes.requested_runs.has(task.id, task.version)
    tell(world)
    assert not world.worker().processes.requested_runs.has(task.id, task.version - 1)


def test_the_answer_of_cancel_says_that_the_task_was_asked_to_stop(
    store: Store, delays: DelayTasks
) -> None:
    task = delays.schedule_delay("mail", {}, 0, key="k")
    [claimed] = runtime_of(delays).store.claims("w", None).claim_due("default", [0], 1)
    numbers = runtime_of(delays).store.policies
    before = numbers.changes(None, True).cancel_requests
    refused = delays.cancel(task)
    assert not refused.is_requested
    assert isinstance(refused.error, TaskStateError)
    assert numbers.changes(None, True).cancel_requests == before
    result = delays.cancel(tag="mail", key="k", running=True)
    assert (bool(result), result.is_requested, result.status) == (False, True, Status.RUNNING)
    assert numbers.changes(None, False).cancel_requests == before + 1
    found = delays.get(task)
    assert (found.version, found.cancel_request) == (claimed.version, 1)
    with pytest.raises(StaleVersionError):
        delays.cancel(task, running=True, version=claimed.version - 1)
    with store.database.tx.connect() as connection:
        assert delays.cancel(task, running=True, session=connection).is_requested
        connection.rollback()
    assert delays.get(task).cancel_request == 1


def test_a_row_that_is_given_back_while_it_is_asked_to_stop_is_cancelled(
    store: Store, delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = delays.schedule_delay("mail", {}, 0)
    runtime_of(delays).store.claims("w", None).claim_due("default", [0], 1)
    requests, t = runtime_of(delays).store.tasks.cancel_requests, store.schema.tasks
    make = requests.make

    def make_too_late(on: Any, running: DelayedTask) -> bool:
        given_back = {"status": int(Status.NOT_COMPLETE), "version": running.version + 1}
        on.execute(update(t).where(t.c.id == running.id).values(given_back))
        return make(on, running)

    monkeypatch.setattr(requests, "make", make_too_late)
    assert delays.cancel(task, running=True)
    assert delays.get(task).is_cancelled


def test_a_task_that_waits_is_cancelled_as_usual(delays: DelayTasks) -> None:
    task = delays.schedule_delay("mail", {}, 60)
    assert delays.cancel(task, running=True)
    assert not delays.cancel(task, running=True)
    assert delays.get(task).is_cancelled


def test_the_other_tasks_of_a_batch_run_again_without_losing_an_attempt(
    world: World,
) -> None:
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
