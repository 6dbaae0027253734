"""A search ends at its time limit, on every database."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import SearchTimeoutError
from delaytasks.core.filters import filter_of
from delaytasks.storage.searching import limited_search
from delaytasks.storage.store import Store
from delaytasks.storage.types import for_database

COUNT_FOREVER = """
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {most})
SELECT count(*) FROM n
"""


def endless(store: Store) -> Any:
    """Return a statement that takes minutes."""
    sql = for_database(
        store.database.backend,
        postgresql="SELECT pg_sleep(300)",
        mysql="SELECT SLEEP(300)",
        sqlite=COUNT_FOREVER.format(most=10**12),
    )
    return text(sql)


def test_a_statement_ends_at_the_limit_and_the_connections_keep_none(store: Store) -> None:
    began = monotonic()
    with pytest.raises(SearchTimeoutError, match="narrow its filter"):
        limited_search(store.database, lambda c: c.execute(endless(store)), 0.2)
    assert monotonic() - began < 60
    limit = for_database(
        store.database.backend,
        postgresql="SELECT setting FROM pg_settings WHERE name = 'statement_timeout'",
        mysql="SELECT @@max_statement_time",
        sqlite=COUNT_FOREVER.format(most=10**5).replace("count(*)", "0 * count(*)"),
    )
    for engine in (store.database.auto, store.database.tx):
        with engine.connect() as connection:
            assert float(connection.execute(text(limit)).scalar_one()) == 0


def test_no_statement_begins_after_the_limit(store: Store) -> None:
    def work(connection: Any) -> None:
        while True:
            connection.execute(text("SELECT 1"))

    with pytest.raises(SearchTimeoutError):
        limited_search(store.database, work, 0.1)


def test_tasks_are_found_within_the_limit(store: Store) -> None:
    assert store.tasks.find(filter_of({"tag": "unknown"}), 10, time_limit_s=30).tasks == []
