"""Moves by operators and callers, on every database: cancel, reschedule, touch and rerun."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import DelayedTask, NewTask, Status, TouchResult
from tests.waiting import wait_until
from tests.world import FINISHED, MOVES, RUNNING, World

# -- each move, from each status, by id and by key, with and without the caller's transaction -----


#: The calls, their options, and the due time that each leaves, in seconds from now.
CALLS: dict[str, tuple[str, dict[str, Any], float]] = {
    "cancel": ("cancel", {}, 5),
    "reschedule far": ("reschedule", {"delay": 3600}, 3600),
    "reschedule near": ("reschedule", {"delay": 2}, 2),
    "touch": ("touch", {"delay": 3600}, 3600),
    "touch earlier": ("touch", {"delay": 2}, 5),
    "rerun": ("rerun", {"delay": 2}, 2),
}


def put_keyed(world: World, status: Status, key: str) -> DelayedTask:
    """Insert a row with a history; a live one owns its key."""
    made = world.put(status, key=key, due_s=5, runs=3, lapses=2, priority=4)
    if status not in FINISHED:
        world.insert("keys", {"tag": made.tag, "task_key": key, "task_id": made.id})
    return world.read(made)


#: The caller's transaction.
PLACES: dict[str, Callable[[World], Any]] = {
    "alone": lambda world: nullcontext(),
    "session": lambda world: Session(world.engine),
    "connection": lambda world: world.engine.connect(),
}


def messages(world: World) -> list[tuple[Any, ...]]:
    return [(entry.id, entry.version, entry.queue, entry.priority) for entry in world.broker.armed]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("by", ["id", "key"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", list(Status), ids=str)
def test_a_move_is_made_from_its_sources_in_the_callers_transaction_and_refused_elsewhere(
    world: World, call: str, by: str, where: str, status: Status
) -> None:
    name, options, _ = CALLS[call]
    if (name, by) == ("rerun", "key"):
        return  # the key of a finished task may belong to another task
    is_known = by == "id" or status not in FINISHED
    is_allowed = status in MOVES["reschedule" if name == "touch" else name].sources
    for ending in ("rollback", "commit") if where != "alone" else ("commit",):
        before = put_keyed(world, status, f"k {ending}")
        of = {"task": before.id} if by == "id" else {"tag": "note", "key": before.key}
        world.broker.lose()
        result: Any
        with PLACES[where](world) as session:
            try:
                result = getattr(world.delays, name)(**of, **options, session=session)
            except e.TaskStateError as error:
                result = error
            if session is not None:
                assert messages(world) == []
                getattr(session, ending)()
        if not (is_known and is_allowed):
            assert_is_refusal(name, result, before, is_known)
            ending = "rollback"
        if ending == "rollback":
            assert (world.read(before), messages(world)) == (before, [])
        else:
            assert_is_moved(world, call, result, before)


def assert_is_refusal(name: str, result: Any, before: DelayedTask, is_known: bool) -> None:
    if name == "cancel":
        known = (before.id, before.status) if is_known else (None, None)
        assert (bool(result), result.id, result.status) == (False, *known)
    elif name == "touch" and is_known:
        assert (result.touched, len(result.gone)) == ([], 1)
        assert result.gone[0] in (before.id, before.key)
    else:
        assert type(result) is (e.TaskStateError if is_known else e.TaskNotFoundError)
        assert result.status == (before.status if is_known else None)


def assert_is_moved(world: World, call: str, result: Any, before: DelayedTask) -> None:
    name, _, due_s = CALLS[call]
    found, sent = world.read(before), messages(world)
    assert result
    if name == "touch":
        assert (found.status, found.version, sent) == (before.status, before.version, [])
    else:
        assert (found.status, found.version) == (MOVES[name].target, before.version + 1)
        if name != "cancel":
            assert (result.status, result.version) == (found.status, found.version)
        assert sent == ([(before.id, 1, "default", 4)] if due_s == 2 else [])
    assert world.owner(str(before.key)) == (None if name == "cancel" else before.id)
    assert (found.runs, found.lapses) == ((0, 0) if name == "rerun" else (3, 2))
    if due_s == 5:
        assert found.expected_time == before.expected_time
    else:
        assert -3 < (found.expected_time - world.now()).total_seconds() - due_s <= 0.1
    assert found.update_time >= before.update_time  # type: ignore[operator]


def test_of_simultaneous_cancels_one_succeeds_and_others_report_its_result(world: World) -> None:
    made = world.put()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: bool(world.cancel(made)), range(4)))
    assert sorted(answers) == [False] * 3 + [True]
    assert world.read(made).version == 1


@pytest.mark.parametrize("name", ["cancel", "reschedule", "rerun"])
def test_the_outcome_of_a_repeated_move_that_had_succeeded_is_unknown(
    world: World, name: str
) -> None:
    if world.kind == "sqlite":
        return  # there is no network answer that could be lost
    made = world.put(Status.FAILED if name == "rerun" else Status.NOT_COMPLETE)
    with world.proxied() as (proxy, other):
        other.reschedule(world.put(), 60)  # opens the connections, and reads the clock
        proxy.cut_answer(rb"COMMIT(?!TED)")
        due = () if name == "cancel" else (60,)
        with pytest.raises(e.OutcomeUnknownError, match=f"look at task {made.id}") as caught:
            getattr(other, name)(made, *due, version=0)
        assert isinstance(caught.value.__cause__, e.StaleVersionError)
        assert proxy.cut == 1
        assert world.read(made).version == 1


# -- touch many: due times only move later, without a new version or message ----------------------


def schedule(
    world: World, key: str | None = None, delay: float = 5, tag: str = "lost"
) -> DelayedTask:
    return world.schedule(tag, delay=delay, key=key)


def later_s(world: World, task: DelayedTask) -> float:
    """Return by how many seconds the due time moved later."""
    return (world.read(task).expected_time - task.expected_time).total_seconds()


def test_touch_many_moves_waiting_tasks_later_and_returns_the_others_in_order(world: World) -> None:
    rows = {status: put_keyed(world, status, status.name) for status in Status}
    elsewhere = world.read(schedule(world, "elsewhere", tag="other"))
    far = schedule(world, delay=100)
    waits = [task for status, task in rows.items() if status in MOVES["reschedule"].sources]
    others = [task for task in rows.values() if task not in waits]
    found = world.delays.touch([task.id for task in rows.values()], 60)
    assert found == TouchResult([task.id for task in waits], [task.id for task in others])
    named = iter([waits[0], str(waits[1].id), far, far, 77, "77"])
    assert world.delays.touch(named, timedelta(minutes=1)).gone == [77]
    assert later_s(world, far) == 0, "never earlier"
    assert world.delays.touch(tag="note", key=(), delay=60).gone == []
    keys = ["never", *(task.key for task in rows.values()), "elsewhere"]
    gone = ["never", *(task.key for task in others), "elsewhere"]
    by_key: Any = world.delays.touch(tag="note", key=keys, delay=90)
    assert (by_key.touched, by_key.gone) == ([task.key for task in waits], gone)
    assert all(80 < later_s(world, task) < 86 for task in waits)
    assert [world.read(task) for task in (*others, elsewhere)] == [*others, elsewhere]
    assert {world.read(task).version for task in waits} == {0}


def test_a_heartbeat_is_one_statement_many_are_few(world: World) -> None:
    world.lower(rows_of_a_touch=30)
    keys = [f"k{n}" for n in range(80)]
    world.delays.schedule_many([NewTask("lost", {}, 5, key=key) for key in keys])
    task = world.delays.get(tag="lost", key="k7")
    world.broker.lose()
    with world.statements() as seen:
        assert world.delays.touch(tag="lost", key="k0", delay=60)
        assert world.delays.touch(task, 70)
        assert len(seen) == 2, seen
        assert world.delays.touch(tag="lost", key=keys, delay=60).gone == []
    named = [statement for statement in seen[2:] if "yb_delay" in statement]
    assert len(named) == 3 * 3, "keys, lock, update, for each of three lots"
    soon = world.now() + timedelta(seconds=50)
    assert all(found.expected_time > soon for found in world.delays.find(limit=100))
    assert messages(world) == []


def test_touch_many_touches_locked_rows_last(world: World) -> None:
    if not world.has_row_locks:
        return
    world.lower(rows_of_a_touch=2)
    locked, claimed, *others = tasks = [schedule(world) for _ in range(6)]
    t = world.table()
    with ThreadPoolExecutor(1) as pool, world.locked(locked, claimed) as owner:
        call = pool.submit(world.delays.touch, tasks, 60)
        for task in others:
            wait_until(lambda task=task: later_s(world, task) > 50, 10, "the others")  # type: ignore[misc]
        assert not call.done()
        owner.execute(t.update().where(t.c.id == claimed.id).values(**RUNNING))
        owner.commit()
        assert call.result(10).gone == [claimed.id]
    assert later_s(world, locked) > 50
    assert later_s(world, claimed) == 0


def test_callers_that_touch_the_same_rows_in_different_orders_do_not_deadlock(world: World) -> None:
    """A deadlock in a caller's transaction raises an error, so this test would fail."""
    tasks = [schedule(world, f"k{n}") for n in range(40)]

    def touch(number: int) -> int:
        turned = tasks[::-1] if number % 2 else tasks[number:] + tasks[:number]
        keys = [str(task.key) for task in turned]
        of: dict[str, Any] = {"task": turned} if number % 3 else {"tag": "lost", "key": keys}
        with world.begin() as connection:
            return len(world.delays.touch(delay=10 + number, session=connection, **of).gone)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(touch, range(24))) == 0
