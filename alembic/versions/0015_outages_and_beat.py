"""Since when a worker lacks its broker and its timer, and when it last heard from beat."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl
from delaytasks.storage.types import UTCDateTime

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

WORKERS = "yb_delay_worker"
COLUMNS = ("broker_down_at", "timer_down_at", "beat_at")


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    for name in COLUMNS:
        if op.get_context().as_sql or ddl.lacks(op, prefix + WORKERS, schema, [name]):
            op.add_column(prefix + WORKERS, sa.Column(name, UTCDateTime()), schema=schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.drop_columns(op, prefix + WORKERS, schema, COLUMNS)
