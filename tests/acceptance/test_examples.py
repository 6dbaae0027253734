"""Each example runs with one command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, output_of

#: An example, and a line that it prints when it has reached its end.
LAST_LINES = {
    "django_shop": "the admin shows tasks with the states",
    "fastapi_reminders": "reminders that wait: ada, bob",
    "flask_webhooks": "has booked the payment once",
    "heartbeats": "98 devices are connected, and each has one row",
    "moving_celery": "and so have the 5 old messages",
    "tenants": "one call cancels 12 tasks on 3 databases",
}
#: These have commands and tests of their own.
OTHERS = {"demo", "flask_shop"}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="it starts a Redis on a Unix socket")
@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_runs_with_one_command(name: str) -> None:
    environment = {**os.environ, "CELERY_BROKER_URL": "redis://nobody:1/0"}
    output = output_of([sys.executable, "-m", f"examples.{name}"], env=environment)
    assert LAST_LINES[name] in output


def test_each_example_is_tested() -> None:
    found = {path.parent.name for path in ROOT.glob("examples/*/*.py")}
    assert found == LAST_LINES.keys() | OTHERS


# -- the demo --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="it kills processes")
def test_the_demo_loses_nothing_and_says_so(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    environ = {**os.environ, "COLUMNS": "100", "CELERY_BROKER_URL": "redis://nobody:1/0"}
    said = output_of([sys.executable, "-m", "examples.demo", "--svg", picture], env=environ)
    assert "kill -9 of worker" in said
    assert "at the second attempt" in said
    assert "Nothing was lost, nothing ran early." in said
    svg = picture.read_text()
    assert svg.startswith("<svg")
    assert "@font-face" not in svg, "the picture loads nothing from another host"
