"""Policies (pauses and limits), and the key by which the tasks of a limit are counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from delaytasks.storage import ddl

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
NOW = {
    "postgresql": "clock_timestamp()",
    "mysql": "(UTC_TIMESTAMP(6))",
    "sqlite": "(strftime('%Y-%m-%d %H:%M:%f000', 'now'))",
}
OPTIONS = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    tasks, policies = prefix + "yb_delay_task_message", prefix + "yb_delay_policy"
    dialect = op.get_context().dialect.name
    if op.get_context().as_sql or ddl.lacks(op, tasks, schema, ["concurrency_key"]):
        op.add_column(tasks, sa.Column("concurrency_key", sa.String(255)), schema=schema)
    if dialect == "postgresql":
        # No other small index contains held rows. On other databases the index of live rows
        # contains all.
        ddl.create_index(
            op,
            prefix + "idx_yb_delay_held",
            tasks,
            ["queue", "priority", "expected_time"],
            schema,
            postgresql_where=sa.text("status = 5"),
        )
    if policies not in ddl.tables(op, schema):
        now = sa.text(NOW["mysql" if dialect == "mariadb" else dialect])
        op.create_table(
            policies,
            sa.Column("kind", sa.String(8), nullable=False),
            sa.Column("name", sa.String(128), nullable=False),
            sa.Column("is_paused", sa.Boolean(), nullable=False),
            sa.Column("concurrency", sa.Integer()),
            sa.Column("key_concurrency", sa.Integer()),
            sa.Column("rate", sa.Integer()),
            sa.Column("rate_period_s", sa.Double()),
            sa.Column("version", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
            # The version to which all rows have been held or released.
            sa.Column("applied_version", sa.BigInteger()),
            sa.Column("update_time", INSTANT, nullable=False, server_default=now),
            sa.Column("updated_by", sa.String(255)),
            sa.PrimaryKeyConstraint("kind", "name", name=prefix + "pk_yb_delay_policy"),
            schema=schema,
            **OPTIONS,
        )


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    """Release held rows, since the older release would never do it."""
    tasks = prefix + "yb_delay_task_message"
    light = sa.table(tasks, sa.column("status"), sa.column("version"), schema=schema)
    waiting = {light.c.status: 0, light.c.version: light.c.version + 1}
    op.execute(light.update().where(light.c.status == 5).values(waiting))
    op.drop_table(prefix + "yb_delay_policy", schema=schema)
    if op.get_context().dialect.name == "postgresql":
        ddl.drop_index(op, prefix + "idx_yb_delay_held", tasks, schema)
    ddl.drop_columns(op, tasks, schema, ["concurrency_key"])
