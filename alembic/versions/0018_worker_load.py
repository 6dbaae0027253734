"""The busy processes of a worker, and its version of delaytasks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

WORKERS = "yb_delay_worker"
COLUMNS = {"busy": sa.Integer(), "version": sa.String(32)}


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    for name, kind in COLUMNS.items():
        if op.get_context().as_sql or ddl.lacks(op, prefix + WORKERS, schema, [name]):
            op.add_column(prefix + WORKERS, sa.Column(name, kind), schema=schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.drop_columns(op, prefix + WORKERS, schema, list(COLUMNS))
