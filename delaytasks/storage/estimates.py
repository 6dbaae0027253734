"""How many rows a query has, by what the planner knows: it costs the same however many they are."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select


def estimate(connection: Connection, query: Select[Any]) -> int:
    """0 where nobody knows: SQLite, whose tables are small enough to be counted."""
    dialect = connection.dialect
    if dialect.name == "sqlite":
        return 0
    sql = str(query.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    if dialect.name == "postgresql":
        plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {sql}").scalar_one()
        return int(plan[0]["Plan"]["Plan Rows"])
    return int(connection.exec_driver_sql(f"EXPLAIN {sql}").mappings().one()["rows"] or 0)
