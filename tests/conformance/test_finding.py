"""Find and count tasks, on every database."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select, text

from delaytasks import DelayedTask, DelayTasks, Status, StoreError
from delaytasks.operate.searches import limited_search
from tests.conformance.bulk_tasks import NOON
from tests.refusals import invalid
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
        "second": delays.schedule_delay("a", 2, at=NOON + SECOND, queue="slow", key="us-1"),
        "first": delays.schedule_delay("a", 1, at=NOON, key="eu-1"),
        "failed": delays.schedule_delay("b", 3, at=NOON + 2 * SECOND, priority=3),
        "cancelled": delays.schedule_delay("b", 4, at=NOON + 3 * SECOND, queue="slow"),
    }
    world.change(tasks["failed"], status=int(Status.FAILED), create_time=NOON)
    world.change(tasks["cancelled"], status=int(Status.CANCELLED))
    world.change(tasks["done"], status=int(Status.DONE), update_time=NOON)
    return tasks


FILTERS: list[Any] = [({"key": "us-1"}, "second")]
FILTERS += [({"status": ["FAILED", Status.CANCELLED]}, "failed cancelled")]
FILTERS += [({"status": ("FAILED", "NOT_COMPLETE")}, "first second failed")]
FILTERS += [({"status": {"DONE", "FAILED"}, "tag": "b"}, "failed done")]
FILTERS += [({"updated_until": NOON + SECOND, "since": NOON + 4 * SECOND}, "done")]


@pytest.mark.parametrize(("filters", "wanted"), FILTERS)
def test_find_has_the_filters_of_the_bulk_functions_and_takes_several_statuses(
    delays: DelayTasks, tasks: dict[str, DelayedTask], filters: Any, wanted: str
) -> None:
    ids = [tasks[name].id for name in wanted.split()]
    for limit in (1, 2, 100):
        assert all_pages(delays, limit=limit, **filters) == ids
        assert all_pages(delays, limit=limit, newest_first=True, **filters) == ids[::-1]


def test_find_reads_tasks_with_some_ids_by_due_time(delays: DelayTasks, tasks: Any) -> None:
    done, second, first = (tasks[name].id for name in ("done", "second", "first"))
    find = partial(all_pages, delays)
    assert find(ids=[done, str(first), done, 999]) == [first, done]
    assert find(ids={done, first}, newest_first=True) == [done, first]
    assert find(ids=second) == find(ids=str(second)) == [second]
    assert find(ids=(first, second, done), status=["DONE", "FAILED"]) == [done]
    assert find(ids=(first, second), tag="a", queue="slow") == [second]
    assert find(ids=[done, first, second], limit=2) == [first, second, done]
    assert find(ids=[*range(1, 1000), first]) == [first]


def test_bulk_functions_take_ids_keys_and_several_statuses(delays: DelayTasks, tasks: Any) -> None:
    first, second, failed, done = (tasks[n].id for n in ("first", "second", "failed", "done"))
    assert delays.bulk.cancel(ids=[first, done], dry_run=True).matched == 1
    both = delays.bulk.rerun(status=["FAILED", "CANCELLED"], tag="b", dry_run=True)
    assert both.matched == 2
    assert delays.bulk.reschedule(at=NOON + 9 * SECOND, ids=[first, second, done]).changed == 2
    assert delays.get(second).due == NOON + 9 * SECOND
    cancelled = delays.bulk.cancel(ids=[str(first)])
    assert (cancelled.matched, cancelled.changed) == (1, 1)
    assert delays.bulk.log(limit=1)[0].filter == {"ids": [str(first)]}
    assert delays.get(second).status is Status.NOT_COMPLETE
    assert delays.bulk.rerun("1h", ids=[first, failed, done]).changed == 1
    assert delays.bulk.rerun("1h", ids=[first], status="CANCELLED").changed == 1
    assert delays.bulk.cancel(key="eu-1").changed == 1
    assert delays.bulk.cancel(ids=[first, second], queue="slow").changed == 1
    with invalid("status", match="not DONE"):
        delays.bulk.rerun(status=["FAILED", "DONE"])


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


# A follower finds the changes of tasks in each database, at a bounded cost


def seen(follower: Any) -> list[tuple[int, str]]:
    return [(task.id, task.status.name) for task in follower.read().tasks]


def test_each_change_is_shown_once(world: World) -> None:
    backlog = world.put(due_s=-3600, update_time=world.now() - timedelta(hours=1))
    follower = world.follow()
    task = world.schedule(body={"secret": 1})
    [found] = follower.read().tasks
    assert (found.id, found.status.name) == (task.id, "NOT_COMPLETE")
    assert found.body_json == "", "bodies are not read"
    assert seen(follower) == []
    world.claim(task)
    assert seen(follower) == [(task.id, "RUNNING")]
    later = world.schedule(delay=3600)
    assert seen(follower) == [(later.id, "NOT_COMPLETE")]
    world.cancel(later)
    assert seen(follower) == [(later.id, "CANCELLED")]
    # The follower has not seen it yet, and it was due long ago, so only its status leads to it.
    [claimed] = world.claim(backlog)
    assert seen(follower) == [(backlog.id, "RUNNING")]
    world.change(backlog, status=1, version=claimed.version + 1)
    assert seen(follower) == [(backlog.id, "DONE")], "it was seen before"


def test_filters_apply_to_the_changes(world: World, delays: DelayTasks) -> None:
    by_tag, by_key = world.follow(tag="a"), world.follow(key="k")
    by_meta, by_status = world.follow(meta={"tenant": "acme"}), world.follow(status="CANCELLED")
    one = delays.schedule_delay("a", {}, 60)
    two = delays.schedule_delay("b", {}, 60, key="k", meta={"tenant": "acme"})
    assert seen(by_tag) == [(one.id, "NOT_COMPLETE")]
    assert seen(by_key) == seen(by_meta) == [(two.id, "NOT_COMPLETE")]
    assert seen(by_status) == []
    delays.cancel(two)
    assert seen(by_status) == seen(by_key) == [(two.id, "CANCELLED")]


def test_a_read_has_few_statements_and_each_is_bounded(world: World) -> None:
    follower = world.follow()
    world.delays.schedule_many(("note", {}, 60) for _ in range(30))
    world.lower(changes_of_a_read=20)
    with world.statements() as statements:
        step = follower.read()
    assert step.is_incomplete
    assert len(step.tasks) == 20
    assert len(statements) == 5, "the time, three parts, and the rows"
    assert sum("LIMIT" in statement for statement in statements) == 3


# The cost of a search by status grows with the queues that it may read, and not faster


def test_a_page_is_read_with_equally_short_statements(world: World) -> None:
    ids = [world.put(queue=f"q{n}", status=Status.FAILED).id for n in range(8)]
    for newest_first in (False, True):
        with world.statements() as statements:
            page = world.delays.find(status="FAILED", limit=1, newest_first=newest_first)
        assert page.tasks[0].id in ids
        reads = [each for each in statements if "task_key" in each]
        assert len(reads) == 8
        assert len({len(each) for each in reads[2:]}) == 1, "each has one bound of due times"


def test_other_queues_than_that_of_the_filter_are_not_visited(world: World) -> None:
    tasks = [world.put(queue=f"q{n}", status=Status.FAILED) for n in range(30)]
    with world.statements() as statements:
        assert [task.id for task in world.delays.find(status="FAILED", queue="q7")] == [tasks[7].id]
        assert world.delays.bulk.rerun(queue="q7", dry_run=True).matched == 1
    assert len(statements) < 20
