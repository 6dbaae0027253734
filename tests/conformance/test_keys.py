"""Keys, and how replacements delay a task, on every database."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from delaytasks import DelayedTask, DelayTasks, NewTask, Status
from delaytasks.core.errors import DuplicateTaskError
from delaytasks.core.filters import filter_of
from delaytasks.core.interfaces import Settlement
from delaytasks.runtime import runtime_of
from delaytasks.storage.claims import Claims
from delaytasks.storage.database import Database
from delaytasks.storage.store import Store
from tests.conformance.store_rows import entry, keyed, read, task
from tests.recording import ManualClock, delays_on, record
from tests.world.broker import RecordingTimer

# Keys, on every database: a tag has at most one live task with the same key


@pytest.mark.quick
def test_a_live_key_rejects_and_names_the_one_that_has_it(store: Store) -> None:
    first = keyed(store)
    second = task(store, key="order-1")
    with pytest.raises(DuplicateTaskError, match="order-1") as caught:
        store.tasks.insert_keyed(second, "reject")
    assert caught.value.id == first.id
    assert store.tasks.get(second.id) is None
    assert store.tasks.id_of_key("mail", "order-1") == first.id


@pytest.mark.quick
def test_keep_returns_the_live_task_of_the_key_unchanged(store: Store) -> None:
    first = keyed(store)
    held, is_new = store.tasks.insert_keyed(task(store, key="order-1", body_json='"new"'), "keep")
    assert (held.id, held.body, is_new) == (first.id, {}, False)


@pytest.mark.quick
def test_scheduling_again_with_the_same_id_and_key_is_harmless(store: Store) -> None:
    first = keyed(store)
    again, is_new = store.tasks.insert_keyed(first, "reject")
    assert (again.id, is_new) == (first.id, False)


@pytest.mark.quick
def test_replacing_gives_the_same_id_a_new_version_body_and_time(
    store: Store, claims: Claims
) -> None:
    first = keyed(store, -10.0)
    new = task(store, 60.0, key="order-1", body_json='"new"', priority=3, queue="q")
    now, is_new = store.tasks.insert_keyed(new, "replace")
    assert (now.id, now.version, is_new) == (first.id, 1, True)
    found = read(store, first.id)
    assert (found.body, found.version, found.expected_time) == ("new", 1, new.expected_time)
    assert (found.priority, found.queue, found.status) == (3, "q", Status.NOT_COMPLETE)
    assert store.tasks.get(new.id) is None
    assert claims.claim([entry(first)]) == []


@pytest.mark.quick
def test_replacing_a_held_task_makes_it_wait_again(store: Store) -> None:
    first = keyed(store)
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(update(t).where(t.c.id == first.id).values(status=int(Status.HELD)))
    store.tasks.insert_keyed(task(store, key="order-1"), "replace")
    assert read(store, first.id).status is Status.NOT_COMPLETE


@pytest.mark.quick
def test_replacing_a_running_task_makes_a_new_one_which_has_the_key(
    store: Store, claims: Claims
) -> None:
    first = keyed(store)
    running = claims.claim([entry(first)])
    new, is_new = store.tasks.insert_keyed(task(store, key="order-1", body_json='"new"'), "replace")
    assert is_new
    assert new.id != first.id
    assert store.tasks.id_of_key("mail", "order-1") == new.id
    assert claims.settle([Settlement(running[0], "succeed")]) == {first.id}
    assert store.tasks.id_of_key("mail", "order-1") == new.id


@pytest.mark.quick
@pytest.mark.parametrize("move", ["succeed", "fail"])
def test_a_finished_task_leaves_its_key(store: Store, claims: Claims, move: Any) -> None:
    first = keyed(store)
    claims.settle([Settlement(one, move) for one in claims.claim([entry(first)])])
    assert store.tasks.id_of_key("mail", "order-1") is None
    assert keyed(store).id != first.id


@pytest.mark.quick
def test_a_task_that_is_given_back_keeps_its_key(store: Store, claims: Claims) -> None:
    first = keyed(store)
    claims.settle([Settlement(one, "give_back") for one in claims.claim([entry(first)])])
    assert store.tasks.id_of_key("mail", "order-1") == first.id


@pytest.mark.quick
def test_a_key_whose_task_was_deleted_can_be_used_again(store: Store) -> None:
    first = keyed(store)
    with store.database.begin() as connection:
        connection.execute(store.schema.tasks.delete())
    assert keyed(store).id != first.id


@pytest.mark.quick
def test_a_key_whose_task_another_program_finished_can_be_used_again(store: Store) -> None:
    first = keyed(store)
    with store.database.begin() as connection:
        connection.execute(update(store.schema.tasks).values(status=int(Status.DONE)))
    assert keyed(store).id != first.id


@pytest.mark.quick
def test_a_rerun_takes_the_key_again_or_names_the_task_that_has_it(store: Store) -> None:
    first = keyed(store)
    store.tasks.cancel(first.id)
    assert store.tasks.id_of_key("mail", "order-1") is None
    store.tasks.rerun(first.id, store.tasks.now())
    assert store.tasks.id_of_key("mail", "order-1") == first.id
    store.tasks.cancel(first.id)
    second = keyed(store)
    with pytest.raises(DuplicateTaskError) as caught:
        store.tasks.rerun(first.id, store.tasks.now())
    assert caught.value.id == second.id
    assert read(store, first.id).status is Status.CANCELLED


@pytest.mark.quick
def test_of_many_callers_with_one_key_one_gets_it(store: Store) -> None:
    made = [task(store, 60.0, key="order-1") for _ in range(8)]

    def schedule(one: DelayedTask) -> bool:
        try:
            return store.tasks.insert_keyed(one, "reject")[1]
        except DuplicateTaskError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(schedule, made)) == {True: 1, False: 7}
    assert len(store.tasks.find(filter_of({"tag": "mail"}), 10)) == 1


@pytest.mark.quick
def test_a_key_names_its_only_live_task_during_concurrent_replacing_and_settling(
    store: Store, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.database.url.get_backend_name() == "postgresql":
        # Without this patch, a retry would hide a deadlock, apart from the second that each retry
        # takes.
        monkeypatch.setattr(Database, "run", lambda self, work, *_, **__: work())
    made = [task(store, key="order-1") for _ in range(30)]
    ended = threading.Event()
    errors: list[BaseException] = []

    def settle() -> None:
        try:
            while not ended.is_set():
                claims.settle(
                    [Settlement(one, "succeed") for one in claims.claim_due("default", [0], 10)]
                )
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=settle)
    worker.start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda one: store.tasks.insert_keyed(one, "replace"), made))
    ended.set()
    worker.join()
    assert errors == []
    live = [
        one.id
        for one in store.tasks.find(
            filter_of({"tag": "mail", "status": Status.NOT_COMPLETE, "key": "order-1"}), 100
        )
    ]
    assert live in ([], [store.tasks.id_of_key("mail", "order-1")])


# `max_wait` limits how long repeated replacements can defer a task, on every database


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

    def edit(self, after_s: float = 0, delay: float = 2, max_wait: Any = 30) -> DelayedTask:
        self.clock.advance(after_s)
        options: dict[str, Any] = {"key": self.key, "on_conflict": "replace", "max_wait": max_wait}
        task = self.delays.schedule_delay("index", {}, delay, **options)
        assert self.delays.get(task).expected_time == task.expected_time, (
            "what is told is what is stored"
        )
        return task

    def run(self) -> DelayedTask:
        [claimed] = self.claims.claim_due("default", [0], 1)
        return claimed


@pytest.fixture
def editor(store: Store, database_url: str) -> Iterator[Editor]:
    made = Editor(store, database_url)
    yield made
    made.delays.close()


def due_s(task: DelayedTask) -> float:
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
    assert due_s(editor.delays.schedule_delay("index", {}, at=at, **options)) == 30


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


def test_an_overdue_task_stays_overdue_after_any_number_of_replacements(editor: Editor) -> None:
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
