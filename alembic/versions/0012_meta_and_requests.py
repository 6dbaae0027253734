"""Pairs of strings that callers give to tasks, the request to cancel a running task, and undo."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from delaytasks.storage import ddl

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
COLUMNS = {"meta": LONG_TEXT, "cancel_request": sa.SmallInteger()}
STEPS = "yb_delay_audit_step"


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    tasks = prefix + "yb_delay_task_message"
    # Nullable and without a default, so that no database rewrites the table for the columns.
    for name, kind in COLUMNS.items():
        if op.get_context().as_sql or ddl.lacks(op, tasks, schema, [name]):
            op.add_column(tasks, sa.Column(name, kind), schema=schema)
    if prefix + STEPS not in ddl.tables(op, schema):
        op.create_table(
            prefix + STEPS,
            sa.Column("audit_id", sa.BigInteger(), nullable=False, autoincrement=False),
            sa.Column("step", sa.Integer(), nullable=False, autoincrement=False),
            sa.Column("moved", LONG_TEXT, nullable=False),
            sa.PrimaryKeyConstraint("audit_id", "step", name=f"{prefix}pk_{STEPS}"),
            schema=schema,
            mysql_charset="utf8mb4",
            mysql_collate="utf8mb4_bin",
            mariadb_charset="utf8mb4",
            mariadb_collate="utf8mb4_bin",
        )


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    op.drop_table(prefix + STEPS, schema=schema)
    ddl.drop_columns(op, prefix + "yb_delay_task_message", schema, [*COLUMNS])
