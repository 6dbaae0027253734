"""`max_wait` limits how long repeated replacements can defer a task, on every database."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from delaytasks import DelayTask, DelayTasks, NewTask, Status
from delaytasks.core.interfaces import Settlement
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.recording import ManualClock, RecordingTimer, delays_on, record

#: This date is in the past, so tasks due by this clock are also due by the database's clock.
START = datetime(2020, 1, 1, tzinfo=timezone.utc)
_keys = itertools.count()


class Editor:
    """Edit a document whose index task runs 2 s after the last edit, and at most 30 s after the
    first."""

    def __init__(self, store: Store, url: str) -> None:
        self.delays: DelayTasks = delays_on(url, table_prefix="s_")
        self.timer: RecordingTimer = record(self.delays)
        self.clock = ManualClock(START)
        runtime_of(self.delays).producer._clock = self.clock
        self.claims = store.claims("w", None)
        self.key = "document"
        self._store = store

    def edit(self, after_s: float = 0, delay: float = 2, max_wait: Any = 30) -> DelayTask:
        self.clock.advance(after_s)
        options: dict[str, Any] = {"key": self.key, "on_conflict": "replace", "max_wait": max_wait}
        task = self.delays.schedule_delay("index", {}, delay, **options)
        assert self.delays.get(task).expected_time == task.expected_time, (
            "what is told is what is stored"
        )
        return task

    def run(self) -> DelayTask:
        [claimed] = self.claims.claim_due("default", [0], 1)
        return claimed


@pytest.fixture
def editor(store: Store, database_url: str) -> Iterator[Editor]:
    made = Editor(store, database_url)
    yield made
    made.delays.close()


def due_s(task: DelayTask) -> float:
    return (task.expected_time - START).total_seconds()


def test_edits_delay_the_task_until_max_wait_is_over(editor: Editor) -> None:
    tasks = [editor.edit(after_s=0 if n == 0 else 1) for n in range(40)]
    assert len({task.id for task in tasks}) == 1
    assert [due_s(task) for task in tasks] == [*range(2, 30), *[30] * 12]
    assert [entry.due_us for entry in editor.timer.armed][-1] == int(
        START.timestamp() + 30
    ) * 1_000_000


#: Each edit has the seconds since the previous edit, the delay, and `max_wait`.
edits = st.lists(
    st.tuples(st.floats(0, 50), st.floats(0, 50), st.none() | st.floats(0.001, 100)),
    min_size=1,
    max_size=12,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=edits)
@example(edits=[(0, 5, None), (1, 5, 3), (1, 5, None), (0, 0, 0.001)])
def test_no_order_of_edits_makes_a_task_late(
    editor: Editor, edits: list[tuple[float, float, float | None]]
) -> None:
    editor.key = f"document {next(_keys)}"
    first: datetime | None = None
    for after_s, delay, max_wait in edits:
        task = editor.edit(after_s, delay, max_wait)
        now = editor.clock.now()
        first = first or now
        wanted = now + timedelta(seconds=delay)
        if max_wait is not None:
            wanted = min(wanted, first + timedelta(seconds=max_wait))
        assert abs(task.expected_time - wanted) <= timedelta(microseconds=1)
        assert task.create_time == first


def test_the_first_schedule_call_waits_no_longer_than_max_wait(editor: Editor) -> None:
    assert due_s(editor.edit(delay=60, max_wait="30s")) == 30
    editor.key = "another"
    at = START + timedelta(hours=1)
    options: dict[str, Any] = {
        "key": editor.key,
        "on_conflict": "replace",
        "max_wait": timedelta(seconds=30),
    }
    assert due_s(editor.delays.schedule_at("index", {}, at, **options)) == 30


def test_the_first_edit_after_a_run_begins_a_new_max_wait(editor: Editor) -> None:
    first = editor.edit()
    editor.claims.settle([Settlement(editor.run(), "succeed")])
    second = editor.edit(after_s=100)
    assert second.id != first.id
    assert [due_s(second), due_s(editor.edit(after_s=29)), due_s(editor.edit(after_s=1))] == [
        102,
        130,
        130,
    ]


def test_an_edit_during_a_run_begins_a_new_max_wait(editor: Editor) -> None:
    first = editor.edit()
    editor.run()
    second = editor.edit(after_s=100)
    assert (second.id != first.id, due_s(second)) == (True, 102)


def test_max_wait_of_a_retried_task_counts_from_the_start_of_its_failed_run(
    editor: Editor, store: Store
) -> None:
    editor.edit()
    ran, t = editor.run(), store.schema.tasks
    far = START + timedelta(days=1)
    editor.claims.settle(
        [
            Settlement(
                ran,
                "schedule_retry",
                began=START + timedelta(seconds=5),
                error="no",
                expected_time=far,
            )
        ]
    )
    assert editor.delays.get(ran).status is Status.NOT_COMPLETE
    assert due_s(editor.edit(after_s=10)) == 12
    assert due_s(editor.edit(after_s=24)) == 35, "30 s after the run began"
    with store.database.begin() as connection:  # as another program writes it
        connection.execute(
            update(t).values(
                execution_time=None, create_time=datetime.max.replace(tzinfo=timezone.utc)
            )
        )
    assert due_s(editor.edit(after_s=66)) == 102


def test_an_overdue_task_stays_overdue_after_any_number_of_replacements(
    editor: Editor,
) -> None:
    """The sweep finds the task, although each message for it is stale on arrival."""
    for _ in range(10):
        task = editor.edit(after_s=20)
    assert due_s(task) == 20 + 30
    assert editor.run().id == task.id


def test_schedule_many_delays_no_task_longer_than_max_wait(editor: Editor) -> None:
    new = [NewTask("index", {}, 2, key=f"k{n}", max_wait=3) for n in range(3)]
    for _ in range(5):
        editor.delays.schedule_many(new, on_conflict="replace")
        editor.clock.advance(1)
    assert [due_s(task) for task in editor.delays.find()] == [3, 3, 3]


def test_a_replacement_without_max_wait_gets_its_full_delay(editor: Editor) -> None:
    editor.edit()
    assert due_s(editor.edit(after_s=10, delay=100, max_wait=None)) == 110
