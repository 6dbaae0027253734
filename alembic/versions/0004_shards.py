"""Each of several databases stores its number."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

OPTIONS = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    name = prefix + "yb_delay_shard"
    if name not in ddl.tables(op, schema):
        op.create_table(
            name,
            sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
            sa.PrimaryKeyConstraint("number", name=prefix + "pk_yb_delay_shard"),
            schema=schema,
            **OPTIONS,
        )


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    op.drop_table(prefix + "yb_delay_shard", schema=schema)
