"""Find and count tasks, on every database."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select, text

from delaytasks import DelayedTask, DelayTasks, Status, StoreError
from delaytasks.operate.task_calls import limited_search
from tests.conformance.bulk_tasks import NOON
from tests.world import World

# Look up and count rows, and read the clock, on every database


@pytest.mark.parametrize("newest_first", [False, True])
def test_pages_show_each_resting_row_once_while_others_move(
    world: World, newest_first: bool
) -> None:
    now, second = world.now() + timedelta(seconds=1000), timedelta(seconds=1)
    # Many rows have the same due time, so the cursor must compare ids and times.
    resting = {world.put(expected_time=now + n // 4 * second).id for n in range(20)}
    moving = [world.put(expected_time=now + n * second) for n in range(5)]
    seen: list[int] = []
    cursor = None
    for step in range(25):
        page = world.delays.find(limit=3, cursor=cursor, newest_first=newest_first)
        seen += [one.id for one in page]
        cursor = page.cursor
        if cursor is None:
            break
        if step < 5:
            world.delays.reschedule(moving[step], at=now + (-1 if step % 2 else 500) * second)
    assert cursor is world.delays.find(limit=25).cursor is None, "no page follows the last task"
    assert Counter(id for id in seen if id in resting) == Counter(resting)


def test_the_databases_clock_moves_within_a_transaction(world: World) -> None:
    with world.begin() as connection:
        connection.execute(select(1)).first()
        before = world.now()
        if world.can.server_side_cursors:
            added = world.schedule(session=connection)
            assert added.create_time is not None
            assert added.create_time >= before
    assert world.now() >= before


# `find` and the bulk functions have the same filters, on each database


SECOND = timedelta(seconds=1)


def all_pages(delays: DelayTasks, **options: Any) -> list[int]:
    """Return the ids of the tasks of all pages."""
    page = delays.find(**options)
    found = [task.id for task in page]
    while page.cursor is not None:
        page = delays.find(cursor=page.cursor, **options)
        found += [task.id for task in page]
    return found


@pytest.fixture
def tasks(world: World, delays: DelayTasks) -> dict[str, DelayedTask]:
    """Return one task for each way in which tasks differ."""
    tasks = {
        # The order of ids is not that of due times.
        "done": delays.schedule_delay("b", 5, at=NOON + 4 * SECOND),
        "second": delays.schedule_delay("a", 2, at=NOON + SECOND, queue="slow", key="x%_1"),
        "first": delays.schedule_delay("a", 1, at=NOON, key="xxx1"),
        "failed": delays.schedule_delay("b", 3, at=NOON + 2 * SECOND, priority=3),
        "cancelled": delays.schedule_delay("b", 4, at=NOON + 3 * SECOND, queue="slow"),
    }
    world.change(tasks["failed"], status=int(Status.FAILED), create_time=NOON)
    world.change(tasks["cancelled"], status=int(Status.CANCELLED))
    world.change(tasks["done"], status=int(Status.DONE), update_time=NOON)
    return tasks


#: The filters, and the names of the tasks that they find.
FILTERS: list[tuple[dict[str, Any], str]] = [
    ({"key": "x%_1"}, "second"),
    ({"key_prefix": "x%_"}, "second"),
    ({"tag": "a", "queue": "default"}, "first"),
    ({"since": NOON + SECOND, "until": NOON + 3 * SECOND}, "second failed"),
    ({"created_since": NOON}, "failed"),
    ({"created_until": NOON, "tag": "a"}, "first second"),
    ({"updated_until": NOON + SECOND, "since": NOON + 4 * SECOND}, "done"),
    ({"status": ["FAILED", Status.CANCELLED]}, "failed cancelled"),
    ({"status": ("FAILED", "NOT_COMPLETE")}, "first second failed"),
    ({"status": {"DONE", "FAILED"}, "tag": "b"}, "failed done"),
]


def test_find_and_the_bulk_functions_have_the_same_filters(
    delays: DelayTasks, tasks: dict[str, DelayedTask]
) -> None:
    for filters, wanted in FILTERS:
        ids = [tasks[name].id for name in wanted.split()]
        for limit in (1, 2, 100):
            assert all_pages(delays, limit=limit, **filters) == ids
            assert all_pages(delays, limit=limit, newest_first=True, **filters) == ids[::-1]
        if "status" not in filters:
            waiting = {"first", "second"} & {*wanted.split()}
            assert delays.bulk.cancel(**filters, dry_run=True).matched == len(waiting)
    assert delays.bulk.cancel(everything=True).changed == 2


def test_tasks_are_found_by_their_ids_and_several_statuses(delays: DelayTasks, tasks: Any) -> None:
    done, second, first = (tasks[name].id for name in ("done", "second", "first"))
    find = partial(all_pages, delays)
    assert find(ids=[done, str(first), done, 999]) == [first, done]
    assert find(ids={done, first}, newest_first=True) == [done, first]
    assert find(ids=second) == find(ids=str(second)) == [second]
    assert find(ids=(first, second, done), status=["DONE", "FAILED"]) == [done]
    assert find(ids=(first, second), tag="a", queue="slow") == [second]
    assert find(ids=[done, first, second], limit=2) == [first, second, done]
    assert find(ids=[*range(1, 1000), first]) == [first]
    assert delays.bulk.rerun(status=["FAILED", "CANCELLED"], tag="b", dry_run=True).matched == 2
    assert delays.bulk.cancel(ids=[str(first)]).changed == 1
    assert delays.bulk.log(limit=1)[0].filter == {"ids": [str(first)]}
    assert delays.bulk.rerun("1h", ids=[first], status="CANCELLED").changed == 1


# A search ends at its time limit, on every database


COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n WHERE i<{}) SELECT {} FROM n"
#: Statements that take minutes.
ENDLESS = {"postgresql": "SELECT pg_sleep(300)", "mysql": "SELECT SLEEP(300)"}
ENDLESS["sqlite"] = COUNT.format(10**12, "count(*)")
#: The limit that a connection has. SQLite interrupts a statement that takes some time.
LIMIT = {
    "postgresql": "SELECT setting FROM pg_settings WHERE name = 'statement_timeout'",
    "mysql": "SELECT @@max_statement_time",
    "sqlite": COUNT.format(10**5, "0 * count(*)"),
}


def test_a_search_ends_at_its_limit_and_the_connections_keep_none(world: World) -> None:
    def ask_again_and_again(connection: Any) -> None:
        while True:
            connection.execute(text("SELECT 1"))

    endless, limit = text(ENDLESS[world.kind]), text(LIMIT[world.kind])
    for work in (lambda connection: connection.execute(endless), ask_again_and_again):
        with pytest.raises(StoreError, match="narrow its filter"):
            limited_search(world.store.database, work, 0.2)
    with world.begin() as connection:
        assert float(connection.execute(limit).scalar_one()) == 0
    assert float(world.rows(limit)[0][0]) == 0
