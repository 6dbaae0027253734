"""The plans of the statements of pauses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, update

from delaytasks import DelayTask, Status
from delaytasks.core.filters import filter_of
from delaytasks.core.interfaces import Level
from delaytasks.storage.store import Store
from tests.conformance.query_plans import assert_no_scan, plans
from tests.conftest import open_store

pytestmark = pytest.mark.slow


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
        [DelayTask(n + 1, tag, "{}", at, create_time=now) for n, (at, tag) in enumerate(rows)],
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
    with made.database.begin() as connection:
        made.schema.metadata.drop_all(connection)
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
        lambda: planned.paused_rows.release([task.id for task in held]),
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
