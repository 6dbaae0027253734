"""Statements and files in the docs that no other test runs agree with the code.

The YAML of docs/metrics.md, the crontab line and printed output are not checked: only the program
that reads them could do so.
"""

from __future__ import annotations

import re

from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from delaytasks.attachment import ENTRY_POINTS
from delaytasks.storage.schema import build_schema
from tests.unit.test_docs import ROOT, blocks


def test_the_indexes_to_create_before_a_migration_are_those_of_the_schema() -> None:
    made = {
        str(CreateIndex(index).compile(dialect=postgresql.dialect()))
        for index in build_schema().tasks.indexes
    }
    [block] = [
        block
        for block in blocks(ROOT / "docs/operations.md")
        if block.text.startswith("CREATE INDEX CONCURRENTLY")
    ]
    statements = (
        re.sub(r"\s+", " ", block.text.replace(" CONCURRENTLY", "")).strip(" ;").split("; ")
    )
    assert len(statements) == 3
    assert set(statements) <= made


def test_the_entry_point_of_processors_is_the_one_that_workers_load() -> None:
    [block] = [block for block in blocks(ROOT / "docs/worker.md") if block.language == "toml"]
    assert block.text.startswith(f'[project.entry-points."{ENTRY_POINTS}"]\n')
