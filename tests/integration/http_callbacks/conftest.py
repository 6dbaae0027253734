"""Fixtures of the tests of HTTP callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of
from delaytasks.storage import migrations
from tests.integration.http_callbacks.caller import SECRETS, Caller
from tests.recording import delays_on, record


@pytest.fixture
def caller() -> Caller:
    return Caller()


@pytest.fixture
def delays(tmp_path: Path) -> Iterator[DelayTasks]:
    made = delays_on(
        f"sqlite:///{tmp_path / 'test.sqlite3'}",
        callback_allow="127.0.0.1",
        callback_secrets=SECRETS[0],
    )
    migrations.upgrade(runtime_of(made).store.database)
    record(made)
    yield made
    made.close()
