"""The largest lateness and duration of a minute."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from delaytasks.storage import ddl

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

STATISTICS = "yb_delay_statistics"
COLUMNS = ("lateness_max_s", "duration_max_s")


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    for name in COLUMNS:
        if op.get_context().as_sql or ddl.lacks(op, prefix + STATISTICS, schema, [name]):
            op.add_column(prefix + STATISTICS, sa.Column(name, sa.Double()), schema=schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.drop_columns(op, prefix + STATISTICS, schema, COLUMNS)
