"""Celery tasks that are called in a transaction of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import _state, group
from celery.exceptions import Retry
from sqlalchemy.orm import Session

from delaytasks import Status
from delaytasks.core.errors import SessionUnusableError, StoreUnavailableError
from delaytasks.runtime import runtime_of
from tests.conformance.durable_eta.conftest import Office

Make = Callable[..., Office]


@contextmanager
def running(office: Office, task_id: str) -> Iterator[None]:
    """Act as the worker that runs the task."""
    task = office.remind
    _state._task_stack.push(task)
    task.push_request(id=task_id, called_directly=False, args=(7,), kwargs={}, retries=0)
    try:
        yield
    finally:
        task.pop_request()
        _state._task_stack.pop()


@pytest.fixture
def session(office: Office) -> Iterator[Session]:
    with Session(runtime_of(office.delays).store.database.tx) as made:
        yield made


def test_a_row_is_seen_and_armed_after_the_commit(office: Office, session: Session) -> None:
    with office.delays.using(session):
        result = office.remind.apply_async((7,), countdown=5)
    assert (office.rows(), office.timer.ids) == ([], [])

    session.commit()

    (row,) = office.rows()
    assert (row.key, office.timer.ids) == (result.id, [row.id])


def test_a_task_of_a_rolled_back_transaction_does_not_exist(
    office: Office, session: Session
) -> None:
    with office.delays.using(session):
        office.remind.apply_async((7,), countdown=5)

    session.rollback()

    assert (office.rows(), office.timer.ids, office.published()) == ([], [], [])


def test_a_task_of_a_rolled_back_savepoint_does_not_exist(office: Office, session: Session) -> None:
    with office.delays.using(session):
        kept = office.remind.apply_async((7,), countdown=5)
        nested = session.begin_nested()
        office.remind.apply_async((8,), countdown=5)
        nested.rollback()
    session.commit()

    assert [row.key for row in office.rows()] == [kept.id]


def test_calls_after_the_block_have_a_transaction_of_their_own(
    office: Office, session: Session
) -> None:
    with office.delays.using(session):
        pass

    office.remind.apply_async((7,), countdown=5)

    assert len(office.rows()) == 1


def test_other_calls_in_the_block_take_part_as_well(office: Office, session: Session) -> None:
    with office.delays.using(session):
        task = office.delays.schedule_delay("mail", 1, 60)
        assert office.delays.get(task).body == 1
    session.rollback()

    assert not list(office.delays.find(tag="mail"))


def test_apply_async_with_a_session_publishes_a_task_without_a_delay_after_the_commit(
    make_office: Make,
) -> None:
    office = make_office(durable_eta=False)
    with Session(runtime_of(office.delays).store.database.tx) as session:
        result = office.delays.apply_async(office.remind.s(7), session=session)
        assert office.published() == []
        session.commit()

    assert office.publish().status is Status.DONE
    (message,) = office.published()
    assert message.headers["id"] == result.id


def test_each_task_of_a_group_takes_part_in_the_session(office: Office, session: Session) -> None:
    tasks = group(office.remind.s(number) for number in range(3))

    office.delays.apply_async(tasks, countdown=60, session=session)
    assert office.rows() == []
    session.commit()

    assert len(office.rows()) == 3


def test_a_closed_session_is_refused_and_nothing_is_sent(office: Office) -> None:
    engine = runtime_of(office.delays).store.database.tx
    connection = engine.connect()
    connection.close()

    with pytest.raises(SessionUnusableError), office.delays.using(connection):
        office.remind.apply_async((7,), countdown=5)

    assert (office.rows(), office.published()) == ([], [])


def test_a_retry_survives_the_rollback_of_its_own_transaction(
    office: Office, session: Session
) -> None:
    with running(office, "one"), office.delays.using(session):
        with pytest.raises(Retry):
            office.remind.retry(countdown=60)
        session.rollback()

    assert [row.key for row in office.rows()] == ["one"]


def test_a_retry_goes_to_the_broker_if_its_row_cannot_be_written(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Any:
        raise StoreUnavailableError("as asked")

    monkeypatch.setattr(runtime_of(office.delays).producer, "schedule", refuse)

    with pytest.raises(StoreUnavailableError):
        office.remind.apply_async((7,), countdown=60)
    with running(office, "one"), pytest.raises(Retry):
        office.remind.retry(countdown=60)

    (message,) = office.published()
    assert message.headers["id"] == "one"
    assert message.headers["eta"] is not None
    assert office.delays.events.counts["celery_task.not_stored"] == 1


def test_a_retry_that_is_too_large_for_a_row_goes_to_the_broker(office: Office) -> None:
    with running(office, "one"), pytest.raises(Retry):
        office.remind.retry(args=("x" * 300_000,), countdown=60)

    (message,) = office.published()
    assert message.headers["id"] == "one"


def test_a_revocation_is_rolled_back_with_its_transaction(office: Office, session: Session) -> None:
    result = office.remind.apply_async((7,), countdown=60)
    with office.delays.using(session):
        result.revoke()
    session.rollback()
    assert (office.rows()[0].status, result.state) == (Status.NOT_COMPLETE, "PENDING")

    with office.delays.using(session):
        result.revoke()
    assert result.state == "PENDING"
    session.commit()

    assert (office.rows()[0].status, result.state) == (Status.CANCELLED, "REVOKED")


def test_apply_async_without_a_session_takes_part_in_that_of_the_block(
    office: Office, session: Session
) -> None:
    with office.delays.using(session):
        office.delays.apply_async(office.remind.s(7), countdown=5)
    session.rollback()

    assert (office.rows(), office.published()) == ([], [])
