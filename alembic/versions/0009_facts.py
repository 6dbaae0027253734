"""When a deferred task was due, and for which tags a worker has processors."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from delaytasks.storage import ddl

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    tasks, workers = prefix + "yb_delay_task_message", prefix + "yb_delay_worker"
    # Nullable and without a default, so that no database rewrites the table for the column.
    if op.get_context().as_sql or ddl.lacks(op, tasks, schema, ["due_time"]):
        op.add_column(tasks, sa.Column("due_time", INSTANT), schema=schema)
    if op.get_context().as_sql or ddl.lacks(op, workers, schema, ["tags"]):
        op.add_column(workers, sa.Column("tags", LONG_TEXT), schema=schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.drop_columns(op, prefix + "yb_delay_worker", schema, ["tags"])
    ddl.drop_columns(op, prefix + "yb_delay_task_message", schema, ["due_time"])
