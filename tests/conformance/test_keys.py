"""Keys, and how replacements delay a task, on every database."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from delaytasks import DelayedTask, DuplicateTaskError, NewTask, Status
from tests.world import MonkeyPatch, World
from tests.world.recording import ManualClock


def keyed(world: World, on_conflict: Any = "reject", delay: float = 0, **more: Any) -> DelayedTask:
    return world.schedule(key="k", on_conflict=on_conflict, delay=delay, **more)


# -- a tag has at most one live task with the same key --------------------------------------------


@pytest.mark.quick
def test_a_live_key_is_rejected_or_keeps_its_task_unchanged(world: World) -> None:
    first = keyed(world)
    with pytest.raises(DuplicateTaskError, match="'k'") as caught:
        keyed(world, id=77)
    assert caught.value.id == first.id
    kept = keyed(world, "keep", body="new")
    assert (kept.id, kept.body, world.owner()) == (first.id, first.body, first.id)
    again = keyed(world, id=first.id)  # the same call again is harmless
    assert (again.id, again.version) == (first.id, first.version)
    assert world.counted()[Status.NOT_COMPLETE] == 1


@pytest.mark.quick
@pytest.mark.parametrize("status", [Status.NOT_COMPLETE, Status.HELD])
def test_replacing_gives_an_id_a_new_version_body_and_time(world: World, status: Status) -> None:
    first = keyed(world)
    world.change(first, status=int(status), runs=3, lapses=2)
    new = keyed(world, "replace", 60, body="new", priority=3, queue="q")
    found = world.read(first)
    assert (new.id, new.version) == (found.id, found.version) == (first.id, 1)
    assert (found.body, found.expected_time, found.status) == (
        "new", new.expected_time, Status.NOT_COMPLETE,
    )  # fmt: skip
    assert (found.priority, found.queue, found.runs, found.lapses) == (3, "q", 0, 0)
    assert sum(world.counted().values()) == 1
    assert world.claim(first) == []


@pytest.mark.quick
def test_replacing_a_running_task_makes_a_new_one_which_has_the_key(world: World) -> None:
    [running] = world.claim(keyed(world))
    new = keyed(world, "replace", body="new")
    assert new.id != running.id
    assert world.owner() == new.id
    assert world.settle(running)
    assert world.owner() == new.id


@pytest.mark.quick
@pytest.mark.parametrize(
    ("move", "is_free"), [("succeed", True), ("fail", True), ("give_back", False)]
)
def test_a_finished_task_leaves_its_key(world: World, move: Any, is_free: bool) -> None:
    [running] = world.claim(keyed(world))
    assert world.settle(running, move)
    assert world.owner() == (None if is_free else running.id)
    if is_free:
        assert keyed(world).id != running.id


@pytest.mark.quick
@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "finished"])
def test_a_key_whose_task_another_program_ended_is_free(world: World, is_deleted: bool) -> None:
    first = keyed(world)
    world.change(first, status=int(Status.DONE))
    if is_deleted:
        with world.begin() as connection:
            connection.execute(world.table().delete())
    assert keyed(world).id != first.id


@pytest.mark.quick
def test_a_rerun_takes_the_key_again_or_names_the_task_that_has_it(world: World) -> None:
    first = keyed(world)
    world.cancel(first)
    assert world.owner() is None
    world.move("rerun", first)
    assert world.owner() == first.id
    world.cancel(first)
    second = keyed(world)
    with pytest.raises(DuplicateTaskError) as caught:
        world.move("rerun", first)
    assert caught.value.id == second.id
    assert world.read(first).status is Status.CANCELLED


@pytest.mark.quick
def test_of_many_callers_with_one_key_one_gets_it(world: World) -> None:
    def schedule(_: int) -> bool:
        try:
            return bool(keyed(world, delay=60))
        except DuplicateTaskError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(schedule, range(8))) == {True: 1, False: 7}
    assert sum(world.counted().values()) == 1


@pytest.mark.quick
def test_a_key_has_one_live_task_during_replacing(world: World, monkeypatch: MonkeyPatch) -> None:
    if world.kind == "postgresql":
        # Without this patch, a retry would hide a deadlock, apart from the second that each retry
        # takes.
        monkeypatch.setattr(type(world.store.database), "run", lambda self, work, *_, **__: work())
    ended = threading.Event()

    def settle() -> None:
        while not ended.is_set():
            world.worker().end(world.claim_due(most=10))

    with ThreadPoolExecutor(4) as pool:
        settling = pool.submit(settle)
        list(pool.map(lambda _: keyed(world, "replace"), range(30)))
        ended.set()
        settling.result(30)
    live = [task.id for task in world.delays.find(status="NOT_COMPLETE", key="k")]
    assert live in ([], [world.owner()])


# -- `max_wait` limits how long repeated replacements can defer a task ----------------------------


#: This date is in the past, so tasks due by this clock are also due by the database's clock.
START = datetime(2020, 1, 1, tzinfo=timezone.utc)
_keys = itertools.count()


class Editor:
    """Edit a document whose index task runs 2 s after the last edit, and at most 30 s after the
    first."""

    def __init__(self, world: World) -> None:
        self.world, self.clock, self.key = world, ManualClock(START), "document"
        world.set_clock(self.clock)

    def edit(self, after_s: float = 0, delay: float = 2, max_wait: Any = 30) -> DelayedTask:
        self.clock.advance(after_s)
        options: dict[str, Any] = {"key": self.key, "on_conflict": "replace", "max_wait": max_wait}
        task = self.world.delays.schedule_delay("note", {}, delay, **options)
        assert self.world.read(task).expected_time == task.expected_time
        return task

    def due_s(self, *edit: Any, **options: Any) -> float:
        return (self.edit(*edit, **options).expected_time - START).total_seconds()


@pytest.fixture
def editor(world: World) -> Editor:
    return Editor(world)


def test_edits_delay_the_task_until_max_wait_is_over(editor: Editor) -> None:
    dues = [editor.due_s(after_s=min(n, 1)) for n in range(40)]
    assert dues == [*range(2, 30), *[30] * 12]
    assert sum(editor.world.counted().values()) == 1
    assert editor.world.broker.armed[-1].due_us == int(START.timestamp() + 30) * 1_000_000


#: Each edit has the seconds since the previous edit, the delay, and `max_wait`.
edit = st.tuples(st.floats(0, 50), st.floats(0, 50), st.none() | st.floats(0.001, 100))
edits = st.lists(edit, min_size=1, max_size=12)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=edits)
@example(edits=[(0, 5, None), (1, 5, 3), (1, 5, None), (0, 0, 0.001)])
def test_no_order_of_edits_makes_a_task_late(editor: Editor, edits: Any) -> None:
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


def test_the_first_edit_after_a_run_or_during_it_begins_a_new_max_wait(editor: Editor) -> None:
    first = editor.edit()
    [running] = editor.world.claim_due()
    assert editor.due_s(after_s=100) == 102
    assert editor.world.settle(running)
    editor.world.worker().end(editor.world.claim_due())
    second = editor.edit(after_s=100)
    assert second.id != first.id
    assert [editor.due_s(after_s=after_s) for after_s in (29, 1)] == [230, 230]


def test_max_wait_of_a_retried_task_counts_from_the_start_of_its_failed_run(editor: Editor) -> None:
    editor.edit()
    [ran] = editor.world.claim_due()
    assert editor.world.settle(ran, "schedule_retry", expected_time=START + timedelta(days=1))
    editor.world.change(ran, execution_time=START + timedelta(seconds=5))
    assert editor.due_s(after_s=10) == 12
    assert editor.due_s(after_s=24) == 35, "30 s after the run began"
    end = datetime.max.replace(tzinfo=timezone.utc)  # as another program writes it
    editor.world.change(ran, execution_time=None, create_time=end)
    assert editor.due_s(after_s=66) == 102


def test_an_overdue_task_stays_overdue_after_any_number_of_replacements(editor: Editor) -> None:
    """The sweep finds the task, although each message for it is stale on arrival."""
    dues = [editor.due_s(after_s=20) for _ in range(10)]
    assert dues[-1] == 20 + 30
    assert len(editor.world.claim_due()) == 1


def test_schedule_many_delays_no_task_longer_than_max_wait(editor: Editor) -> None:
    new = [NewTask("note", {}, 2, key=f"k{n}", max_wait=3) for n in range(3)]
    for _ in range(5):
        editor.world.delays.schedule_many(new, on_conflict="replace")
        editor.clock.advance(1)
    dues = [task.expected_time - START for task in editor.world.delays.find()]
    assert dues == [timedelta(seconds=3)] * 3
