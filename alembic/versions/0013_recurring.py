"""Recurring schedules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl
from delaytasks.storage.types import LongText, UTCDateTime

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

NAME = "yb_delay_recurring"
OPTIONS = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    if prefix + NAME not in ddl.tables(op, schema):
        op.create_table(
            prefix + NAME,
            sa.Column("name", sa.String(166), nullable=False),
            sa.Column("id", sa.BigInteger(), nullable=False, autoincrement=False),
            sa.Column("tag", sa.String(128), nullable=False),
            sa.Column("message_body", LongText, nullable=False),
            sa.Column("queue", sa.String(100), nullable=False),
            sa.Column("priority", sa.SmallInteger(), nullable=False),
            sa.Column("headers", LongText),
            sa.Column("concurrency_key", sa.String(255)),
            sa.Column("timing", sa.String(500), nullable=False),
            sa.Column("tz", sa.String(64), nullable=False),
            sa.Column("start_at", UTCDateTime()),
            sa.Column("jitter_s", sa.Double(), nullable=False),
            sa.Column("missed", sa.String(16), nullable=False),
            sa.Column("most_missed", sa.Integer(), nullable=False),
            sa.Column("overlap", sa.String(16), nullable=False),
            sa.Column("is_declared", sa.Boolean(), nullable=False),
            sa.Column("is_paused", sa.Boolean(), nullable=False),
            sa.Column("next_at", UTCDateTime()),
            sa.Column("last_at", UTCDateTime()),
            sa.Column("last_task_id", sa.BigInteger()),
            sa.Column("version", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
            sa.Column("create_time", UTCDateTime(), nullable=False),
            sa.Column("update_time", UTCDateTime(), nullable=False),
            sa.Column("updated_by", sa.String(255)),
            sa.PrimaryKeyConstraint("name", name=f"{prefix}pk_{NAME}"),
            schema=schema,
            **OPTIONS,
        )
    ddl.create_index(op, prefix + "idx_yb_delay_recurring_next", prefix + NAME, ["next_at"], schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    op.drop_table(prefix + NAME, schema=schema)
