"""Provide projects on SQLite whose only broker is kombu's in-memory transport."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delaytasks.db.engines import create_sqlite_file
from tests.integration.cli.project import HOSTILE, MODULE, Project


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Return a project whose database has no tables."""
    name = "shop_of_cli_tests"
    (tmp_path / f"{name}.py").write_text(MODULE.format(hostile=HOSTILE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    monkeypatch.setenv("CELERY_BROKER_URL", "memory://")
    yield Project(name, monkeypatch)
    module = sys.modules.pop(name, None)
    if module is not None:
        module.delays.close()


@pytest.fixture
def shop(bare: Project) -> Project:
    create_sqlite_file(bare.store.database.url)
    bare.store.schema.metadata.create_all(bare.store.database.tx)
    return bare


@pytest.fixture
def forget(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that removes this test's modules from `sys.modules` at teardown."""
    return lambda *names: request.addfinalizer(lambda: [sys.modules.pop(it, None) for it in names])
