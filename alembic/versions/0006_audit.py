"""Bulk operations write an audit row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from delaytasks.storage import ddl

revision = "0006"
down_revision = "0005"
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
    name = prefix + "yb_delay_audit"
    if name not in ddl.tables(op, schema):
        op.create_table(
            name,
            sa.Column("id", sa.BigInteger(), nullable=False, autoincrement=False),
            sa.Column("action", sa.String(32), nullable=False),
            sa.Column("filter", LONG_TEXT, nullable=False),
            sa.Column("actor", sa.String(255), nullable=False),
            sa.Column("state", sa.String(16), nullable=False),
            sa.Column("started_at", INSTANT, nullable=False),
            sa.Column("seen_at", INSTANT, nullable=False),
            sa.Column("finished_at", INSTANT),
            sa.Column("matched", sa.BigInteger(), nullable=False),
            sa.Column("changed", sa.BigInteger(), nullable=False),
            sa.Column("refused", sa.BigInteger(), nullable=False),
            sa.PrimaryKeyConstraint("id", name=prefix + "pk_yb_delay_audit"),
            schema=schema,
            **OPTIONS,
        )


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    op.drop_table(prefix + "yb_delay_audit", schema=schema)
