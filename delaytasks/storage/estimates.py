"""The planner's estimate of how many rows a query returns. Its cost does not grow with the rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select

from delaytasks.storage.capabilities import for_database


def estimate(connection: Connection, query: Select[Any]) -> int:
    """Return the estimate. SQLite has no estimates and returns 0: its tables are small enough to
    count."""
    dialect = connection.dialect
    read = for_database(
        dialect.name, postgresql=_postgresql_estimate, mysql=_mysql_estimate, sqlite=None
    )
    if read is None:
        return 0
    sql = str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    return read(connection, sql)


def _postgresql_estimate(connection: Connection, sql: str) -> int:
    plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}").scalar_one()
    return int(plan[0]["Plan"]["Plan Rows"])


def _mysql_estimate(connection: Connection, sql: str) -> int:
    return int(connection.exec_driver_sql(f"EXPLAIN {sql}").mappings().one()["rows"] or 0)
