"""The waitlist, in which tasks of limited tags wait for capacity."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

from delaytasks.storage import ddl

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True).with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
OPTIONS = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    policies, lines = prefix + "yb_delay_policy", prefix + "yb_delay_line"
    if op.get_context().as_sql or ddl.lacks(op, policies, schema, ["next_start"]):
        op.add_column(policies, sa.Column("next_start", INSTANT), schema=schema)
    if op.get_context().as_sql or ddl.lacks(op, policies, schema, ["turn"]):
        op.add_column(policies, sa.Column("turn", sa.String(255)), schema=schema)
    # The table has another name since revision 0011.
    if not {lines, prefix + "yb_delay_waitlist"} & ddl.tables(op, schema):
        op.create_table(
            lines,
            sa.Column("queue", sa.String(100), nullable=False),
            sa.Column("tag", sa.String(128), nullable=False),
            sa.Column("lane", sa.String(255), nullable=False),
            sa.Column("place", sa.Integer(), nullable=False, autoincrement=False),
            sa.Column("due", INSTANT, nullable=False),
            sa.Column("task_id", sa.BigInteger(), nullable=False, autoincrement=False),
            sa.Column("version", sa.BigInteger(), nullable=False, autoincrement=False),
            sa.PrimaryKeyConstraint(
                "queue",
                "tag",
                "lane",
                "place",
                "due",
                "task_id",
                "version",
                name=prefix + "pk_yb_delay_line",
            ),
            schema=schema,
            **OPTIONS,
        )


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    """Release the tasks in the waitlist, since the older release would never do it."""
    tasks, lines = (
        sa.table(prefix + name, *map(sa.column, columns), schema=schema)
        for name, columns in (
            ("yb_delay_task_message", ("id", "status", "version")),
            ("yb_delay_line", ("task_id",)),
        )
    )
    in_waitlist = sa.and_(tasks.c.status == 5, tasks.c.id.in_(sa.select(lines.c.task_id)))
    op.execute(
        tasks.update()
        .where(in_waitlist)
        .values({tasks.c.status: 0, tasks.c.version: tasks.c.version + 1})
    )
    op.drop_table(prefix + "yb_delay_line", schema=schema)
    ddl.drop_columns(op, prefix + "yb_delay_policy", schema, ["next_start", "turn"])
