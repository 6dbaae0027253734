"""Failed attempts and stored results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from delaytasks.storage import ddl

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
LONG_TEXT = sa.Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
OPTIONS = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    tasks, attempts = prefix + "yb_delay_task_message", prefix + "yb_delay_attempt"
    if op.get_context().as_sql or ddl.lacks(op, tasks, schema, ["result"]):
        op.add_column(tasks, sa.Column("result", LONG_TEXT), schema=schema)
    if attempts not in ddl.tables(op, schema):
        op.create_table(
            attempts,
            sa.Column("task_id", sa.BigInteger(), nullable=False, autoincrement=False),
            sa.Column("version", sa.BigInteger(), nullable=False, autoincrement=False),
            sa.Column("attempt", sa.Integer(), nullable=False),
            sa.Column("began", INSTANT),
            sa.Column("ended", INSTANT, nullable=False),
            sa.Column("worker", sa.String(255)),
            sa.Column("error", LONG_TEXT),
            sa.PrimaryKeyConstraint("task_id", "version", name=prefix + "pk_yb_delay_attempt"),
            schema=schema,
            **OPTIONS,
        )


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    op.drop_table(prefix + "yb_delay_attempt", schema=schema)
    ddl.drop_columns(op, prefix + "yb_delay_task_message", schema, ["result"])
