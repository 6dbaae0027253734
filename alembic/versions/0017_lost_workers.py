"""When a worker was lost."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl
from delaytasks.storage.types import UTCDateTime

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

WORKERS = "yb_delay_worker"
COLUMNS = ("lost_at",)


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    for name in COLUMNS:
        if op.get_context().as_sql or ddl.lacks(op, prefix + WORKERS, schema, [name]):
            op.add_column(prefix + WORKERS, sa.Column(name, UTCDateTime()), schema=schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.drop_columns(op, prefix + WORKERS, schema, COLUMNS)
