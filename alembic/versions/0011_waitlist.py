"""Rename the table of the waitlists, whose former name did not say what it holds."""

from __future__ import annotations

from alembic import op

from delaytasks.storage import ddl

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

BEFORE, AFTER = "yb_delay_line", "yb_delay_waitlist"


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.rename_table(op, prefix, BEFORE, AFTER, schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    ddl.rename_table(op, prefix, AFTER, BEFORE, schema)
