"""The table of the tasks, which other programs may write, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Identity,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    and_,
    or_,
    text,
)
from sqlalchemy.sql.elements import conv

from delaytasks.core.inputs import (
    CONCURRENCY_KEY_LENGTH,
    KEY_LENGTH,
    MAX_PRIORITY,
    QUEUE_LENGTH,
    TAG_LENGTH,
)
from delaytasks.core.states import Status
from delaytasks.storage.types import (
    LongText,
    UTCDateTime,
    are_counts,
    are_instants,
    db_now,
    is_queue_name,
)

#: SQLite generates ids only for INTEGER PRIMARY KEY.
RowId = BigInteger().with_variant(Integer(), "sqlite")

#: The index that claims use, without the prefix of the tables.
HOT_INDEX = "idx_yb_delay_hot"
HOT = f"status IN ({Status.NOT_COMPLETE:d}, {Status.RUNNING:d})"
ENDED_BADLY = f"status IN ({Status.FAILED:d}, {Status.CANCELLED:d})"
#: MySQL's default collations ignore case and trailing blanks, but 'a' and 'A' are two tags.
MYSQL_OPTIONS: Any = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}
#: PostgreSQL's storage options. Each row is written twice after its insert, and both writes change
#: an indexed column, so they are never HOT updates. Free space in the page keeps new versions next
#: to old ones, and makes renewals of the lease, which change no index, HOT. By default autovacuum
#: waits until a fifth of the table is dead. In a table that keeps finished rows, that is millions
#: of dead entries in the small hot index that every claim reads. With these values it runs after
#: some thousands.
STORAGE = {
    "fillfactor": "85",
    "autovacuum_vacuum_scale_factor": "0.01",
    "autovacuum_vacuum_threshold": "5000",
    "autovacuum_analyze_scale_factor": "0.02",
    "autovacuum_analyze_threshold": "5000",
}


def task_table(metadata: MetaData, prefix: str) -> Table:
    table = Table(
        prefix + "yb_delay_task_message",
        metadata,
        # Columns up to update_time are a contract: a row with only these is a valid task.
        Column("id", RowId, Identity(always=False), primary_key=True),
        Column("tag", String(TAG_LENGTH), nullable=False),
        Column("message_body", LongText, nullable=False),
        Column(
            "status", SmallInteger, nullable=False, server_default=text(f"{Status.NOT_COMPLETE:d}")
        ),
        Column("error_stack", LongText),
        Column("version", BigInteger, nullable=False, server_default=text("0")),
        Column("ip_address", BigInteger),
        Column("delay_time", BigInteger, nullable=False, server_default=text("0")),
        Column("expected_time", UTCDateTime, nullable=False, server_default=db_now()),
        Column("execution_time", UTCDateTime),
        Column("create_time", UTCDateTime, nullable=False, server_default=db_now()),
        Column("update_time", UTCDateTime, nullable=False, server_default=db_now()),
        Column("queue", String(QUEUE_LENGTH), nullable=False, server_default="default"),
        Column("priority", SmallInteger, nullable=False, server_default=text("0")),
        Column("headers", LongText),
        Column("attempts", Integer, nullable=False, server_default=text("0")),
        Column("lapses", Integer, nullable=False, server_default=text("0")),
        Column("lease_until", UTCDateTime),
        Column("worker", String(255)),
        Column("task_key", String(KEY_LENGTH)),
        Column("result", LongText),
        Column("concurrency_key", String(CONCURRENCY_KEY_LENGTH)),
        # The due time of a deferred task, whose expected_time is its next try; NULL for other
        # tasks.
        Column("due_time", UTCDateTime),
        # Pairs of strings that the caller gave to the task, as JSON.
        Column("meta", LongText),
        # 1 if a running task was asked to stop, else NULL.
        Column("cancel_request", SmallInteger),
        *_indexes(prefix),
        info={"storage": STORAGE},
        **MYSQL_OPTIONS,
    )
    t = table.c
    # One constraint, since PostgreSQL parses each for each statement.
    is_valid = and_(
        t.status.between(min(Status), max(Status)),
        or_(t.status != Status.RUNNING, and_(t.lease_until.is_not(None), t.worker.is_not(None))),
        are_counts(t.version, t.attempts, t.lapses),
        t.priority.between(0, MAX_PRIORITY),
        t.tag != "",
        is_queue_name(t.queue),
        are_instants(
            *(t.expected_time, t.execution_time, t.create_time, t.update_time),
            *(t.lease_until, t.due_time),
        ),
    )
    table.append_constraint(CheckConstraint(is_valid, name=conv(prefix + "ck_yb_delay_task")))
    return table


def hot_index(tasks: Table) -> str:
    """Return the name of this index, with the prefix."""
    return next(str(one.name) for one in tasks.indexes if str(one.name).endswith(HOT_INDEX))


def _indexes(prefix: str) -> Sequence[Index]:
    return (
        Index(conv(prefix + "idx_expectedTime_status"), "expected_time", "status"),
        Index(
            conv(prefix + HOT_INDEX),
            "status",
            "queue",
            "priority",
            "expected_time",
            # Complete on other databases: MySQL has no partial indexes, and SQLite does not use one
            # for a status that is a parameter.
            postgresql_where=text(HOT),
        ),
        Index(
            conv(prefix + "idx_yb_delay_held"),
            "queue",
            "priority",
            "expected_time",
            postgresql_where=text(f"status = {Status.HELD:d}"),
        ).ddl_if(dialect="postgresql"),
        Index(
            conv(prefix + "idx_yb_delay_ended_badly"),
            "status",
            "queue",
            "priority",
            "expected_time",
            postgresql_where=text(ENDED_BADLY),
        ).ddl_if(dialect="postgresql"),
        Index(
            conv(prefix + "idx_yb_delay_key"),
            "task_key",
            "expected_time",
            postgresql_where=text("task_key IS NOT NULL"),
            sqlite_where=text("task_key IS NOT NULL"),
        ),
    )
