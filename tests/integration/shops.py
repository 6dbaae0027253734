"""The projects of the example shops, with a database of their own."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from delaytasks import DelayTasks
from tests.running import ROOT, clean_environment, output_of
from tests.services import own_database


class ExampleShop:
    """An example under `examples/`, whose broker does not exist."""

    def __init__(self, example: str, database_url: str) -> None:
        self.project = ROOT / "examples" / example
        #: Reads the same tables from the test process.
        self.delays = DelayTasks(Celery("reader", set_as_current=False), database_url)
        self._environment = clean_environment(
            PYTHONPATH=f"{self.project}{os.pathsep}{ROOT}",
            SHOP_DATABASE_URL=database_url,
            SHOP_PAY_WITHIN_S="2",
            CELERY_BROKER_URL="amqp://localhost:1//",
        )

    def command(self, *arguments: str) -> str:
        """Run a command of the project and return its output."""
        command = [sys.executable, "-W", "ignore", *arguments]
        return output_of(command, self.project, self._environment)

    def close(self) -> None:
        self.delays.close()


def fresh_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Yield the URL of an empty database that only one test uses."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'shop.sqlite3'}"
        return
    url, drop = own_database(request.getfixturevalue(f"{kind}_url"), f"_{secrets.token_hex(4)}")
    try:
        yield url
    finally:
        drop()
