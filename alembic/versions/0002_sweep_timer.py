"""The row of a sweep names the timer that it armed, since workers with another timer do not receive
those tasks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    name = prefix + "yb_delay_sweep"
    if op.get_context().as_sql or ddl.lacks(op, name, schema, ["timer"]):
        column = sa.Column("timer", sa.String(16), nullable=False, server_default=sa.text("'eta'"))
        op.add_column(name, column, schema=schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.drop_columns(op, prefix + "yb_delay_sweep", schema, ["timer"])
