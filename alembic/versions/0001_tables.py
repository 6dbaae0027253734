"""The tables, as `delaytasks/db/schema.py` describes them.

Until the first release this revision follows the schema. Later revisions change what it has made.
"""

from __future__ import annotations

from alembic import op

from delaytasks.db import migrations

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade(prefix: str = "", schema: str | None = None) -> None:
    migrations.create_tables(op, prefix, schema)


def downgrade(prefix: str = "", schema: str | None = None) -> None:
    migrations.drop_tables(op, prefix, schema)
