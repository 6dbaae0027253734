"""The tables of delaytasks. A task table that exists is adopted.

A migration is frozen: it does not follow later changes of `delaytasks/storage/schema.py`. A test
compares the newest revision with the metadata.

MySQL commits each DDL statement by itself, so each step checks first and can run again after a
failure.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from delaytasks.storage import adoption, ddl

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
#: SQLite generates ids only for a column that is exactly INTEGER PRIMARY KEY.
ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
NOW = {
    "postgresql": "clock_timestamp()",
    "mysql": "(UTC_TIMESTAMP(6))",
    "sqlite": "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))",
}
#: MySQL's default collations ignore case and trailing blanks, but 'a' and 'A' are two tags.
OPTIONS = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}
#: Each row is written twice after its insert, and both writes change an indexed column, so they are
#: never HOT updates. Free space in the page keeps new versions next to old ones, and makes renewals
#: of the lease, which change no index, HOT. By default autovacuum waits until a fifth of the table
#: is dead. In a table that keeps finished rows, that is millions of dead entries in the small hot
#: index that every claim reads. With these values it runs after some thousands.
STORAGE = {
    "fillfactor": "85",
    "autovacuum_vacuum_scale_factor": "0.01",
    "autovacuum_vacuum_threshold": "5000",
    "autovacuum_analyze_scale_factor": "0.02",
    "autovacuum_analyze_threshold": "5000",
}


def _now() -> sa.TextClause:
    name = op.get_context().dialect.name
    return sa.text(NOW["mysql" if name == "mariadb" else name])


def _task_columns() -> list[sa.Column[object]]:
    return [
        # The columns of the contract: a row with only these is a valid task.
        sa.Column("id", ROW_ID, sa.Identity(always=False), primary_key=True),
        sa.Column("tag", sa.String(128), nullable=False),
        sa.Column("message_body", LONG_TEXT, nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("error_stack", LONG_TEXT),
        sa.Column("version", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("ip_address", sa.BigInteger()),
        sa.Column("delay_time", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("expected_time", INSTANT, nullable=False, server_default=_now()),
        sa.Column("execution_time", INSTANT),
        sa.Column("create_time", INSTANT, nullable=False, server_default=_now()),
        sa.Column("update_time", INSTANT, nullable=False, server_default=_now()),
        # Columns that delaytasks added.
        sa.Column("queue", sa.String(100), nullable=False, server_default=sa.text("'default'")),
        sa.Column("priority", sa.SmallInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("headers", LONG_TEXT),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("lapses", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("lease_until", INSTANT),
        sa.Column("worker", sa.String(255)),
        sa.Column("task_key", sa.String(191)),
    ]


ADDED = ("queue", "priority", "headers", "attempts", "lapses", "lease_until", "worker", "task_key")


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    tasks = prefix + "yb_delay_task_message"
    existing = ddl.tables(op, schema)
    was_here = tasks in existing and ddl.lacks(op, tasks, schema, ADDED)
    if tasks in existing:
        adoption.adopt(
            op, sa.Table(tasks, sa.MetaData(), *_task_columns(), schema=schema, **OPTIONS)
        )
    else:
        op.create_table(tasks, *_task_columns(), schema=schema, **OPTIONS)
    if op.get_context().dialect.name == "postgresql" and not ddl.is_partitioned(op, tasks, schema):
        options = ", ".join(f"{name} = {value}" for name, value in STORAGE.items())
        op.execute(f"ALTER TABLE {ddl.quoted(op, tasks, schema)} SET ({options})")
    ddl.create_index(
        op, prefix + "idx_expectedTime_status", tasks, ["expected_time", "status"], schema
    )
    # Only rows that wait or run are in this index; finished ones, which are most, are not. MySQL
    # has no partial indexes, and SQLite does not use one for a status that is a parameter.
    ddl.create_index(
        op,
        prefix + "idx_yb_delay_hot",
        tasks,
        ["status", "queue", "priority", "expected_time"],
        schema,
        postgresql_where=sa.text("status IN (0, 3)"),
    )
    if prefix + "yb_delay_task_key" not in existing:
        op.create_table(
            prefix + "yb_delay_task_key",
            sa.Column("tag", sa.String(128), nullable=False),
            sa.Column("task_key", sa.String(191), nullable=False),
            sa.Column("task_id", sa.BigInteger(), nullable=False),
            # The key comes first, since it distinguishes rows. If the tag came first, a planner
            # might read all keys of a tag.
            sa.PrimaryKeyConstraint("task_key", "tag", name=prefix + "pk_yb_delay_task_key"),
            schema=schema,
            **OPTIONS,
        )
    if prefix + "yb_delay_sweep" not in existing:
        op.create_table(
            prefix + "yb_delay_sweep",
            sa.Column("house", sa.Integer(), nullable=False, autoincrement=False),
            sa.Column("houses", sa.Integer(), nullable=False, autoincrement=False),
            sa.Column("swept_at", INSTANT, nullable=False),
            sa.Column("armed_until", INSTANT, nullable=False),
            sa.PrimaryKeyConstraint("houses", "house", name=prefix + "pk_yb_delay_sweep"),
            schema=schema,
            **OPTIONS,
        )
    if prefix + "yb_delay_worker" not in existing:
        op.create_table(
            prefix + "yb_delay_worker",
            sa.Column("name", sa.String(255), nullable=False),
            sa.Column("seen_at", INSTANT, nullable=False),
            sa.Column("started_at", INSTANT, nullable=False),
            sa.Column("queues", LONG_TEXT, nullable=False),
            sa.Column("pool", sa.String(64), nullable=False),
            sa.Column("concurrency", sa.Integer(), nullable=False),
            sa.Column(
                "clock_offset_us", sa.BigInteger(), nullable=False, server_default=sa.text("0")
            ),
            sa.PrimaryKeyConstraint("name", name=prefix + "pk_yb_delay_worker"),
            schema=schema,
            **OPTIONS,
        )
    if was_here:
        adoption.remember(op, prefix + "yb_delay_task_key", schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    """Drop the tables, but never rows of another program.

    The task table is dropped only if it is empty and was not adopted. Else it keeps the columns of
    the contract, their index and its rows, and loses what delaytasks added.
    """
    tasks = prefix + "yb_delay_task_message"
    existing = ddl.tables(op, schema)
    keeps = adoption.keeps_rows(op, tasks, prefix + "yb_delay_task_key", schema)
    for name in ("yb_delay_task_key", "yb_delay_sweep", "yb_delay_worker"):
        if prefix + name in existing or op.get_context().as_sql:
            op.drop_table(prefix + name, schema=schema)
    if keeps:
        ddl.drop_index(op, prefix + "idx_yb_delay_hot", tasks, schema)
        ddl.drop_columns(op, tasks, schema, ADDED)
        if op.get_context().dialect.name == "postgresql":
            op.execute(f"ALTER TABLE {ddl.quoted(op, tasks, schema)} RESET ({', '.join(STORAGE)})")
    elif tasks in existing:
        op.drop_table(tasks, schema=schema)
