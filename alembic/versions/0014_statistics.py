"""Statistics: what workers have run, and which failures were of the same kind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl
from delaytasks.storage.types import LongText, UTCDateTime

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

STATISTICS, FAILURES = "yb_delay_statistics", "yb_delay_failure"
OPTIONS = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    existing = ddl.tables(op, schema)
    if prefix + STATISTICS not in existing:
        op.create_table(
            prefix + STATISTICS,
            sa.Column("period", sa.String(8), nullable=False),
            sa.Column("start", UTCDateTime(), nullable=False),
            sa.Column("tag", sa.String(128), nullable=False),
            sa.Column("counts", LongText),
            sa.Column("parts", sa.LargeBinary()),
            sa.PrimaryKeyConstraint("period", "start", "tag", name=f"{prefix}pk_{STATISTICS}"),
            schema=schema,
            **OPTIONS,
        )
    if prefix + FAILURES not in existing:
        op.create_table(
            prefix + FAILURES,
            sa.Column("tag", sa.String(128), nullable=False),
            sa.Column("fingerprint", sa.String(32), nullable=False),
            sa.Column("pattern", LongText, nullable=False),
            sa.Column("task_id", sa.BigInteger(), nullable=False),
            sa.Column("sample", LongText, nullable=False),
            sa.Column("runs", sa.BigInteger(), nullable=False),
            sa.Column("first_at", UTCDateTime(), nullable=False),
            sa.Column("last_at", UTCDateTime(), nullable=False),
            sa.Column("hours", LongText, nullable=False),
            sa.PrimaryKeyConstraint("tag", "fingerprint", name=f"{prefix}pk_{FAILURES}"),
            schema=schema,
            **OPTIONS,
        )
    name = prefix + "idx_yb_delay_failure_last"
    ddl.create_index(op, name, prefix + FAILURES, ["last_at"], schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    op.drop_table(prefix + FAILURES, schema=schema)
    op.drop_table(prefix + STATISTICS, schema=schema)
