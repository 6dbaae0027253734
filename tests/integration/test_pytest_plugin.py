"""The pytest plugin, in test runs of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.running import ROOT, clean_environment

CONFTEST = """
    import pytest
    from celery import Celery
    from sqlalchemy import create_engine

    from delaytasks import DelayTasks
    from delaytasks.testing import create_tables

    app = DelayTasks(Celery("shop", broker="amqp://localhost:1//"), "sqlite:///shop.sqlite3")
    closed = []
    app.processor("order.close")(closed.append)

    @pytest.fixture(scope="session", autouse=True)
    def tables():
        engine = create_engine("sqlite:///shop.sqlite3")
        with engine.begin() as connection:
            create_tables(connection, app)
        engine.dispose()
"""
TESTS = """
    import pytest
    from conftest import app, closed

    def test_it(delays, delays_tester):
        assert delays is app
        delays.schedule_delay("order.close", 7, "30m", key="7")
        delays_tester.assert_scheduled("order.close", key="7", within="30m")
        delays_tester.fast_forward("30m")
        assert closed == [7]

    class TestOther:
        @pytest.fixture
        def delays(self):
            closed.append("found")
            return app

        @pytest.fixture
        def delays_bind(self):
            closed.append("bound")

        def test_it(self, delays_tester):
            assert delays_tester.scheduled() == []
            assert sorted(closed[1:]) == ["bound", "found"]

    def test_difference(delays_tester):
        app.schedule_delay("order.close", {"order": 7}, "30m", key="7")
        delays_tester.assert_scheduled("order.close", key="7", body={"order": 8})
"""
ALONE = """
    import sys

    def test_it():
        names = {name.partition(".")[0] for name in sys.modules}
        assert not names & {"delaytasks", "celery", "kombu", "sqlalchemy"}
"""


def run_pytest(folder: Path, tests: str, conftest: str = "") -> str:
    """Run tests in an empty folder as a user does, and return the output."""
    files = {"pytest.ini": "[pytest]", "conftest.py": conftest, "test_shop.py": tests}
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=folder, env=clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_fixtures_find_the_instance_and_failures_show_their_line(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, TESTS, CONFTEST)
    assert "1 failed, 2 passed" in output, output
    asserted = output.partition("short test summary")[0]
    assert ">       delays_tester.assert_scheduled(" in asserted, output
    assert "E           body: expected {'order': 8}, got {'order': 7}" in asserted
    assert "tester.py" not in asserted.partition("Captured")[0]


def test_a_run_without_the_fixtures_imports_nothing_of_delaytasks(tmp_path: Path) -> None:
    assert "1 passed" in (output := run_pytest(tmp_path, ALONE)), output
