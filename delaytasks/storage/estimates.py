"""The planner's estimate of how many rows a query returns. Its cost does not grow with the rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select


def estimate(connection: Connection, query: Select[Any]) -> int:
    """Return the estimate. SQLite has no estimates and returns 0: its tables are small enough to
    count."""
    dialect = connection.dialect
    if dialect.name == "sqlite":
        return 0
    sql = str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    if dialect.name == "postgresql":
        plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}").scalar_one()
        return int(plan[0]["Plan"]["Plan Rows"])
    return int(connection.exec_driver_sql(f"EXPLAIN {sql}").mappings().one()["rows"] or 0)
