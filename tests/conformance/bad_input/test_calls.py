"""Statuses, queries and sessions that a call cannot use."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy.orm import Session

from delaytasks import Status
from delaytasks.core import errors as e
from delaytasks.core.task import DelayTask
from delaytasks.storage.store import Store
from tests.conformance.bad_input.refusing_client import UTC, RefusingClient, Unsayable


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (Status.NOT_COMPLETE, True),
        (Status.HELD, True),
        (Status.CANCELLED, False),
        (Status.RUNNING, e.CancelTooLateError),
        (Status.DONE, e.InvalidStatusError),
        (Status.FAILED, e.InvalidStatusError),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_cancelling_in_each_status(place: RefusingClient, status: Status, answer: Any) -> None:
    task = place.put(status)
    if isinstance(answer, bool):
        assert bool(place.delays.cancel(task, strict=True)) is answer
        assert place.delays.get(task).status is Status.CANCELLED
        return
    with place.refuses(answer, str(task.id)):
        place.delays.cancel(task, strict=True)
    assert not place.delays.cancel(task)
    assert place.delays.get(task).status is status


def test_a_stale_version_is_refused_by_every_move(place: RefusingClient) -> None:
    for version in [1, -1, 2**70, 10**5000, "0", Unsayable()]:
        waits, failed = place.put(), place.put(Status.FAILED)
        with place.refuses(e.StaleVersionError):
            place.delays.reschedule(waits, 5, version=version)
        with place.refuses(e.StaleVersionError):
            place.delays.cancel(waits, version=version)
        with place.refuses(e.StaleVersionError):
            place.delays.rerun(failed, version=version)
        assert place.delays.get(waits).version == 0
        place.delays.reschedule(waits, 5, version=0)


# -- queries -------------------------------------------------------------------------------------


def test_a_page_is_bounded(place: RefusingClient) -> None:
    for limit in [-1, 0, 1001, 10**9, 10**5000, True, 1.0, "10", None, Unsayable()]:
        with place.refuses(e.InvalidQueryError, "1 to 1000"):
            place.delays.find(limit=limit)


def test_a_status_that_does_not_exist_is_refused(place: RefusingClient) -> None:
    for status in [77, -1, True, "GONE", "", 1.5, [], Unsayable()]:
        with place.refuses(e.InvalidQueryError, "NOT_COMPLETE"):
            place.delays.find(status=status)


BAD_CURSORS = ["", "x", "====", "MTIz", "YTpi", "😀", "\ud800", "MTox\n;", 5, b"MTox", ["x"]]
#: These cursors are well formed, but no row has their numbers: 10^30:1, 1:10^30, 1:-10^30.
BAD_CURSORS += [
    "MTAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDox",
    "MToxMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAw",
]
BAD_CURSORS += ["MTotMTAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMA=="]


def test_a_cursor_that_find_never_gave_is_refused(place: RefusingClient) -> None:
    for cursor in BAD_CURSORS:
        place.put()
        with place.refuses(e.InvalidQueryError):
            place.delays.find(cursor=cursor)


def test_calls_accept_the_earliest_and_the_latest_possible_time(place: RefusingClient) -> None:
    place.put()
    for instant in [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]:
        assert len(place.delays.find(since=instant)) + len(place.delays.find(until=instant)) == 1


# -- sessions ------------------------------------------------------------------------------------


def calls_with(
    place: RefusingClient, task: DelayTask, failed: DelayTask, session: Any
) -> list[Callable[[], Any]]:
    d = place.delays
    return [
        lambda: d.schedule_delay("mail", {}, 5, session=session),
        lambda: d.schedule_delay("mail", {}, 5, key="k", session=session),
        lambda: d.schedule_many([("mail", {}, 5)], session=session),
        lambda: d.cancel(task, session=session),
        lambda: d.reschedule(task, 5, session=session),
        lambda: d.touch(task, 500, session=session),
        lambda: d.touch_many([task], 500, session=session),
        lambda: d.touch_many(tag="mail", keys=["k"], delay=500, session=session),
        lambda: d.rerun(failed, session=session),
        lambda: d.get(task, session=session),
        lambda: d.find(session=session),
    ]


def test_an_object_that_is_not_a_session_is_refused(place: RefusingClient) -> None:
    for session in ["x", object(), 5, Session]:
        for call in calls_with(place, place.put(), place.put(Status.FAILED), session):
            with place.refuses(e.SessionUnusableError):
                call()


def test_a_closed_session_or_connection_is_refused(place: RefusingClient, store: Store) -> None:
    closed = Session(store.database.tx, close_resets_only=False)
    closed.close()
    connection = store.database.tx.connect()
    connection.close()
    for session in (closed, connection, Session()):
        for call in calls_with(place, place.put(), place.put(Status.FAILED), session):
            with place.refuses(e.SessionUnusableError):
                call()
