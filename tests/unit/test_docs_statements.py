"""Statements, printed texts and files in the docs that no other test runs agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from celery import Celery
from freezegun import freeze_time
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from delaytasks import DelayTasks
from delaytasks.attachment import ENTRY_POINTS
from delaytasks.core import errors
from delaytasks.runtime import runtime_of
from delaytasks.storage.schema import build_schema
from delaytasks.testing import DelaysTester
from tests.doc_pages import PAGES, ROOT, block_beginning, blocks


def test_the_indexes_to_create_before_a_migration_are_those_of_the_schema() -> None:
    made = {
        str(CreateIndex(index).compile(dialect=postgresql.dialect()))
        for index in build_schema().tasks.indexes
    }
    block = block_beginning("docs/operations.md", "CREATE INDEX CONCURRENTLY")
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


def test_the_tree_of_errors_has_the_classes_below_the_first_one() -> None:
    first, *lines = block_beginning("docs/errors.md", "DelayTaskError").text.splitlines()
    root = getattr(errors, first)
    shown = {
        match[1]: match[2]
        for line in lines
        if (match := re.fullmatch(r"[├└]── (\w+)(?: \(an? (\w+)\))? +\S.*", line))
    }
    assert len(shown) == len(lines)
    assert shown == {
        name: next((base.__name__ for base in value.__bases__ if base is not root), None)
        for name, value in vars(errors).items()
        if isinstance(value, type) and root in value.__bases__
    }


def test_a_failed_assertion_has_the_text_in_the_documentation(tmp_path: Path) -> None:
    documented = block_beginning("docs/testing.md", "AssertionError: ").text
    delays = DelayTasks(Celery("shop", set_as_current=False), f"sqlite:///{tmp_path / 'a.sqlite3'}")
    with runtime_of(delays).store.database.begin() as connection:
        delays.create_tables(connection)
    with freeze_time("2027-01-01"), DelaysTester(delays) as tester:
        delays.schedule_delay("order.close", {"order": 7}, "30m", key="7")
        with pytest.raises(AssertionError) as raised:
            tester.assert_scheduled("order.close", key="7", body={"order": 8}, within="20m")
    assert f"AssertionError: {raised.value}\n" == documented
    delays.close()
