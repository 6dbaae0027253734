"""The answers of `cancel`, by id and by key, with and without a session, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from delaytasks import CancelResult, DelayTask, DelayTasks, Status
from delaytasks.core.errors import (
    CancelTooLateError,
    InvalidIdError,
    InvalidStatusError,
    StaleVersionError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.storage.store import Store
from tests.recording import delays_on, record, run_now

Name = Callable[[DelayTask], dict[str, Any]]
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

    def schedule(self, tag: str = "mail") -> DelayTask:
        return self.delays.schedule_delay(tag, {}, 0, key="k")

    def refuses(self, error: type[TaskStateError], **arguments: Any) -> None:
        with pytest.raises(error) as caught:
            self.cancel(strict=True, **arguments)
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
    assert place.cancel(**name(task), strict=True)
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
    place.refuses(CancelTooLateError, **name(task))
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
        place.refuses(InvalidStatusError, **name(task))
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


def test_a_stale_version_and_a_bad_id_are_errors_strict_or_not(place: CancelCaller) -> None:
    task = place.schedule()
    for strict in (False, True):
        with pytest.raises(StaleVersionError):
            place.cancel(task=task, version=7, strict=strict)
        with pytest.raises(InvalidIdError):
            place.cancel(task="seven", strict=strict)
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


def test_a_key_that_was_taken_after_the_transaction_began_is_cancelled(
    place: CancelCaller, store: Store, database_url: str
) -> None:
    """MySQL reads a snapshot of the transaction's start, but `cancel` must still find the task."""
    if not database_url.startswith(("mysql", "postgresql")):
        pytest.skip(
            "SQLite is not asked again: in memory every connection has a database of its own"
        )
    engine = create_engine(database_url)
    with Session(engine) as session:
        session.execute(text("SELECT count(*) FROM s_yb_delay_task_message"))
        task = place.schedule()
        result = place.delays.cancel(tag="mail", key="k", session=session)
        assert (bool(result), result.id) == (True, task.id)
        session.commit()
    assert place.delays.get(task).status is Status.CANCELLED
    engine.dispose()


def test_a_key_that_moved_after_the_transaction_began_names_the_task_that_now_has_it(
    place: CancelCaller, store: Store, database_url: str
) -> None:
    if not database_url.startswith(("mysql", "postgresql")):
        pytest.skip(
            "a transaction on SQLite that has read cannot write once another one has written"
        )
    engine = create_engine(database_url)
    before = place.schedule()
    with Session(engine) as session:
        session.execute(text("SELECT count(*) FROM s_yb_delay_task_message"))
        assert place.delays.cancel(task=before.id)
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
