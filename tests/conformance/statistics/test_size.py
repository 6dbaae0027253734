"""The size of the table: a year of 50 busy tags takes less than 50 MB."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import insert, text

from delaytasks.core.run_counts import RunCounts
from delaytasks.statistics.maintenance import DAYS_KEPT, MINUTES_KEPT
from delaytasks.statistics.stored_counts import minute_text, packed_counts
from delaytasks.storage.store import Store

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
TAGS = 50
#: The test writes this share of the rows, since all of them would take a minute.
SHARE = 10
LIMIT_BYTES = 50_000_000


def rows_of_a_year() -> dict[str, int]:
    """Return the rows of each period. The minutes of two hours may wait to be packed."""
    return {
        "minute": TAGS * 120,
        "hour": TAGS * (MINUTES_KEPT // timedelta(hours=1) + 1),
        "day": TAGS * (DAYS_KEPT // timedelta(days=1) + 1),
    }


def minute(randoms: random.Random, runs: int) -> RunCounts:
    counts = RunCounts()
    for _ in range(runs):
        is_prompt = randoms.random() < 0.95
        lateness_s = randoms.expovariate(1 / 0.03 if is_prompt else 0.2)
        counts.add_run(lateness_s, randoms.lognormvariate(-2, 0.7), 5.0)
        counts.add_outcome("done" if randoms.random() < 0.99 else "failed")
    return counts


def rows(randoms: random.Random) -> Iterator[dict[str, Any]]:
    samples = [minute(randoms, runs) for runs in (1, 5, 20, 60, 200) for _ in range(40)]
    lengths = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}
    for period, year in rows_of_a_year().items():
        for number in range(year // SHARE):
            values: dict[str, Any] = {"counts": None, "parts": None}
            if period == "minute":
                values["counts"] = minute_text(samples[number % len(samples)])
            elif period == "hour":
                parts = {each: randoms.choice(samples) for each in range(60)}
                values["parts"] = packed_counts(parts, 60)
            else:
                hours = {each: RunCounts() for each in range(24)}
                for counts in hours.values():
                    for _ in range(20):
                        counts.add(randoms.choice(samples))
                values["parts"] = packed_counts(hours, 24)
            start = START + number // TAGS * lengths[period]
            tag = f"shop.orders.{number % TAGS:02}"
            yield {"period": period, "start": start, "tag": tag, **values}


SIZES = {
    "postgresql": "SELECT pg_total_relation_size('{table}')",
    "mariadb": "SELECT data_length + index_length FROM information_schema.tables "
    "WHERE table_name = '{table}' AND table_schema = database()",
    "sqlite": "SELECT sum(pgsize) FROM dbstat WHERE name = '{table}' OR name LIKE '%{table}%'",
}


@pytest.mark.slow
def test_a_year_of_50_busy_tags_takes_less_than_50_mb(store: Store) -> None:
    assert sum(rows_of_a_year().values()) < 30_000
    table, name = store.schema.statistics, store.database.url.get_backend_name()
    name = "mariadb" if name == "mysql" else name
    with store.database.begin() as connection:
        batch: list[dict[str, Any]] = []
        for row in rows(random.Random(1)):
            batch.append(row)
            if len(batch) == 1000:
                connection.execute(insert(table), batch)
                batch = []
        connection.execute(insert(table), batch)
    with store.database.auto.connect() as connection:
        if name == "mariadb":
            connection.execute(text(f"ANALYZE TABLE {table.name}")).all()
        try:
            size = connection.execute(text(SIZES[name].format(table=table.name))).scalar_one()
        except Exception:
            if name != "sqlite":
                raise
            # This SQLite has no dbstat: the whole file, with all tables.
            pages = connection.execute(text("PRAGMA page_count")).scalar_one()
            size = pages * connection.execute(text("PRAGMA page_size")).scalar_one()
    print(f"{name}: {SHARE * int(size):,} bytes a year")
    assert 1_000_000 < SHARE * int(size) < LIMIT_BYTES
