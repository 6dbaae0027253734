"""Indexes that find tasks by key, and failed or cancelled tasks, in a large table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    tasks = prefix + "yb_delay_task_message"
    has_key = sa.text("task_key IS NOT NULL")
    ddl.create_index(
        op,
        prefix + "idx_yb_delay_key",
        tasks,
        ["task_key", "expected_time"],
        schema,
        postgresql_where=has_key,
        sqlite_where=has_key,
    )
    if op.get_context().dialect.name == "postgresql":
        # On other databases the index of live rows contains them.
        ddl.create_index(
            op,
            prefix + "idx_yb_delay_ended_badly",
            tasks,
            ["status", "queue", "priority", "expected_time"],
            schema,
            postgresql_where=sa.text("status IN (2, 4)"),
        )


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    tasks = prefix + "yb_delay_task_message"
    ddl.drop_index(op, prefix + "idx_yb_delay_key", tasks, schema)
    if op.get_context().dialect.name == "postgresql":
        ddl.drop_index(op, prefix + "idx_yb_delay_ended_badly", tasks, schema)
