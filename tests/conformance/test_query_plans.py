"""The plans of the statements: none scans the table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import event, insert, update

from delaytasks import DelayedTask, Status
from delaytasks.core.filters import LogEntry, bulk_filter_of, filter_of
from delaytasks.core.interfaces import Level, Settlement
from delaytasks.recurrence.creation import Creation, RecurringTable
from delaytasks.runtime import runtime_of
from delaytasks.storage import bulk_moves as store_bulk
from delaytasks.storage.state_queries import ChangeReader, LiveRows, Stats, live_tags
from delaytasks.storage.store import Store
from delaytasks.storage.sweep_queries import OverdueRows
from tests.conformance.query_plans import assert_no_scan, plans
from tests.conformance.store_rows import entry, read, seconds, task
from tests.conftest import open_store
from tests.recording import counted, delays_on
from tests.world.broker import RecordingTimer

pytestmark = pytest.mark.slow


# The plans of the statements: none scans the table


@pytest.fixture(scope="module")
def unanalysed(database_url: str) -> Iterator[Store]:
    """Yield many finished rows and some waiting rows that the statistics do not include."""
    # Not the tables of `analysed`, whose statistics these tests would then read.
    store = open_store(database_url, table_prefix="new_plan_")
    now = store.tasks.now()
    rows = [
        task(store, expected_time=seconds(now, n - 9000), priority=n % 2) for n in range(10_000)
    ]
    t = store.schema.tasks
    if store.database.url.get_backend_name() == "postgresql":
        with store.database.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {t.name} SET (autovacuum_enabled = off)")
    store.tasks.insert_many(rows)
    with store.database.begin() as connection:
        connection.execute(
            update(t).where(t.c.expected_time < seconds(now, -100)).values(status=int(Status.DONE))
        )
    yield store
    store.schema.metadata.drop_all(store.database.tx)
    store.close()


@pytest.fixture(scope="module")
def analysed(database_url: str) -> Iterator[Store]:
    """Yield many finished and many waiting rows with statistics.

    The statistics do not relate columns: here all finished rows are in the past, and nearly all
    waiting rows are not.
    """
    store = open_store(database_url, table_prefix="plan_")
    now = store.tasks.now()
    store.tasks.insert_many(
        [task(store, expected_time=seconds(now, n - 10_000)) for n in range(30_000)]
    )
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(
            update(t).where(t.c.expected_time < seconds(now, -100)).values(status=int(Status.DONE))
        )
    with store.database.auto.connect() as connection:
        words = "ANALYZE TABLE" if store.database.url.get_backend_name() == "mysql" else "ANALYZE"
        connection.exec_driver_sql(f"{words} {t.name}")
    yield store
    store.schema.metadata.drop_all(store.database.tx)
    store.close()


@pytest.mark.parametrize("versions", [1, 3], ids=["one_version", "several"])
def test_a_claim_by_id_uses_the_primary_key_on_empty_statistics(
    unanalysed: Store, versions: int
) -> None:
    store, claims = unanalysed, unanalysed.claims("w", None)
    found = store.tasks.find(filter_of({"status": Status.NOT_COMPLETE}), 20).tasks
    some = [replace(one, version=n % versions) for n, one in enumerate(found)]
    shown = plans(store, lambda: claims.claim([entry(one) for one in some]))
    shown += plans(store, lambda: claims.settle([Settlement(one, "succeed") for one in some]))
    assert re.search(r"plan_yb_delay_task_message_pkey|INTEGER PRIMARY KEY|using PRIMARY", shown), (
        shown
    )
    assert "plan_idx" not in shown, shown
    assert_no_scan(shown)


def plans_of_changes(store: Store, **filters: str) -> str:
    changes = ChangeReader(store.database, store.schema, filter_of(filters))
    now = changes.now()
    return plans(store, lambda: changes.read(seconds(now, -10), now, []))


def test_a_read_of_changes_scans_no_table(analysed: Store) -> None:
    shown = plans_of_changes(analysed) + plans_of_changes(analysed, tag="note")
    assert_no_scan(shown + plans_of_changes(analysed, key="k"))


def test_a_read_of_what_happens_now_scans_no_table(analysed: Store) -> None:
    assert_no_scan(plans(analysed, lambda: LiveRows(analysed.database, analysed.schema).read(1)))


def test_a_count_of_the_unfinished_tasks_of_each_tag_scans_no_table(analysed: Store) -> None:
    database, schema = analysed.database, analysed.schema
    assert_no_scan(plans(analysed, lambda: database.autocommitted(lambda c: live_tags(c, schema))))


def test_a_count_of_overdue_tasks_scans_no_table(analysed: Store) -> None:
    overdue = OverdueRows(analysed.database, analysed.schema)
    assert_no_scan(plans(analysed, lambda: overdue.count(1)))


def test_a_search_for_queues_that_no_worker_serves_scans_no_table(analysed: Store) -> None:
    overdue = OverdueRows(analysed.database, analysed.schema)
    assert_no_scan(plans(analysed, lambda: overdue.other_queues({"served"}, 1)))


def test_rows_of_a_chunk_are_found_by_id_if_statistics_have_no_live_rows(database_url: str) -> None:
    """Without a kept plan, as with some poolers, the index of all waiting and running rows looks
    cheap."""
    store = open_store(database_url, table_prefix="stale_")
    backend, table = store.database.url.get_backend_name(), store.schema.tasks.name
    now, claimed = store.tasks.now(), list[DelayedTask]()
    rows = [task(store, expected_time=seconds(now, n - 9000)) for n in range(4000)]
    with store.database.auto.connect() as connection:
        if backend == "postgresql":
            connection.exec_driver_sql(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        store.tasks.insert_many([replace(row, status=Status.DONE) for row in rows[:2000]])
        connection.exec_driver_sql(
            f"{'ANALYZE TABLE' if backend == 'mysql' else 'ANALYZE'} {table}"
        )
    store.tasks.insert_many(rows[2000:])
    with mock.patch.object(store.database, "can", replace(store.database.can, prepare=False)):
        claims = store.claims("w", None)
        shown = plans(
            store, lambda: claimed.extend(claims.claim([entry(one) for one in rows[2000:2200]]))
        )
        shown += plans(
            store, lambda: claims.settle([Settlement(one, "succeed", now) for one in claimed])
        )
    store.schema.metadata.drop_all(store.database.tx)
    store.close()
    assert len(claimed) == 200
    assert re.search(r"_pkey|INTEGER PRIMARY KEY|using PRIMARY", shown), shown
    assert "idx_" not in shown, shown


def test_touching_finds_rows_and_keys_by_index_on_empty_statistics(unanalysed: Store) -> None:
    store, later = unanalysed, seconds(unanalysed.tasks.now(), 5000)
    waiting = store.tasks.find(filter_of({"status": Status.NOT_COMPLETE}), 1000).tasks
    ids = [one.id for one in waiting]
    keys = [f"k{n}" for n in range(10_000)]
    with store.database.begin() as connection:
        rows = [{"tag": "mail", "task_key": key, "task_id": ids[0]} for key in keys]
        connection.execute(insert(store.schema.keys), rows)
    for work in (
        lambda: store.touches.touch(ids[0], later),
        lambda: store.touches.touch_key("mail", "k1", later),
        lambda: store.touches.touch_many(ids, later),
        lambda: store.touches.ids_of_keys("mail", keys[:300]),
    ):
        shown = plans(store, work)
        assert "plan_idx" not in shown, shown
        assert_no_scan(shown)


def test_the_slow_path_uses_the_hot_index_on_empty_statistics(unanalysed: Store) -> None:
    store, claims = unanalysed, unanalysed.claims("w", None)
    for work in (
        lambda: store.sweeps.levels(1.0),
        lambda: claims.claim_due("default", [0, 1], 50),
        lambda: claims.claim_recovered("default"),
        lambda: store.sweeps.recover(5, 100),
    ):
        shown = plans(store, work)
        assert "plan_idx_yb_delay_hot" in shown, shown
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)


def test_the_slow_path_uses_the_hot_index_on_good_statistics(analysed: Store) -> None:
    store, claims = analysed, analysed.claims("w", None)
    for work in (
        lambda: store.sweeps.levels(1.0),
        lambda: store.sweeps.levels(1000.0),
        lambda: claims.claim_due("default", [0], 50),
        lambda: claims.claim_recovered("default", [0]),
        lambda: store.sweeps.recover(5, 100),
        lambda: store.leases.release(["w"], 5),
        lambda: store.leases.renew(["w"], store.tasks.now()),
        lambda: Stats(store.database, store.schema).expired_leases(),
    ):
        shown = plans(store, work)
        assert "plan_idx_yb_delay_hot" in shown, shown
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)


def test_neither_a_claim_nor_a_count_reads_the_rows_that_are_not_due(database_url: str) -> None:
    """PostgreSQL does not end a scan at the upper bound of a comparison of several columns."""
    store = open_store(database_url, table_prefix="far_plan_")
    if store.database.url.get_backend_name() != "postgresql":
        store.close()
        return  # the others do not say how many pages they read
    later, t = seconds(store.tasks.now(), 86_400), store.schema.tasks
    store.tasks.insert_many([task(store, expected_time=seconds(later, n)) for n in range(20_000)])
    try:
        with store.database.auto.connect() as connection:
            connection.exec_driver_sql(f"VACUUM ANALYZE {t.name}")
        for work in (
            lambda: store.claims("w", None).claim_due("default", [0], 500),
            lambda: OverdueRows(store.database, store.schema).count(1),
        ):
            shown = plans(store, work, "(ANALYZE, BUFFERS)")
            pages = [
                sum(map(int, re.findall(r"(?:hit|read)=(\d+)", line)))
                for line in shown.splitlines()
                if line.startswith("  Buffers")  # not those of the planner
            ]
            assert pages, shown
            assert max(pages) < 30, shown
    finally:
        store.schema.metadata.drop_all(store.database.tx)
        store.close()


def test_claims_lock_no_rows_of_other_queues_although_the_table_is_small(database_url: str) -> None:
    store = open_store(database_url, table_prefix="small_")
    if store.database.url.get_backend_name() == "postgresql":
        store.close()
        return  # its planner reads a small table as a whole, and locks only the rows that it wants
    past = seconds(store.tasks.now(), -10)
    rows = [task(store, queue=queue, expected_time=past) for queue in "aaabbaac"]
    store.tasks.insert_many(rows)
    claims, some = store.claims("w", None), [entry(row) for row in rows[:3]]
    try:
        for work, index in (
            (lambda: claims.claim_recovered("a", [0]), "idx_yb_delay_hot"),
            (lambda: store.leases.release(["w"], 5), "idx_yb_delay_hot"),
            (lambda: store.leases.renew(["w"], past), "idx_yb_delay_hot"),
            (lambda: claims.claim_due("a", [0], 50), "idx_yb_delay_hot"),
            (lambda: claims.claim(some), ""),
            (lambda: claims.claim([*some, some[0]._replace(version=5)]), ""),
        ):
            shown = plans(store, work)
            assert index in shown, shown
            assert not re.search("SCAN small_|ALL on small_|index on small_", shown), shown
    finally:
        store.schema.metadata.drop_all(store.database.tx)
        store.close()


def test_old_rows_are_found_by_their_time_on_good_statistics(analysed: Store) -> None:
    shown = plans(analysed, lambda: analysed.sweeps.purge(20_000, 100))
    assert "plan_idx_expectedTime_status" in shown, shown
    assert_no_scan(shown)


def test_few_rows_of_a_status_or_key_are_found_by_index_on_empty_statistics(
    unanalysed: Store,
) -> None:
    assert_finds_without_scan(unanalysed)


def test_few_rows_of_a_status_or_key_are_found_by_index_on_good_statistics(analysed: Store) -> None:
    assert_finds_without_scan(analysed)


def assert_finds_without_scan(store: Store) -> None:
    now = store.tasks.now()
    some = [task(store, expected_time=seconds(now, n - 5000), key=f"k{n}") for n in range(100)]
    t = store.schema.tasks
    with store.database.begin() as connection:
        # Other tests use the same table.
        connection.execute(t.delete().where(t.c.task_key.is_not(None)))
    store.tasks.insert_many(some)
    claims = store.claims("w", None)
    failed = claims.claim([entry(one) for one in some[:50]])
    claims.settle([Settlement(one, "fail", error="x") for one in failed])

    def find(status: Status | None, key: str | None, limit: int = 20) -> list[int]:
        return [
            one.id
            for one in store.tasks.find(filter_of({"status": status, "key": key}), limit).tasks
        ]

    assert find(Status.FAILED, None, 100) == [one.id for one in some[:50]]
    assert find(None, "k70") == find(Status.NOT_COMPLETE, "k70") == [some[70].id]
    for status in (
        Status.FAILED,
        Status.CANCELLED,
        Status.RUNNING,
        Status.HELD,
        Status.NOT_COMPLETE,
    ):
        shown = plans(store, lambda status=status: find(status, None))  # type: ignore[misc]
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)
    shown = plans(store, lambda: find(None, "k70"))
    assert "plan_idx_yb_delay_key" in shown, shown
    assert_no_scan(shown)
    with store.database.begin() as connection:
        connection.execute(t.delete().where(t.c.task_key.is_not(None)))


def test_counts_of_a_large_table_are_estimates_of_the_planner(analysed: Store) -> None:
    stats, exact = Stats(analysed.database, analysed.schema), counted(analysed)
    assert {status: count.rows for status, count in stats.counts().items()} == exact
    found = stats.counts(1000)
    if analysed.database.url.get_backend_name() == "sqlite":
        assert not any(count.is_estimate for count in found.values())
        return
    assert found[Status.DONE].is_estimate
    assert found[Status.NOT_COMPLETE].is_estimate
    for status in (Status.DONE, Status.NOT_COMPLETE):
        assert exact[status] / 2 < found[status].rows < exact[status] * 2
    for status in (Status.FAILED, Status.CANCELLED, Status.HELD, Status.RUNNING):
        assert found[status] == (exact[status], False)


def test_due_rows_are_found_without_reading_waiting_rows(unanalysed: Store) -> None:
    if unanalysed.database.url.get_backend_name() != "postgresql":
        return  # the clocks of the other databases can be used with an index
    claims = unanalysed.claims("w", None)
    for work in (
        lambda: claims.claim_due("default", [0], 50),
        lambda: claims.claim_recovered("default", [0]),
    ):
        assert re.search(r"Index Cond: .*expected_time\)? <", plans(unanalysed, work))


def test_the_sweep_reads_near_and_old_rows_by_their_time(unanalysed: Store) -> None:
    now = unanalysed.tasks.now()
    works: list[Callable[[], object]] = [
        lambda: list(unanalysed.sweeps.due_between(now, seconds(now, 30), 0, 1))
    ]
    # PostgreSQL reads such a small table as a whole.
    if unanalysed.database.url.get_backend_name() != "postgresql":
        works.append(lambda: unanalysed.sweeps.purge(60, 100))
    for work in works:
        shown = plans(unanalysed, work)
        assert "plan_idx_expectedTime_status" in shown, shown
        assert "plan_idx_yb_delay_hot" not in shown, shown
        assert_no_scan(shown)


def test_bulk_calls_find_rows_by_status_and_due_time_window_by_window(
    analysed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = analysed, analysed.tasks.now()
    monkeypatch.setattr(store_bulk, "WINDOW", 500)
    for move in ("cancel", "reschedule", "rerun"):
        status = "FAILED" if move == "rerun" else "NOT_COMPLETE"
        for filters in (
            {"tag": "nobody"},
            {"status": status, "key_prefix": "x", "since": seconds(now, -5000)},
        ):
            windows = store.bulk.matching(bulk_filter_of(move, filters, False))
            shown = plans(store, lambda some=windows: list(itertools.islice(some, 2)))  # type: ignore[misc]
            assert_no_scan(shown)
            used = re.findall("plan_idx_([a-z_]+)", shown.lower())
            # MySQL may use the other index if it estimates that a window is as narrow there.
            # PostgreSQL may read the few rows with a key inside a window.
            in_order = "expectedtime_status" if move == "rerun" else "yb_delay_hot"
            assert used[0] == in_order, shown
            assert used.count(in_order) + used.count("yb_delay_key") >= 3, shown
            assert move != "rerun" or "yb_delay_hot" not in used, shown


def test_some_ids_are_found_by_the_primary_key(analysed: Store, unanalysed: Store) -> None:
    for store in (analysed, unanalysed):
        ids = [one.id for one in store.tasks.find(filter_of({}), 1000).tasks[::3]]
        for named, status in itertools.product((ids, ids[:3]), (None, ["DONE"], ["FAILED"])):
            where = filter_of({"ids": named, "status": status})
            shown = plans(store, lambda at=store, where=where: at.tasks.find(where, 50))  # type: ignore[misc]
            assert "plan_idx" not in shown, shown
            assert_no_scan(shown)
        for named, move in itertools.product((ids, ids[:3]), ("cancel", "rerun")):
            which = bulk_filter_of(move, {"ids": named}, False)
            shown = plans(store, lambda at=store, which=which: list(at.bulk.matching(which)))  # type: ignore[misc]
            assert "plan_idx" not in shown, shown
            assert_no_scan(shown)


@pytest.mark.parametrize("move", ["cancel", "reschedule"])
def test_bulk_calls_move_rows_by_their_ids_on_empty_statistics(
    unanalysed: Store, move: str
) -> None:
    store, now = unanalysed, unanalysed.tasks.now()
    keyed = [
        store.tasks.insert_keyed(task(store, key=f"{move}{n}"), "reject")[0] for n in range(300)
    ]
    ids = [one.id for one in keyed]
    entry = LogEntry(ids[0], move, {}, "me", "running", now, now, None, 300, 0, 0)
    store.bulk.begin(entry)
    to = None if move == "cancel" else timedelta(hours=1)
    shown = plans(
        store, lambda: store.bulk.step(entry.id, bulk_filter_of(move, {}, True), ids, to, (0, 0))
    )
    assert not re.search(
        "(Seq Scan|ALL|index) on new_plan_yb_delay_task_m|SCAN new_plan_", shown
    ), shown
    assert "plan_idx" not in shown, shown
    assert {read(store, id).version for id in ids} == {1}


# The plans of the statements of pauses


@pytest.fixture(scope="module", params=["no statistics", "good statistics"])
def planned(request: pytest.FixtureRequest, database_url: str) -> Iterator[Store]:
    """Yield many finished rows, many paused and overdue rows, and many waiting rows."""
    made = open_store(database_url, table_prefix="plan_")
    now, t = made.tasks.now(), made.schema.tasks
    is_postgresql = made.database.url.get_backend_name() == "postgresql"
    if is_postgresql:
        with made.database.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {t.name} SET (autovacuum_enabled = off)")
    due = [now + timedelta(seconds=(n - 20_000) / 4) for n in range(24_000)]
    tags = ["mail" if n % 2 else "sms" for n in range(24_000)]
    rows = zip(due, tags, strict=True)
    made.tasks.insert_many(
        [DelayedTask(n + 1, tag, "{}", at, create_time=now) for n, (at, tag) in enumerate(rows)]
    )
    with made.database.begin() as connection:
        past = t.c.expected_time < now - timedelta(seconds=1000)
        connection.execute(update(t).where(past).values(status=int(Status.DONE)))
        connection.execute(
            update(t).where(~past, t.c.tag == "mail").values(status=int(Status.HELD))
        )
    if request.param == "good statistics":
        words = "ANALYZE TABLE" if made.database.url.get_backend_name() == "mysql" else "ANALYZE"
        with made.database.auto.connect() as connection:
            connection.exec_driver_sql(f"{words} {t.name}")
    yield made
    made.schema.metadata.drop_all(made.database.tx)
    made.close()


def test_a_pause_sweep_reads_only_rows_of_one_status(planned: Store) -> None:
    rows, level, now = planned.paused_rows, Level("default", 0), planned.tasks.now()
    is_postgresql = planned.database.url.get_backend_name() == "postgresql"
    for status in (Status.NOT_COMPLETE, Status.HELD):
        name = "held" if is_postgresql and status is Status.HELD else "hot"
        for work in (
            partial(rows.levels, status),
            partial(rows.look, status, level, None, now),
            partial(rows.look, status, level, now, None),
        ):
            shown = plans(planned, work)
            assert f"plan_idx_yb_delay_{name}" in shown, shown
            assert "plan_idx_expectedTime_status" not in shown, shown
            assert_no_scan(shown)


def test_rows_are_held_and_released_by_their_ids(planned: Store) -> None:
    planned.policies.set("tag", "sms", {"is_paused": True}, "me")
    ids = list(range(19_901, 20_101))
    held = planned.tasks.find(filter_of({"status": Status.HELD}), 100).tasks
    claimed = planned.claims("w", None).claim_due("default", [0], 20)
    for work in (
        lambda: planned.paused_rows.hold(ids),
        lambda: planned.paused_rows.release([one.id for one in held]),
        lambda: planned.paused_rows.hold_claimed(claimed),
    ):
        shown = plans(planned, work)
        assert re.search(
            r"plan_yb_delay_task_message_pkey|INTEGER PRIMARY KEY|using PRIMARY", shown
        ), shown
        assert "plan_idx" not in shown, shown
        # The policy table has few rows.
        assert_no_scan(re.sub(r"on plan_yb_delay_policy|SCAN plan_yb_delay_policy", "", shown))


def test_claims_do_not_read_held_rows(planned: Store) -> None:
    if planned.database.url.get_backend_name() != "postgresql":
        return  # the other databases have the status first in the index of all rows
    # Remove dead index entries, because they do not count as a backlog.
    with planned.database.auto.connect() as connection:
        connection.exec_driver_sql("VACUUM plan_yb_delay_task_message")
    with planned.database.tx.connect() as connection:
        query = (
            "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indexrelid = to_regclass(%s)"
        )
        assert connection.exec_driver_sql(query, ("plan_idx_yb_delay_hot",)).scalar() == (
            "(status = ANY (ARRAY[0, 3]))"
        )
        seen: list[Any] = []
        event.listen(
            planned.database.auto, "before_cursor_execute", lambda *args: seen.append(args[2:4])
        )
        planned.claims("w", None).claim_due("default", [0], 5)
        planned.sweeps.levels(0)
        for statement, parameters in [each for each in seen if "yb_delay_task_message" in each[0]]:
            shown = (
                connection.exec_driver_sql("EXPLAIN (ANALYZE, BUFFERS) " + statement, parameters)
                .scalars()
                .all()
            )
            connection.rollback()
            removed = re.findall(r"Rows Removed by Filter: (\d+)", "\n".join(shown))
            assert not any(map(int, removed)), shown
            read = re.search(r"Buffers: shared hit=(\d+)", "\n".join(shown))
            assert read is not None
            assert int(read[1]) < 100, shown


# The statements of sweeps find recurring schedules by indexes


@pytest.fixture(scope="module")
def many(database_url: str) -> Iterator[tuple[Store, Creation]]:
    """Yield 5,000 schedules, of which some are due, and a sweeper."""
    store = open_store(database_url, table_prefix="plan_")
    delays = delays_on(database_url, table_prefix="plan_")
    runtime = runtime_of(delays)
    table, now = RecurringTable(store.database, store.schema), store.tasks.now()
    made = delays.recurring.set("first", "report", every="1h", overlap="skip")
    rows = [
        table.values(replace(made, name=f"r{n}", id=n, next_at=now + timedelta(seconds=n)))
        for n in range(5000)
    ]
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.recurring), rows)
        keys = [{"tag": "other", "task_key": f"k{n}", "task_id": n} for n in range(5000)]
        connection.execute(insert(store.schema.keys), keys)
        if store.database.url.get_backend_name() != "sqlite":
            is_pg = store.database.url.get_backend_name() == "postgresql"
            for each in (store.schema.recurring, store.schema.keys):
                connection.exec_driver_sql(f"ANALYZE {'' if is_pg else 'TABLE '}{each.name}")
    events = runtime_of(delays).events
    yield (
        store,
        Creation(delays.settings, table, runtime.new_id, runtime.clock, RecordingTimer(), events),
    )
    store.schema.metadata.drop_all(store.database.tx)
    delays.close()
    store.close()


def test_no_statement_of_a_sweep_reads_all_schedules(many: tuple[Store, Creation]) -> None:
    store, creation = many
    shown = plans(store, lambda: store.due_schedules.exist(45))
    shown += plans(store, lambda: creation.create(lambda: None))
    assert "plan_" in shown
    assert_no_scan(shown)
