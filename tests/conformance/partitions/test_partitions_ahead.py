"""Partitions are made before their time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from delaytasks.core.errors import ConfigError
from delaytasks.core.ids import first_id, made_at
from delaytasks.core.states import Status
from delaytasks.partitions.periods import edge_after, periods
from delaytasks.partitions.table import CLOCKS_DIFFER, Partitions
from delaytasks.storage.database import Database
from tests.conformance.partitions.converted_table import (
    DAY,
    TASKS,
    WEEK,
    ConvertedTable,
    meet_others,
    turns,
)
from tests.conformance.store_rows import seconds


def test_the_bounds_of_partitions_do_not_depend_on_when_they_are_created() -> None:
    start = made_at(0)
    assert edge_after(start, WEEK) == start + WEEK
    assert edge_after(start + 3 * DAY, WEEK) == edge_after(start + 6.9 * DAY, WEEK) == start + WEEK
    assert periods(start + DAY, start + 3 * WEEK, WEEK) == [
        (start + DAY, start + WEEK),
        (start + WEEK, start + 2 * WEEK),
        (start + 2 * WEEK, start + 3 * WEEK),
    ]
    assert periods(start + WEEK, start + WEEK, WEEK) == []


def test_ids_of_an_instant_are_made_at_that_instant(field: ConvertedTable) -> None:
    now = seconds(field.now, 0).replace(microsecond=5000)
    assert made_at(first_id(now)) == now
    assert made_at(first_id(now) + 2**22 - 1) == now
    assert made_at(first_id(now) - 1) < now


def test_each_period_has_one_partition_and_the_first_all_before(field: ConvertedTable) -> None:
    *parts, default = field.partitions.all()
    assert default.is_default
    assert parts[0].since is None
    assert all(a.until == b.since for a, b in itertools.pairwise(parts))
    assert all(part.until - part.since == WEEK for part in parts[1:])  # type: ignore[operator]
    assert parts[-1].until == edge_after(field.now, WEEK) + 4 * WEEK
    field.put(DAY)
    field.put(10 * WEEK)
    assert field.places() == ["_first", f"_p{edge_after(field.now - DAY, WEEK) - WEEK:%Y%m%d}"]
    assert field.partitions.live() == {}


def test_simultaneous_calls_create_each_partition_once(
    field: ConvertedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = field.names()
    assert field.partitions.extend(WEEK, 4) == []
    meet_others(field.partitions, 2, monkeypatch)
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda _: field.partitions.extend(WEEK, 8), range(3)))
    assert sorted(map(len, made)) == [0, 0, 4]
    assert len(field.names()) == len(before) + 4


def test_created_partitions_stay_if_the_connection_with_the_lock_is_lost(
    field: ConvertedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server or a pooler may close the connection that only holds the lock."""
    in_turn, ended = field.partitions.in_turn, []

    def and_then_it_is_lost(work: Callable[[Any], list[str]], *otherwise: str) -> list[str]:
        done = in_turn(work, *otherwise)
        ended.extend(turns(field.partitions, "pg_terminate_backend(pid)", is_granted=True))
        return done

    monkeypatch.setattr(field.partitions, "in_turn", and_then_it_is_lost)
    assert len(field.partitions.extend(WEEK, 8)) == 4
    assert ended == [True]


def test_partitions_of_another_length_begin_where_the_last_one_ends(field: ConvertedTable) -> None:
    assert len(field.partitions.extend(3 * DAY, 16)) > 3
    *parts, _ = field.partitions.all()
    assert all(a.until == b.since for a, b in itertools.pairwise(parts))


def test_tasks_without_a_partition_are_kept_in_the_default_partition(
    field: ConvertedTable,
) -> None:
    """No process created partitions for weeks."""
    late = 8 * WEEK
    one = field.put(-late, Status.NOT_COMPLETE)
    assert field.places() == ["_default"]
    # An edge within the next hour may have passed by the clock of another process.
    first = edge_after(field.now + late + CLOCKS_DIFFER, WEEK)
    edge = edge_after(field.now + late, WEEK) + 2 * WEEK
    made = field.at(late, lambda partitions: partitions.extend(WEEK, 2))
    assert made == [f"{TASKS}_p{since:%Y%m%d}" for since in (first, first + WEEK) if since < edge]
    assert field.places() == ["_default"]
    assert field.store.tasks.cancel(one.id) is not None
    # If the default partition has a task of a future period, that period gets no partition.
    field.put(-late - 5 * WEEK)
    made = field.at(late, lambda partitions: partitions.extend(WEEK, 6))
    skipped = edge_after(field.now + late + 5 * WEEK, WEEK) - WEEK
    wanted = [edge + n * WEEK for n in range(4) if edge + n * WEEK != skipped]
    assert made == [f"{TASKS}_p{since:%Y%m%d}" for since in wanted]
    assert len(wanted) == 3


def test_the_end_of_the_last_partition_is_known(field: ConvertedTable) -> None:
    assert field.store.sweeps.partitions_end() == edge_after(field.now, WEEK) + 4 * WEEK


@pytest.mark.parametrize("url", ["sqlite://", "mysql://nobody@nowhere/x"])
def test_the_error_on_other_databases_names_the_alternative(url: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"partitions need PostgreSQL, and this is (sqlite|mysql): .*purge_after_s",
    ):
        Partitions(Database(url))
