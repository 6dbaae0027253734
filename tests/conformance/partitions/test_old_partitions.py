"""Old partitions are dropped, and their unfinished tasks are moved."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import event, insert, select

from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import LIVE, Status
from delaytasks.partitions import pruning
from delaytasks.partitions.pruning import Pruned
from delaytasks.partitions.table import Partitions
from tests.conformance.partitions.converted_table import DAY, PREFIX, TASKS, WEEK, ConvertedTable
from tests.conformance.store_rows import entry, read, seconds
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def test_an_old_partition_is_dropped_with_its_finished_tasks(field: ConvertedTable) -> None:
    for status in (Status.DONE, Status.FAILED, Status.CANCELLED):
        field.put(10 * WEEK, status)
        field.put(6 * WEEK, status)
    young = field.put(3 * WEEK)
    before = field.names()
    dropped = field.drop()
    assert [each.moved for each in dropped] == [0] * len(dropped)
    assert field.names() == [
        name for name in before if TASKS + name not in {each.name for each in dropped}
    ]
    assert list(field.rows()) == [young.id]
    assert {
        part.until is None or part.until >= field.now - 4 * WEEK for part in field.partitions.all()
    } == {True}
    assert field.drop() == []


@pytest.mark.parametrize("status", [*LIVE, Status.of(9)], ids=str)
def test_unfinished_tasks_of_an_old_partition_are_moved_unchanged(
    field: ConvertedTable, status: Status
) -> None:
    """The move copies the whole row, including columns that another program added to the table."""
    for more in ("note text", "twice bigint GENERATED ALWAYS AS (version * 2) STORED"):
        field.run(f"ALTER TABLE {TASKS} ADD COLUMN {more}")
    field.put(6 * WEEK)
    lease = {
        "lease_until": seconds(field.now, 60),
        "worker": "w-1",
        "ip_address": 7,
        "attempts": 3,
        "lapses": 2,
    }
    rest = {
        "headers": "{}",
        "error_stack": "e",
        "execution_time": field.now,
        "queue": "q",
        "priority": 4,
        "version": 41,
    }
    one = field.put(6 * WEEK, status, task_key="k", **lease, **rest)
    field.run(f"UPDATE {TASKS} SET note = 'mine'")
    before = field.rows()[one.id]
    dropped = field.drop()
    assert sum(each.moved or 0 for each in dropped) == 1
    assert field.rows() == {one.id: ("_default", before[1])}


def test_a_recently_finished_task_stays_as_long_as_a_purge_would_keep_it(
    field: ConvertedTable,
) -> None:
    long_ago = field.put(6 * WEEK, Status.FAILED, ended=5 * WEEK)
    lately = field.put(6 * WEEK, Status.FAILED, ended=2 * WEEK)
    late = field.put(6 * WEEK, Status.DONE, update_time=field.now - DAY)
    # The task was cancelled early, so its age counts from its due time.
    due = field.put(6 * WEEK, Status.CANCELLED, expected_time=field.now - DAY)
    field.drop()
    assert list(field.rows()) == sorted([lately.id, late.id, due.id])
    assert field.store.tasks.get(long_ago.id) is None
    assert field.store.sweeps.purge(4 * 7 * 86400, 100) == 0


def test_a_partition_with_too_many_unfinished_tasks_is_kept(
    field: ConvertedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "MAX_MOVED", 2)
    for _ in range(3):
        field.put(6 * WEEK, Status.NOT_COMPLETE)
    before = field.rows()
    kept = [each for each in field.drop() if each.moved is None]
    assert len(kept) == 1
    assert field.rows() == before
    monkeypatch.setattr(pruning, "MAX_MOVED", 3)
    assert field.drop() == [Pruned(kept[0].name, 3)]


def test_old_partitions_can_be_detached_as_tables_of_finished_tasks(field: ConvertedTable) -> None:
    done, waits = field.put(6 * WEEK), field.put(6 * WEEK, Status.NOT_COMPLETE)
    [name] = [each.name for each in field.drop(detaches_only=True) if each.moved]
    assert field.places() == ["_default"]
    assert field.run(f"SELECT id FROM {name}") == [(done.id,)]
    assert read(field.store, waits.id).status is Status.NOT_COMPLETE


def test_keys_and_attempts_of_dropped_tasks_are_deleted_and_those_of_waiting_tasks_stay(
    field: ConvertedTable,
) -> None:
    finished, waits = (
        field.put(6 * WEEK, task_key="f"),
        field.put(6 * WEEK, Status.NOT_COMPLETE, task_key="w"),
    )
    young = field.put(DAY, task_key="y")
    k = field.store.schema.keys
    with field.store.database.begin() as connection:
        # Another program left the first three rows. The others are the mark of a table that
        # existed before the upgrade, and a pointer to a task in another database.
        pairs = [
            ("mail", "f", finished.id),
            ("mail", "w", waits.id),
            ("mail", "y", young.id),
            ("", "mark", 0),
        ]
        pairs += [("mail", "p", finished.id + 2**17)]
        connection.execute(
            insert(k),
            [dict(zip(("tag", "task_key", "task_id"), pair, strict=True)) for pair in pairs],
        )
        made = [
            {"task_id": one.id, "version": 1, "attempt": 1, "ended": field.now}
            for one in (finished, waits, young)
        ]
        connection.execute(insert(field.store.schema.attempts), made)
    field.drop()
    with field.store.database.begin() as connection:
        assert sorted(connection.execute(select(k.c.task_key)).scalars()) == ["mark", "p", "w", "y"]
        left = connection.execute(select(field.store.schema.attempts.c.task_id)).scalars()
        assert sorted(left) == sorted([waits.id, young.id])


def test_the_unfinished_tasks_to_move_are_found_by_an_index(field: ConvertedTable) -> None:
    field.fill(5000, field.now - 6 * WEEK, Status.DONE)
    field.put(6 * WEEK, Status.NOT_COMPLETE)
    shown: list[str] = []

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("INSERT INTO"):
            shown.append(
                "".join(connection.exec_driver_sql("EXPLAIN " + statement, parameters).scalars())
            )

    event.listen(field.store.database.tx, "before_cursor_execute", explain)
    field.drop()
    event.remove(field.store.database.tx, "before_cursor_execute", explain)
    assert shown
    assert all("_stays" in plan and "Seq Scan" not in plan for plan in shown)
    assert field.places() == ["_default"]


# -- concurrent changes --------------------------------------------------------------------------


def test_a_task_that_runs_meanwhile_settles(field: ConvertedTable) -> None:
    field.put(6 * WEEK, Status.NOT_COMPLETE, task_key="k")
    claims = field.store.claims("w-1", None)
    [claimed] = claims.claim_due("default", [0], 10)
    settling: list[Future[set[int]]] = []

    def settle() -> None:
        settling.append(pool.submit(claims.settle, [Settlement(claimed, "succeed")]))
        wait_until(lambda: _waits_for_a_lock(field), 10, "the settlement to wait")

    with ThreadPoolExecutor() as pool, field.upon("DETACH", claimed, settle):
        dropped = field.drop()
    assert settling[0].result() == {claimed.id}
    assert sum(each.moved or 0 for each in dropped) == 1
    found = read(field.store, claimed.id)
    assert (found.status, found.version) == (Status.DONE, claimed.version + 1)
    assert field.places() == ["_default"]


def _waits_for_a_lock(field: ConvertedTable) -> bool:
    return bool(
        field.run(f"SELECT 1 FROM pg_locks WHERE NOT granted AND relation = to_regclass('{TASKS}')")
    )


def test_a_task_that_is_settled_or_retried_between_looking_and_moving_is_seen(
    field: ConvertedTable,
) -> None:
    failed, running = field.put(6 * WEEK, Status.FAILED), field.put(6 * WEEK, Status.RUNNING)
    again = field.put(6 * WEEK, Status.FAILED)
    claims = field.store.claims("w-1", None)

    def work() -> None:
        field.store.tasks.rerun(failed.id, field.now)
        assert claims.settle([Settlement(running, "succeed")]) == {running.id}
        retried = field.store.tasks.rerun(again.id, field.now - DAY)
        [claimed] = claims.claim([entry(retried)])
        assert claims.settle([Settlement(claimed, "fail", error="again")]) == {again.id}

    with field.upon("CREATE INDEX CONCURRENTLY", failed, work):
        field.drop()
    assert {read(field.store, one.id).status for one in (failed,)} == {Status.NOT_COMPLETE}
    assert read(field.store, running.id).status is Status.DONE
    assert read(field.store, again.id).error == "again"


def test_a_task_that_is_retried_meanwhile_keeps_its_key(field: ConvertedTable) -> None:
    failed = field.put(6 * WEEK, Status.FAILED, task_key="k")
    k = field.store.schema.keys
    with field.store.database.begin() as connection:
        # Another program failed the task and left its key.
        connection.execute(insert(k).values(tag="mail", task_key="k", task_id=failed.id))
    with field.upon(
        f"FROM {k.name} JOIN", failed, lambda: field.store.tasks.rerun(failed.id, field.now)
    ):
        field.drop()
    assert read(field.store, failed.id).status is Status.NOT_COMPLETE
    assert field.store.tasks.id_of_key("mail", "k") == failed.id


def test_a_partition_that_another_process_has_just_dropped_is_no_error(
    field: ConvertedTable,
) -> None:
    waits = field.put(6 * WEEK, Status.NOT_COMPLETE)

    with field.upon("CREATE INDEX CONCURRENTLY", waits, lambda: _drop_all(field)):
        field.drop()
    assert list(field.rows()) == [waits.id]


def _drop_all(field: ConvertedTable) -> None:
    assert list(pruning.prune(Partitions(field.store.database, PREFIX), 4 * WEEK))
