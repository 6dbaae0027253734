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
from tests.unit.test_docs import PAGES, ROOT, blocks


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


def test_each_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    files = (ROOT / "docs/images").rglob("*.*")
    unused = [str(file) for file in files if str(file.relative_to(ROOT / "docs")) not in pages]
    assert unused == []


def test_the_gallery_has_each_picture_of_the_console_once_with_a_sentence() -> None:
    page = (ROOT / "docs/console-gallery.md").read_text()
    shown = re.findall(r"^!\[[^]]+\]\(images/(\S+)\)\n+([A-Z*`].*?\.)$", page, re.MULTILINE)
    files = [f"console/{file.name}" for file in (ROOT / "docs/images/console").iterdir()]
    assert sorted(name for name, _ in shown) == sorted([*files, "report.png"])
