"""Operations on many tasks, on every database."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import select, update

from delaytasks import BulkResult, DelayedTask, DelayTasks, Status, TaskStateError
from tests.conformance.bulk_tasks import NOON, counts
from tests.refusals import invalid
from tests.world import RUNNING, MonkeyPatch, World

FAR = 7 * 86400.0
CANCELLED, WAITS, FAILED = Status.CANCELLED, Status.NOT_COMPLETE, Status.FAILED


def schedule(delays: DelayTasks, tag: str = "mail", delay: float = FAR, **more: Any) -> DelayedTask:
    return delays.get(delays.schedule_delay(tag, {}, delay, **more))


def pass_a_moment() -> None:
    """Wait until scheduled tasks are older than now on a clock that counts milliseconds."""
    time.sleep(0.003)


def put(world: World, task: DelayedTask, **values: Any) -> DelayedTask:
    """Write `values` into the row of `task`, and return the task."""
    world.change(task, **values)
    return world.read(task)


def statuses(delays: DelayTasks, *tasks: DelayedTask) -> list[Status]:
    return [delays.get(task).status for task in tasks]


def shifts(delays: DelayTasks, tasks: Iterable[DelayedTask]) -> set[float]:
    """Return by how many seconds the tasks have been shifted."""
    return {(delays.get(t).expected_time - t.expected_time).total_seconds() for t in tasks}


def due_in(delays: DelayTasks, task: DelayedTask) -> float:
    """Return the seconds until the task is due."""
    return (delays.get(task).due - datetime.now(timezone.utc)).total_seconds()


@pytest.fixture
def small(world: World) -> None:
    """Make steps and windows only a few rows long."""
    world.lower(rows_of_a_bulk_step=3, seconds_before_a_second_try=0.2, rows_of_a_bulk_window=4)


# Many tasks are cancelled, rescheduled and retried


#: The calls, the filters, and how many tasks of one in each status match, change and are refused.
VERBS: list[tuple[str, dict[str, Any], dict[str, Any], tuple[int, int, int]]] = [
    ("cancel", {}, {}, (3, 2, 1)),
    ("reschedule", {"delay": 2}, {}, (3, 2, 1)),
    ("reschedule", {"delay": FAR}, {}, (3, 2, 1)),
    ("rerun", {"delay": 2}, {}, (1, 1, 0)),
    ("rerun", {"delay": FAR}, {"status": "cancelled"}, (1, 1, 0)),
]


@pytest.mark.parametrize(("verb", "to", "filters", "counted"), VERBS)
def test_a_bulk_call_moves_the_tasks_of_its_statuses_as_single_calls_do(
    world: World, verb: str, to: Any, filters: Any, counted: tuple[int, int, int]
) -> None:
    delays, call = world.delays, getattr(world.delays.bulk, verb)
    rows = [world.put(status, due_s=60, tag="mail", runs=4, lapses=3) for status in Status]
    alone = [world.put(status, due_s=60, tag="alone", runs=4, lapses=3) for status in Status]

    def ends(tag: str) -> list[Any]:
        """Return what became of the tasks of a tag, and which of them a message names."""
        armed = {(entry.id, entry.version) for entry in world.broker.armed}
        columns = ("status", "version", "runs", "lapses")
        return sorted(
            [getattr(task, name) for name in columns]
            + [round(due_in(delays, task), -1), (task.id, task.version) in armed]
            + [task.status is CANCELLED or task.cancel_request is None]
            for task in delays.find(tag=tag)
        )

    before = ends("mail")
    dry = call(**to, **filters, tag="mail", dry_run=True)
    assert (counts(dry), dry.runs, delays.bulk.log()) == ((counted[0], 0, counted[2]), (), [])
    assert ends("mail") == ends("alone") == before
    assert counts(call(**to, **filters, tag="mail")) == counted
    assert ends("alone") == before
    for row, task in zip(rows, alone, strict=True):
        if verb != "rerun" or world.read(row).status is not row.status:
            with suppress(TaskStateError):
                getattr(delays, verb)(task.id, **to)
    assert ends("mail") == ends("alone")
    assert world.count("task.cancelled") == (4 if verb == "cancel" else 0)


def test_a_shift_moves_tasks_by_the_same_time_but_none_into_the_past(world: World) -> None:
    delays = world.delays
    tasks = [schedule(delays, delay=delay) for delay in (60, 3600, 7200.5)]
    pass_a_moment()
    assert counts(delays.bulk.reschedule(by=timedelta(hours=1), everything=True)) == (3, 3, 0)
    assert shifts(delays, tasks) == {3600}
    last = datetime(9999, 12, 31, 23, tzinfo=timezone.utc)
    at_the_end = put(world, schedule(delays, "late"), expected_time=last)
    pass_a_moment()
    assert counts(delays.bulk.reschedule(by=-3700, tag="mail")) == (3, 3, 0)
    assert abs(due_in(delays, tasks[0])) < 5
    assert shifts(delays, tasks[1:]) == {-100}
    assert counts(delays.bulk.reschedule(by=86400, tag="late")) == (1, 1, 0)
    assert delays.get(at_the_end).expected_time == last


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt, "stopped"), (ZeroDivisionError, "failed")]
)
def test_a_stopped_shift_is_audited_and_continued_without_shifting_a_task_twice(
    delays: DelayTasks, error: Any, state: str
) -> None:
    tasks = [schedule(delays, delay=FAR + n) for n in range(20)]
    pass_a_moment()
    seen: list[BulkResult] = []

    def stop(result: BulkResult) -> None:
        seen.append(result)
        if len(seen) == 3:
            raise error

    with pytest.raises(error):
        delays.bulk.reschedule(by=7, tag="mail", on_progress=stop)
    assert counts(seen[-1]) == (20, 9, 0)
    [entry] = delays.bulk.log()
    assert (entry.state, entry.changed, entry.finished_at is None) == (state, 9, False)
    again = delays.bulk.reschedule(by=7, tag="mail", updated_until=seen[-1].started)
    assert counts(again) == (11, 11, 0)
    assert shifts(delays, tasks) == {7}


@pytest.mark.usefixtures("small")
def test_a_task_that_is_found_twice_is_shifted_once(world: World, monkeypatch: MonkeyPatch) -> None:
    """The task was paused during the search, so both the waiting and the paused rows contain it."""
    delays, moves = world.delays, world.store.bulk
    tasks = [schedule(delays) for _ in range(5)]
    pass_a_moment()
    matching = moves.matching
    monkeypatch.setattr(moves, "matching", lambda *of: [*matching(*of), *matching(*of)])
    assert delays.bulk.reschedule(by=7, tag="mail").changed == 5
    assert shifts(delays, tasks) == {7}


def test_rerun_many_gives_keys_back_that_no_task_has(world: World, delays: DelayTasks) -> None:
    tasks = []
    for n in range(3):
        task = schedule(delays, key=f"k{n}")
        delays.cancel(task)
        tasks.append(put(world, task, status=int(FAILED)))
    taken = schedule(delays, key="k1")
    for expected in ((3, 2, 1), (1, 0, 1)):  # again: the same one is refused
        assert counts(delays.bulk.rerun(tag="mail")) == expected
        [entry, *_] = delays.bulk.log()
        assert (entry.matched, entry.changed, entry.refused, entry.state) == (*expected, "done")
    assert statuses(delays, *tasks) == [WAITS, FAILED, WAITS]
    owners = [delays.get(tag="mail", key=f"k{n}").id for n in range(3)]
    assert owners == [tasks[0].id, taken.id, tasks[2].id]


# Bulk operations work in steps while workers run, and are recorded in the audit


@pytest.mark.usefixtures("small")
def test_a_bulk_call_works_in_small_steps_and_its_audit_row_shows_each(
    world: World, delays: DelayTasks
) -> None:
    at = datetime.now(timezone.utc) + timedelta(days=1)
    # All are due at the same instant, and exceed one window.
    for n in range(8):
        delays.schedule_delay("mail", n, at=at, key=f"k{n}" if n % 2 else None)
    put(world, delays.schedule_delay("mail", 8, at=at), **RUNNING)
    rows: list[tuple[str, int, int, int]] = []

    def look(_result: BulkResult) -> None:
        [entry] = delays.bulk.log()
        rows.append((entry.state, entry.matched, entry.changed, entry.refused))

    since = NOON - timedelta(days=9999)
    result = delays.bulk.cancel(tag="mail", since=since, actor="ann@desk", on_progress=look)
    assert rows == [("running", 9, 3, 1), ("running", 9, 6, 1), ("running", 9, 8, 1)]
    [entry] = delays.bulk.log()
    shown = entry.id, entry.action, entry.actor, entry.state
    assert shown == (*result.runs, "cancel", "ann@desk", "done")
    assert entry.filter == {"tag": "mail", "since": since.isoformat()}
    assert (entry.matched, entry.changed, entry.refused) == counts(result)
    assert entry.finished_at is not None
    assert entry.started_at == result.started <= min(entry.finished_at, entry.seen_at)
    delays.bulk.reschedule(by=-60, everything=True)
    [newest] = delays.bulk.log(limit=1)
    assert newest.filter == {"everything": True, "to": "-60.0 s"}
    assert "@" in newest.actor


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("verb", ["cancel", "reschedule"])
def test_a_step_whose_answer_was_lost_is_counted_and_not_repeated(world: World, verb: str) -> None:
    if world.kind == "sqlite":
        return  # there is no network answer that could be lost
    with world.proxied() as (proxy, proxied):
        tasks = [schedule(proxied, key=f"k{n}") for n in range(5)]

        def cut(result: BulkResult) -> None:
            if result.changed == 3:
                proxy.cut_answer(rb"COMMIT(?!TED)")

        pass_a_moment()
        options = {"by": 60} if verb == "reschedule" else {}
        result = getattr(proxied.bulk, verb)(tag="mail", on_progress=cut, **options)
        assert (proxy.cut, counts(result)) == (1, (5, 5, 0))
        [entry] = proxied.bulk.log()
        assert (entry.changed, entry.refused, entry.state) == (5, 0, "done")
        assert {world.read(task).version for task in tasks} == {1}
        assert shifts(proxied, tasks) == ({60} if verb == "reschedule" else {0})


# -- concurrent transactions ---------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("is_released", [True, False])
@pytest.mark.parametrize("locks", ["task", "key"])
def test_a_bulk_call_skips_locked_rows_and_tries_them_once_more(
    world: World, delays: DelayTasks, is_released: bool, locks: str
) -> None:
    if world.kind == "sqlite":
        return  # SQLite has one writer at a time
    tasks = [schedule(delays, key=f"k{n}") for n in range(7)]
    t, k = world.table(), world.table("keys")
    task, key = select(t.c.id).where(t.c.id == tasks[1].id), select(k).where(k.c.task_key == "k1")
    with world.engine.connect() as connection:
        connection.execute((task if locks == "task" else key).with_for_update())

        def release(result: BulkResult) -> None:
            if is_released and result.changed == 6:
                connection.rollback()

        began = time.monotonic()
        result = delays.bulk.cancel(tag="mail", on_progress=release)
        assert time.monotonic() - began < 3, "a lock would be waited for longer"
    assert counts(result) == ((7, 7, 0) if is_released else (7, 6, 1))
    assert delays.bulk.cancel(tag="mail").changed == (0 if is_released else 1)


@pytest.mark.usefixtures("small")
def test_cancel_many_does_not_deadlock_with_callers_that_replace_keys(delays: DelayTasks) -> None:
    keys = [f"k{n}" for n in range(30)]
    is_over = threading.Event()

    def replace(backwards: bool) -> int:
        done = 0
        while not is_over.is_set():
            for key in reversed(keys) if backwards else keys:
                schedule(delays, key=key, on_conflict="replace")
                done += 1
        return done

    with ThreadPoolExecutor(2) as pool:
        replacing = [pool.submit(replace, backwards) for backwards in (False, True)]
        results = [delays.bulk.cancel(tag="mail") for _ in range(5)]
        is_over.set()
        assert all(each.result(30) for each in replacing)
    assert all(result.matched == result.changed + result.refused for result in results)
    live = list(delays.find(limit=1000, status="NOT_COMPLETE"))
    assert len(live) == len({task.key for task in live}), "one live task for each key"
    for task in live:
        assert delays.get(tag="mail", key=task.key).id == task.id


# `bulk.rerun(entry=…)` runs the tasks of a cancel again that have not moved since


def test_cancelled_tasks_wait_again_with_keys_and_times(world: World, delays: DelayTasks) -> None:
    world.lower(rows_of_a_bulk_step=2)
    tasks = [schedule(delays, delay=86_400.0 + n, key=f"k{n}" if n % 2 else None) for n in range(7)]
    put(world, tasks[0], status=int(Status.HELD))
    put(world, tasks[1], runs=2)
    tasks[2] = put(world, tasks[2], due_time=tasks[2].expected_time - timedelta(hours=1))
    schedule(delays, tag="pay", key="k")
    [run] = delays.bulk.cancel(everything=True).runs
    assert counts(delays.bulk.rerun(entry=run, tag="mail", dry_run=True)) == (7, 0, 0)
    assert counts(delays.bulk.rerun(entry=run, tag="mail", actor="ann")) == (7, 7, 0)
    found = [delays.get(task) for task in tasks]
    assert {(task.status, task.runs) for task in found} == {(WAITS, 0)}
    assert [task.due for task in found] == [task.due for task in tasks]
    for task in tasks[1::2]:
        assert delays.get(tag="mail", key=task.key).id == task.id
    [entry, cancel] = delays.bulk.log()
    assert (entry.action, entry.actor, entry.filter["entry"]) == ("rerun", "ann", str(run))
    assert counts(delays.bulk.rerun("1h", entry=cancel, tag="pay")) == (1, 1, 0)
    assert 3540 < due_in(delays, delays.get(tag="pay", key="k")) <= 3600


def test_tasks_that_have_moved_since_are_left_as_they_are(world: World, delays: DelayTasks) -> None:
    plain, keyed, rerun, taken, gone, again = (
        schedule(delays, key=key) for key in (None, "k1", "k2", "k3", None, None)
    )
    result = delays.bulk.cancel(tag="mail")
    for task in (rerun, again):
        delays.rerun(task, "2d")
    delays.cancel(again)
    new = schedule(delays, key="k3")
    world.delete("tasks", id=gone.id)
    before = delays.get(rerun)
    assert counts(delays.bulk.rerun(entry=result.runs[0])) == (6, 2, 4)
    assert statuses(delays, plain, keyed, taken, again) == [WAITS, WAITS, CANCELLED, CANCELLED]
    assert delays.get(rerun) == before
    assert delays.get(tag="mail", key="k3").id == new.id


@pytest.mark.parametrize("point", ["_step", "_lock"])
def test_a_task_that_moves_before_it_is_locked_is_left_as_it_is(world: World, point: str) -> None:
    delays, store, t = world.delays, world.store.bulk, world.table()
    world.lower(seconds_before_a_second_try=0)
    task = schedule(delays)
    result = delays.bulk.cancel(tag="mail")
    unpatched = getattr(store, point)

    def late(on: Any, *given: Any) -> Any:
        again = {"version": t.c.version + 2, "cancel_request": None}  # rerun, and cancelled alone
        on.execute(update(t).where(t.c.id == task.id).values(again))
        return unpatched(on, *given)

    with mock.patch.object(store, point, late):
        assert counts(delays.bulk.rerun(entry=result.runs[0])) == (1, 0, 1)
    assert delays.get(task).is_cancelled


def test_only_the_entry_of_a_cancel_that_has_ended_can_be_rerun(
    delays: DelayTasks, monkeypatch: MonkeyPatch
) -> None:
    schedule(delays)
    [moved] = delays.bulk.reschedule(60, tag="mail").runs
    monkeypatch.setattr("delaytasks.db.bulk_moves.Audit.end", lambda *_: None)
    [died] = delays.bulk.cancel(tag="mail").runs
    says = ((moved, "only the tasks of a cancel"), (7, "no log entry 7"), (died, "still runs"))
    for entry, why in says:
        with invalid("entry", match=why):
            delays.bulk.rerun(entry=entry)
    monkeypatch.setattr("delaytasks.operate.task_calls.RUNNING_S", -1)
    assert counts(delays.bulk.rerun(entry=died)) == (1, 1, 0)
