"""Rows that were deferred because no worker had a processor for their tag."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select

from delaytasks import DelayTask, DelayTasks, Status
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import runtime_of
from delaytasks.storage import settlements as putoffs
from delaytasks.storage.store import Store
from tests.recording import RecordingTimer


def defer(delays: DelayTasks, count: int = 1, tag: str = "new", **options: Any) -> list[DelayTask]:
    """Return deferred tasks as an older worker leaves them."""
    tasks = [delays.schedule_delay(tag, n, 0, **options) for n in range(count)]
    assert delays.runner().run([Entry(task.id, 0, 0) for task in tasks]).ran == count
    found = [delays.get(task) for task in tasks]
    assert all(
        task.status is Status.NOT_COMPLETE and task.expected_time > runtime_of(delays).clock.now()
        for task in found
    )
    return found


def bring(delays: DelayTasks, *tags: str, queue: str = "default") -> list[int]:
    return [
        entry.id
        for entry in runtime_of(delays).store.deferred_rows.bring_forward(tags, [queue], 600)
    ]


def test_a_worker_with_the_processor_brings_deferred_rows_forward(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    tasks = defer(delays, 3)
    assert bring(delays, "other") == []
    assert bring(delays, "new", queue="other") == []
    entries = runtime_of(delays).store.deferred_rows.bring_forward(
        ["other", "new"], ["default"], 600
    )
    assert [entry.id for entry in entries] == [task.id for task in tasks]
    ran: list[int] = []
    delays.processor("new")(ran.append)
    delays.runner().run(entries)
    assert (sorted(ran), [delays.get(task).status for task in tasks]) == (
        [0, 1, 2],
        [Status.DONE] * 3,
    )
    assert bring(delays, "new") == []


def test_rows_that_wait_for_their_own_due_time_are_not_brought_forward(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    near = delays.schedule_delay("new", {}, 60)
    [moved, touched, held, stays] = defer(delays, 4)
    delays.reschedule(moved, 60)
    delays.touch(touched, 60)
    with runtime_of(delays).store.database.begin() as other:
        t = runtime_of(delays).store.schema.tasks
        other.execute(select(t).where(t.c.id == held.id).with_for_update()).all()
        # SQLite locks the whole database.
        if runtime_of(delays).store.database.url.get_backend_name() != "sqlite":
            assert bring(delays, "new") == [stays.id]
    expected = {near.id: near.expected_time}
    expected |= {id: delays.get(id).expected_time for id in (moved.id, touched.id)}
    assert set(bring(delays, "new")) <= {held.id, stays.id}
    assert {id: delays.get(id).expected_time for id in expected} == expected


def test_a_retried_task_waits_for_its_retry_delay_whatever_its_error_text_is(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    def fail(body: Any) -> None:
        raise ValueError("no such processor, tag=new; next try at 2026")

    delays.processor("new", retries="5m")(fail)
    task = delays.schedule_delay("new", {}, 0)
    delays.runner().run([Entry(task.id, 0, 0)])
    assert delays.get(task).attempts == 1
    assert bring(delays, "new") == []


def test_deferred_rows_of_several_batches_are_all_brought_forward(
    delays: DelayTasks, timer: RecordingTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(putoffs, "DEFERRED_BATCH_ROWS", 7)
    store: Store = runtime_of(delays).store
    some = putoffs.DeferredRows(store.database, store.schema)
    tasks = defer(delays, 30)
    delays.reschedule(tasks[6], 30)
    entries = some.bring_forward(["new"], ["default"], 600)
    assert sorted(entry.id for entry in entries) == sorted(
        task.id for task in tasks if task is not tasks[6]
    )


def test_the_error_of_a_row_says_when_it_is_tried_again(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    [task] = defer(delays)
    assert task.error is not None
    at = datetime.fromisoformat(task.error.rpartition("next try at ")[2])
    assert at == task.expected_time
    assert timedelta(seconds=4) < at - runtime_of(delays).clock.now() <= timedelta(seconds=5)


def test_a_worker_of_all_queues_brings_rows_forward_without_queue_names(
    delays: DelayTasks, timer: RecordingTimer
) -> None:
    tasks = defer(delays, 2) + defer(delays, 1, queue="other")
    entries = runtime_of(delays).store.deferred_rows.bring_forward(["new"], None, 600)
    assert [entry.id for entry in entries] == [task.id for task in tasks]
