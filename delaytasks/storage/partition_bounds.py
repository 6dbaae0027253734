"""When the partitions of the task table end, for the sweep."""

from __future__ import annotations

import re
from datetime import datetime

from sqlalchemy import Connection, Table, text

from delaytasks.core.ids import made_at

#: The constraint on a table that is about to become a partition: the range of its ids.
CHECK = "ck_yb_delay_partition"


def end_of(connection: Connection, tasks: Table) -> datetime | None:
    """When new ids leave the last partition, or come to what a conversion that was broken off has left behind."""
    query = text(
        "SELECT pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
        "WHERE i.inhparent = to_regclass(:name) UNION ALL SELECT pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = to_regclass(:name) AND conname = :check"
    )
    name = connection.dialect.identifier_preparer.format_table(tasks)
    said = " ".join(connection.execute(query, {"name": name, "check": CHECK}).scalars())
    return max(
        (made_at(int(high)) for high in re.findall(r"(?:TO \(|id < )'(\d+)'", said)), default=None
    )
