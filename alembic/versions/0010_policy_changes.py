"""A number for each change of a policy, so that workers read only policies that changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

OPTIONS = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    policies, changes = prefix + "yb_delay_policy", prefix + "yb_delay_policy_change"
    if op.get_context().as_sql or ddl.lacks(op, policies, schema, ["change_number"]):
        column = sa.Column(
            "change_number", sa.BigInteger(), nullable=False, server_default=sa.text("0")
        )
        op.add_column(policies, column, schema=schema)
    ddl.create_index(op, prefix + "idx_yb_delay_policy_change", policies, ["change_number"], schema)
    if changes not in ddl.tables(op, schema):
        op.create_table(
            changes,
            sa.Column("id", sa.SmallInteger(), nullable=False, autoincrement=False),
            sa.Column("number", sa.BigInteger(), nullable=False),
            sa.PrimaryKeyConstraint("id", name=prefix + "pk_yb_delay_policy_change"),
            schema=schema,
            **OPTIONS,
        )


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    policies = prefix + "yb_delay_policy"
    op.drop_table(prefix + "yb_delay_policy_change", schema=schema)
    ddl.drop_index(op, prefix + "idx_yb_delay_policy_change", policies, schema)
    ddl.drop_columns(op, policies, schema, ["change_number"])
