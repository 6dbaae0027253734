"""The tasks that a bulk operation changes are those that the filters name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from delaytasks import DelayTask, DelayTasks, Status
from delaytasks.core.errors import (
    DelayTaskError,
    InvalidDelayError,
    InvalidQueryError,
    InvalidScheduleError,
    NaiveDatetimeError,
)
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import NOON, counts, put, schedule, statuses
from tests.conformance.store_rows import RUNNING
from tests.recording import RecordingTimer


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ({"tag": "a"}, "a ab aheld"),
        ({"tag": "a", "status": "HELD"}, "aheld"),
        ({"status": Status.HELD}, "aheld"),
        ({"key_prefix": "x%_"}, "b"),
        ({"key_prefix": "é"}, "ab"),
        ({"queue": "slow"}, "slow"),
        ({"tag": "c", "queue": "slow"}, ""),
        ({"since": NOON}, "b slow"),
        ({"until": NOON}, "a ab aheld"),
        ({"since": NOON, "until": NOON + timedelta(seconds=1)}, "b"),
        ({"created_since": NOON}, "slow"),
        ({"created_until": NOON, "tag": "a"}, "a ab aheld"),
        ({"updated_until": NOON, "since": NOON}, "b"),
        ({"everything": True}, "a ab aheld b slow"),
    ],
)
def test_each_filter_narrows(store: Store, delays: DelayTasks, filters: Any, wanted: str) -> None:
    def at(
        name: str, tag: str, when: datetime, queue: str | None = None, key: str | None = None
    ) -> DelayTask:
        return delays.schedule_at(tag, name, when, queue=queue, key=key)

    second, early = timedelta(seconds=1), NOON - timedelta(seconds=1)
    held = at("aheld", "a", early)
    slow = at("slow", "b", NOON + second, queue="slow", key="Xx")
    tasks = [
        at("a", "a", early, key="xxx1"),
        at("ab", "a", early, key="éa"),
        held,
        at("b", "b", NOON, key="x%_1"),
        slow,
    ]
    put(store, held, status=int(Status.HELD))
    put(store, slow, create_time=NOON, update_time=NOON)
    assert counts(delays.cancel_many(dry_run=True, **filters)) == (len(wanted.split()), 0, 0)
    assert set(statuses(delays, *tasks)) == {Status.NOT_COMPLETE, Status.HELD}
    assert delays.cancel_many(**filters).changed == len(wanted.split())
    assert {task.body for task in tasks if delays.get(task).status is Status.CANCELLED} == set(
        wanted.split()
    )


@pytest.mark.parametrize("tag", ["A", "a%", "a' OR '1'='1"])
def test_a_filter_compares_text_literally(delays: DelayTasks, tag: str) -> None:
    task = schedule(delays, "a", key="k1")
    assert counts(delays.cancel_many(tag=tag)) == (0, 0, 0)
    assert counts(delays.cancel_many(key_prefix=tag.replace("a", "K").replace("A", "K"))) == (
        0,
        0,
        0,
    )
    assert delays.get(task) == task


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda d: d.cancel_many(), InvalidQueryError, "everything=True"),
        (lambda d: d.cancel_many(tag=None, dry_run=True), InvalidQueryError, "everything=True"),
        (lambda d: d.cancel_many(colour="red"), InvalidQueryError, "colour.*known: .*tag"),
        (lambda d: d.cancel_many(status="DONE"), InvalidQueryError, "HELD, NOT_COMPLETE, not DONE"),
        (lambda d: d.cancel_many(status="SOON"), InvalidQueryError, "status is one of"),
        (
            lambda d: d.rerun_many(status="RUNNING"),
            InvalidQueryError,
            "CANCELLED, FAILED, not RUNNING",
        ),
        (lambda d: d.cancel_many(since=datetime(2030, 1, 1)), NaiveDatetimeError, "no time zone"),
        (lambda d: d.cancel_many(tag="a", actor="x" * 256), InvalidQueryError, "255"),
        (lambda d: d.cancel_many(tag="a", actor="a\nb"), InvalidQueryError, "control"),
        (lambda d: d.reschedule_many(tag="a"), InvalidScheduleError, "one of the four"),
        (lambda d: d.reschedule_many(5, by=5, tag="a"), InvalidScheduleError, "one of the four"),
        (lambda d: d.reschedule_many(by=0, tag="a"), InvalidDelayError, "not 0"),
        (lambda d: d.reschedule_many(by=True, tag="a"), InvalidDelayError, "shift"),
        (lambda d: d.reschedule_many(by=float("-inf"), tag="a"), InvalidDelayError, "finite"),
        (lambda d: d.reschedule_many(by=-1e12, tag="a"), InvalidDelayError, "at most"),
        (lambda d: d.reschedule_many(-5, tag="a"), InvalidDelayError, "negative"),
        (lambda d: d.rerun_many(float("nan"), tag="a"), InvalidDelayError, "finite"),
        (lambda d: d.audit(limit=0), InvalidQueryError, "1 to 1000"),
    ],
)
def test_a_bulk_call_with_invalid_arguments_is_refused_and_changes_nothing(
    delays: DelayTasks, call: Callable[[DelayTasks], object], error: type[DelayTaskError], says: str
) -> None:
    task = schedule(delays, "a")
    with pytest.raises(error, match=says):
        call(delays)
    assert delays.get(task) == task
    assert delays.audit() == []


def test_a_dry_run_counts_and_writes_nothing(
    store: Store, delays: DelayTasks, timer: RecordingTimer
) -> None:
    waits, runs = schedule(delays), put(store, schedule(delays), **RUNNING)
    result = delays.cancel_many(tag="mail", dry_run=True)
    assert (counts(result), result.runs) == ((2, 0, 1), ())
    assert [delays.get(task) for task in (waits, runs)] == [waits, runs]
    assert (timer.disarmed, delays.audit()) == ([], [])
