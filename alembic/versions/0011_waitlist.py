"""Rename the table of the waitlists and one of its columns, so that they say what they hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl
from delaytasks.storage.types import UTCDateTime

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

BEFORE, AFTER = "yb_delay_line", "yb_delay_waitlist"
KEY_BEFORE, KEY_AFTER = "lane", "concurrency_key"
KEY_TYPE = sa.String(255)


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    if op.get_context().dialect.name == "sqlite":
        _copy(prefix)
    else:
        ddl.rename_table(op, prefix, BEFORE, AFTER, schema)
        ddl.rename_column(op, prefix + AFTER, KEY_BEFORE, KEY_AFTER, KEY_TYPE, schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.rename_column(op, prefix + AFTER, KEY_AFTER, KEY_BEFORE, KEY_TYPE, schema)
    ddl.rename_table(op, prefix, AFTER, BEFORE, schema)


def _copy(prefix: str) -> None:
    """Make the table anew, because SQLite cannot rename the constraint of its primary key."""
    if not op.get_context().as_sql and prefix + BEFORE not in ddl.tables(op, None):
        return
    keys = ("queue", "tag", KEY_AFTER, "place", "due", "task_id", "version")
    op.create_table(
        prefix + AFTER,
        sa.Column("queue", sa.String(100), nullable=False),
        sa.Column("tag", sa.String(128), nullable=False),
        sa.Column(KEY_AFTER, KEY_TYPE, nullable=False),
        sa.Column("place", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("due", UTCDateTime(), nullable=False),
        sa.Column("task_id", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("version", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.PrimaryKeyConstraint(*keys, name=f"{prefix}pk_{AFTER}"),
    )
    op.execute(f'INSERT INTO "{prefix}{AFTER}" SELECT * FROM "{prefix}{BEFORE}"')
    op.drop_table(prefix + BEFORE)
