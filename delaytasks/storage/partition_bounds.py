"""When the partitions of the task table end, for the sweep."""

from __future__ import annotations

import re
from datetime import datetime

from sqlalchemy import Connection, Table, text

from delaytasks.core.ids import made_at

#: The CHECK on the ids of a table while it, or its neighbour, is attached as a partition.
CHECK = "ck_yb_delay_partition"


def end_of(connection: Connection, tasks: Table) -> datetime | None:
    """Return when new ids leave the last partition; None without partitions.

    A conversion that was interrupted leaves a CHECK on the table, and then the result is when new
    ids violate the CHECK.
    """
    query = text(
        "SELECT pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits AS i "
        "JOIN pg_class AS c ON c.oid = i.inhrelid WHERE i.inhparent = to_regclass(:name) "
        "UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = to_regclass(:name) AND conname = :check"
    )
    name = connection.dialect.identifier_preparer.format_table(tasks)
    bounds = " ".join(connection.execute(query, {"name": name, "check": CHECK}).scalars())
    return max(
        (made_at(int(high)) for high in re.findall(r"(?:TO \(|id < )'(\d+)'", bounds)), default=None
    )
