"""Moves by operators and callers, on every database."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event, text, update
from sqlalchemy.orm import Session

from delaytasks import DelayedTask, DelayTasks, NewTask, Status, TouchResult
from delaytasks.core.errors import (
    OutcomeUnknownError,
    StaleVersionError,
    StoreUnavailableError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.core.states import MOVES
from delaytasks.runtime import runtime_of
from delaytasks.storage import task_rows as touches
from delaytasks.storage.store import Store
from tests.conformance.store_rows import (
    RUNNING,
    add,
    has_row_locks,
    put,
    read,
    second_store,
    seconds,
    status_columns,
    task,
)
from tests.proxy import Proxy
from tests.waiting import wait_until
from tests.world.broker import RecordingTimer

# Cancel, reschedule, retry and touch single rows, on every database


OPERATORS: dict[str, Callable[[Store, DelayedTask], Any]] = {
    "cancel": lambda store, made: store.tasks.cancel(made.id),
    "reschedule": lambda store, made: store.tasks.reschedule(
        made.id, seconds(made.expected_time, 60)
    ),
    "rerun": lambda store, made: store.tasks.rerun(made.id, seconds(made.expected_time, 60)),
}


@pytest.mark.parametrize("status", list(Status), ids=lambda status: status.name)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_move_is_made_from_its_sources_and_refused_elsewhere(
    store: Store, name: str, status: Status
) -> None:
    made, move = put(store, status, lapses=2, runs=3), MOVES[name]
    if status in move.sources:
        moved = OPERATORS[name](store, made)
        found = read(store, made.id)
        assert (found.status, found.version) == (moved.status, moved.version) == (move.target, 1)
        later = 0 if name == "cancel" else 60
        assert found.expected_time == moved.expected_time == seconds(made.expected_time, later)
        assert (found.runs, found.lapses) == ((0, 0) if name == "rerun" else (3, 2))
        assert found.update_time is not None
        assert made.create_time is not None
        assert found.update_time >= made.create_time
        return
    if name == "cancel" and status is Status.CANCELLED:
        assert store.tasks.cancel(made.id) is None
    else:
        with pytest.raises(TaskStateError, match=str(made.id)) as caught:
            OPERATORS[name](store, made)
        assert (type(caught.value), caught.value.status) == (TaskStateError, status)
    found = read(store, made.id)
    assert (found.status, found.version) == (status, 0)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_error_of_an_operators_move_names_the_missing_task(store: Store, name: str) -> None:
    with pytest.raises(TaskNotFoundError, match="no task") as caught:
        OPERATORS[name](store, task(store))
    assert caught.value.id is not None


def test_of_simultaneous_cancels_one_succeeds_and_the_others_report_its_result(
    store: Store,
) -> None:
    made = add(store)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: store.tasks.cancel(made.id), range(4)))
    assert [answer is None for answer in answers].count(False) == 1
    assert read(store, made.id).version == 1


@pytest.mark.parametrize("name", OPERATORS)
def test_a_repeated_move_whose_first_try_succeeded_is_done_or_unknown_not_refused(
    store: Store, name: str
) -> None:
    url = store.database.url
    if url.host is None:
        return  # SQLite has no network answer that could be lost
    proxy = Proxy(url.host, url.port or {"postgresql": 5432, "mysql": 3306}[url.get_backend_name()])
    other = second_store(store, proxy.url(url.render_as_string(hide_password=False)))
    made = put(store, Status.FAILED if name == "rerun" else Status.NOT_COMPLETE)
    other.tasks.cancel(add(store).id)  # opens the connection
    proxy.cut_answer(rb"COMMIT(?!TED)")
    if name == "cancel":
        left = other.tasks.cancel(made.id, version=0)
        assert left is not None
        assert (left.status, left.version) == (Status.CANCELLED, 1)
    else:
        with pytest.raises(OutcomeUnknownError, match=f"look at task {made.id}") as caught:
            getattr(other.tasks, name)(made.id, seconds(made.expected_time, 60), version=0)
        assert isinstance(caught.value.__cause__, StaleVersionError)
    assert proxy.cut == 1
    assert read(store, made.id).version == 1
    other.close()
    proxy.close()


@pytest.mark.parametrize("status", list(Status), ids=lambda status: status.name)
def test_touch_only_moves_later_and_keeps_the_version(store: Store, status: Status) -> None:
    made = put(store, status)
    can = status in MOVES["reschedule"].sources
    later, earlier = seconds(made.expected_time, 60), seconds(made.expected_time, -60)
    assert store.touches.touch(made.id, earlier) is can
    assert read(store, made.id).expected_time == made.expected_time
    assert store.touches.touch(made.id, later) is can
    found = read(store, made.id)
    assert found.expected_time == (later if can else made.expected_time)
    assert (found.version, found.status) == (0, status)


# Touch one or many tasks: due times only move later, without a new version or message, on
# every database


def schedule(delays: DelayTasks, delay: float = 5, key: str | None = None) -> DelayedTask:
    return delays.schedule_delay("lost", {}, delay, key=key)


def set_status(store: Store, task: DelayedTask, status: Status) -> None:
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(update(t).where(t.c.id == task.id).values(status_columns(status)))


def lateness(delays: DelayTasks, task: DelayedTask) -> float:
    """Return by how many seconds the due time moved later."""
    return (delays.get(task).expected_time - task.expected_time).total_seconds()


# -- filters --------------------------------------------------------------------------------------


def test_touch_many_moves_waiting_tasks_later_and_returns_the_ids_of_the_others(
    store: Store, delays: DelayTasks
) -> None:
    tasks = {status: schedule(delays) for status in Status}
    for status, made in tasks.items():
        set_status(store, made, status)
    gone = {task.id for status, task in tasks.items() if status not in MOVES["reschedule"].sources}
    assert set(delays.touch([task.id for task in tasks.values()], 60).gone) == gone
    for each in tasks.values():
        assert (lateness(delays, each) > 50) is (each.id not in gone)
        assert delays.get(each).version == 0


def test_touch_many_by_keys_moves_tasks_later_and_returns_keys_without_a_task(
    store: Store, delays: DelayTasks
) -> None:
    waits, runs, ends = (schedule(delays, key=key) for key in ("waits", "runs", "ends"))
    other = delays.schedule_delay("other", {}, 5, key="elsewhere")
    set_status(store, runs, Status.RUNNING)
    delays.cancel(ends)
    result = delays.touch(tag="lost", key=["never", "waits", "runs", "ends", "elsewhere"], delay=60)
    assert not result
    assert result.touched == ["waits"]
    assert result.gone == ["never", "runs", "ends", "elsewhere"], "in the order given"
    assert lateness(delays, waits) > 50
    assert delays.touch(tag="lost", key="runs", delay=60) == TouchResult([], ["runs"])
    assert delays.touch(runs, 60) == TouchResult([], [runs.id])
    assert not delays.touch(ends, 60)
    assert delays.touch(waits, 60) == TouchResult([waits.id], [])
    assert lateness(delays, runs) == lateness(delays, ends) == lateness(delays, other) == 0


def test_keys_that_moved_after_the_transaction_began_name_the_tasks_that_now_have_them(
    delays: DelayTasks, database_url: str
) -> None:
    if not database_url.startswith(("mysql", "postgresql")):
        pytest.skip(
            "a transaction on SQLite that has read cannot write once another one has written"
        )
    engine = create_engine(database_url)
    before, keys = schedule(delays, key="moved"), ["moved", "new"]
    with Session(engine) as session:
        session.execute(text("SELECT count(*) FROM s_yb_delay_task_message"))
        delays.cancel(before)
        tasks = [schedule(delays, key=key) for key in keys]
        assert delays.touch(tag="lost", key=keys, delay=60, session=session).gone == []
        assert delays.touch(tag="lost", key="moved", delay=60, session=session)
        session.commit()
    assert all(lateness(delays, task) > 50 for task in tasks)
    engine.dispose()


def test_one_loop_of_touch_many_and_schedule_many_schedules_missing_tasks_again(
    delays: DelayTasks,
) -> None:
    """The heartbeat recipe needs no list of scheduled tasks."""
    alive = [f"device {n}" for n in range(5)]
    for _ in range(2):
        gone = delays.touch(tag="lost", key=alive, delay=60).gone
        delays.schedule_many(
            (NewTask("lost", {}, 60, key=key) for key in gone), on_conflict="replace"
        )
        delays.cancel(tag="lost", key="device 3")
    assert gone == ["device 3"]
    assert len(delays.find(status="NOT_COMPLETE")) == 4


def test_touching_never_makes_a_task_earlier(delays: DelayTasks) -> None:
    far, near, single = schedule(delays, 100), schedule(delays, 5), schedule(delays, 100, key="k")
    assert delays.touch([far, near], 50).gone == []
    assert lateness(delays, far) == 0
    assert 40 < lateness(delays, near) < 50
    assert delays.touch(single, 50)
    assert delays.touch(tag="lost", key="k", delay=50)
    assert lateness(delays, single) == 0


def test_touch_many_accepts_ids_of_every_form_from_any_iterable(delays: DelayTasks) -> None:
    a, b, c = (schedule(delays) for _ in range(3))
    assert delays.touch(iter([a, str(b.id), c.id, c.id, 77, "77"]), timedelta(minutes=1)).gone == [
        77
    ]
    assert min(lateness(delays, task) for task in (a, b, c)) > 50
    assert delays.touch([], 60).gone == []
    assert delays.touch(tag="lost", key=(), delay=60).gone == []


def test_touching_sends_no_messages(delays: DelayTasks, timer: RecordingTimer) -> None:
    tasks = [schedule(delays, key=f"k{n}") for n in range(3)]
    armed = len(timer.armed)
    delays.touch(tasks[0], 10)
    delays.touch(tag="lost", key="k1", delay=10)
    delays.touch(tasks, 12)
    delays.touch(tag="lost", key=["k0", "k1"], delay=15)
    assert (len(timer.armed), timer.disarmed) == (armed, [])


# -- effects --------------------------------------------------------------------------------------


def test_a_heartbeat_is_one_statement(delays: DelayTasks) -> None:
    task = schedule(delays, key="k")
    seen: list[str] = []
    event.listen(
        runtime_of(delays).store.database.auto,
        "before_cursor_execute",
        lambda *given: seen.append(given[2]),
    )
    assert delays.touch(tag="lost", key="k", delay=60)
    assert delays.touch(task, 70)
    assert len(seen) == 2, seen


def test_touch_many_executes_a_few_statements_for_each_batch(
    delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touches, "TOUCH_BATCH_ROWS", 30)
    keys = [f"k{n}" for n in range(80)]
    delays.schedule_many([NewTask("lost", {}, 5, key=key) for key in keys])
    seen: list[str] = []
    for engine in (runtime_of(delays).store.database.auto, runtime_of(delays).store.database.tx):
        event.listen(engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    assert delays.touch(tag="lost", key=keys, delay=60).gone == []
    named = [statement for statement in seen if "yb_delay" in statement]
    assert len(named) == 3 * 3, "keys, lock, update, for each of three lots"
    assert all(
        task.expected_time > runtime_of(delays).clock.now() + timedelta(seconds=50)
        for task in delays.find()
    )


def test_touch_many_waits_for_a_locked_row_after_it_has_touched_the_others(
    store: Store, delays: DelayTasks, owner: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_row_locks(store):
        return
    monkeypatch.setattr(touches, "TOUCH_BATCH_ROWS", 2)
    tasks = [schedule(delays) for _ in range(5)]
    store.tasks.reschedule(tasks[0].id, tasks[0].expected_time, on=owner)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(delays.touch, tasks, 60)
        for task in tasks[1:]:
            wait_until(lambda task=task: lateness(delays, task) > 50, 3, "the others")  # type: ignore[misc]
        assert not call.done()
        owner.commit()
        assert call.result(5).gone == []
    assert lateness(delays, tasks[0]) > 50


def test_touch_many_reports_a_row_that_a_worker_claims_meanwhile(
    store: Store, delays: DelayTasks, owner: Connection
) -> None:
    if not has_row_locks(store):
        return
    waits, claimed = schedule(delays), schedule(delays)
    t = store.schema.tasks
    owner.execute(update(t).where(t.c.id == claimed.id).values(**RUNNING))
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(delays.touch, [waits, claimed], 60)
        wait_until(lambda: lateness(delays, waits) > 50, 3, "the other")
        owner.commit()
        assert call.result(5).gone == [claimed.id]
    assert lateness(delays, claimed) == 0


@pytest.mark.slow
def test_touch_many_fails_for_a_row_that_stays_locked_and_touches_the_others(
    store: Store, delays: DelayTasks, owner: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_row_locks(store):
        return
    tasks = [schedule(delays) for _ in range(2)]
    store.tasks.reschedule(tasks[0].id, tasks[0].expected_time, on=owner)
    with pytest.raises(StoreUnavailableError, match="busy"):
        delays.touch(tasks, 60)
    assert [lateness(delays, task) > 50 for task in tasks] == [False, True]


def test_callers_that_touch_the_same_rows_in_different_orders_do_not_deadlock(
    delays: DelayTasks,
) -> None:
    """A deadlock in a caller's transaction raises an error, so this test would fail."""
    tasks = [schedule(delays, key=f"k{n}") for n in range(40)]

    def touch(number: int) -> int:
        turned = tasks[::-1] if number % 2 else tasks[number:] + tasks[:number]
        with runtime_of(delays).store.database.begin() as connection:
            if number % 3:
                return len(delays.touch(turned, 10 + number, session=connection).gone)
            keys = [str(task.key) for task in turned]
            delay = 10 + number
            return len(delays.touch(tag="lost", key=keys, delay=delay, session=connection).gone)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(touch, range(24))) == 0
