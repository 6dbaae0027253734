"""`import delaytasks` loads only the modules that a process needs to schedule tasks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Alembic and its dependencies, the ORM, dialects, HTTP, the command line, frameworks, and optional
#: packages.
OTHERS = (
    "alembic",
    "mako",
    "pygments",
    "sqlalchemy.orm",
    "sqlalchemy.dialects.mysql",
    "sqlalchemy.dialects.postgresql",
    "sqlalchemy.dialects.sqlite",
    "psycopg2",
    "pymysql",
    "requests",
    "redis",
    "rich",
    "cryptography",
    "flask",
    "delaytasks.cli",
    "delaytasks.contrib",
    "delaytasks.execution.runner",
)
#: The first call that schedules or looks up a task loads these modules.
WITH_THE_FIRST_CALL = ("delaytasks.runtime", "delaytasks.storage")
SCHEDULE = """
from celery import Celery
from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of
delays = DelayTasks(Celery("shop", broker="memory://"), "sqlite:///{path}")
runtime_of(delays).store.schema.metadata.create_all(runtime_of(delays).store.database.tx)
runtime_of(delays).checks.check_ready()
assert delays.cancel(delays.schedule_delay("mail", {{}}, 3600))
"""
READ = """
import contextlib, io
from delaytasks.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["--json", "{command}"], standalone_mode=False)
"""


def loaded_by(code: str, others: tuple[str, ...] = OTHERS) -> set[str]:
    """Return the modules of `others` that `code` loads in a fresh interpreter.

    Modules that `import celery` and `import sqlalchemy` load do not count.
    """
    script = (
        f"import sys, celery, sqlalchemy\nbefore = set(sys.modules)\n{code}\n"
        "print(*(set(sys.modules) - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    names = run.stdout.split()
    assert "delaytasks.client" in names
    return {
        other
        for other in others
        if any(name == other or name.startswith(f"{other}.") for name in names)
    }


def test_importing_loads_nothing_that_only_others_need() -> None:
    assert loaded_by("import delaytasks", OTHERS + WITH_THE_FIRST_CALL) == set()


def test_a_process_that_schedules_loads_neither_alembic_nor_other_drivers(tmp_path: Path) -> None:
    others = set(OTHERS) - {name for name in OTHERS if name.startswith("sqlalchemy.dialects.")}
    assert not loaded_by(SCHEDULE.format(path=tmp_path / "shop.sqlite3"), tuple(others))


def test_the_rules_of_tasks_load_no_storage() -> None:
    """The contracts of imports cannot show this, since they count imports for type checkers."""
    rules = "delaytasks.execution.chunk_runner, delaytasks.maintenance.sweeper"
    assert loaded_by(f"import delaytasks.client, {rules}", ("delaytasks.storage",)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "check"])
def test_commands_that_only_read_load_no_alembic(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    subprocess.run(
        [sys.executable, "-m", "delaytasks", "db", "upgrade"],
        check=True,
        capture_output=True,
        timeout=120,
    )
    assert "alembic" not in loaded_by(READ.format(command=command))
