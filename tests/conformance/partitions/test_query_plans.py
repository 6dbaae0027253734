"""Statements read only the partitions that they need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta

import pytest

from delaytasks.core.filters import filter_of
from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import Status
from delaytasks.partitions.periods import edge_after
from tests.conformance.partitions.converted_table import TASKS, WEEK, ConvertedTable
from tests.conformance.query_plans import plans
from tests.conformance.store_rows import entry, seconds

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["no", "quiet"])
def planned(postgresql_url: str, request: pytest.FixtureRequest) -> Iterator[ConvertedTable]:
    """Yield six partitions of finished rows without statistics, or with statistics from a quiet
    period. Afterwards, many rows of the last partition become due."""
    made = ConvertedTable(postgresql_url)
    for name in made.names():
        made.run(f"ALTER TABLE {TASKS}{name} SET (autovacuum_enabled = off)")
    for week in range(6):
        made.fill(5000, made.now - week * WEEK, Status.DONE)
    if request.param == "quiet":
        made.store.database.autocommitted(lambda c: c.exec_driver_sql(f"VACUUM ANALYZE {TASKS}"))
    made.fill(40_000, made.now + timedelta(seconds=1), Status.NOT_COMPLETE)
    made.run(f"UPDATE {TASKS} SET expected_time = now() - interval '10 seconds' WHERE status = 0")
    yield made
    made.close()


def filled(field: ConvertedTable) -> set[str]:
    """Return the partitions that have rows, because the plan for an empty one does not matter."""
    return {row[0] for row in field.run(f"SELECT DISTINCT tableoid::regclass::text FROM {TASKS}")}


def read_as_a_whole(field: ConvertedTable, shown: str) -> set[str]:
    return set(re.findall(r"Seq Scan on (\w+)", shown)) & filled(field)


def searched(shown: str) -> set[str]:
    return set(re.findall(rf"Scan (?:using \w+ )?on {TASKS}(_p\d+)\b", shown))


def test_a_claim_by_id_searches_only_the_partition_of_its_rows(planned: ConvertedTable) -> None:
    store, claims = planned.store, planned.store.claims("w", None)
    *some, other = store.tasks.find(filter_of({"status": Status.NOT_COMPLETE}), 20).tasks
    claiming = plans(store, lambda: claims.claim([entry(one) for one in some]))
    assert read_as_a_whole(planned, claiming) == set()
    mine = f"_p{edge_after(planned.now, WEEK) - WEEK:%Y%m%d}"
    assert searched(claiming) == {mine}
    for work in (
        lambda: claims.settle([Settlement(one, "succeed") for one in some]),
        lambda: store.tasks.get(some[0].id),
        lambda: store.tasks.cancel(other.id),
    ):
        shown = plans(store, work)
        assert searched(shown) == {mine}
        assert "Seq Scan" not in shown.replace("Seq Scan on q_yb_delay_task_key", "")


def test_the_slow_path_reads_no_more_than_it_takes(planned: ConvertedTable) -> None:
    """The query merges the hot indexes of all partitions, and those without waiting rows are
    empty."""
    store, claims = planned.store, planned.store.claims("w", None)
    for work in (
        lambda: claims.claim_due("default", [0], 5),
        lambda: store.sweeps.levels(1.0),
    ):
        shown = plans(store, work)
        assert read_as_a_whole(planned, shown) == set()
        assert "Merge Append" in shown
        assert "Sort  (" not in shown
        assert not any(f"{name}_expected_time_status_idx" in shown for name in filled(planned))


def test_the_sweep_reads_hot_and_near_rows_by_their_indexes(planned: ConvertedTable) -> None:
    store, claims, now = planned.store, planned.store.claims("w", None), planned.now
    for work in (
        lambda: claims.claim_recovered("default", [0]),
        lambda: store.sweeps.recover(5, 100),
        lambda: store.leases.renew(["w"], now),
        lambda: list(store.sweeps.due_between(now, seconds(now, 30), 0, 1)),
    ):
        assert read_as_a_whole(planned, plans(store, work)) == set()
