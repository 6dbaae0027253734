"""A process imports the modules of an optional feature only if it uses the feature."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: What a process that schedules tasks does not need: Alembic and its dependencies, dialects, HTTP,
#: the command line, frameworks, and optional packages.
OTHERS = """
alembic mako pygments sqlalchemy.orm psycopg2 pymysql requests redis rich cryptography flask
delaytasks.cli delaytasks.contrib delaytasks.run delaytasks.worker sqlalchemy.dialects.mysql
sqlalchemy.dialects.postgresql
""".split()
#: The first call that schedules or looks up a task loads these modules.
WITH_THE_FIRST_CALL = ["delaytasks.runtime", "delaytasks.db", "sqlalchemy.dialects.sqlite"]
#: A producer with one database and the timer `eta`, without limits, callbacks and encryption, does
#: not need these modules.
OPTIONAL = """
cronsim cryptography sentry_sdk requests delaytasks.console delaytasks.durable_eta
delaytasks.broker.files delaytasks.operate.forecast delaytasks.http_api delaytasks.limits
delaytasks.operate.metrics delaytasks.recurring delaytasks.testing
delaytasks.broker.redis_timer delaytasks.callbacks
""".split()
PROJECT = """
import sys
from pathlib import Path
from celery import Celery
from sqlalchemy import create_engine
from delaytasks import DelayTasks
from delaytasks.operate.checks import check_ready
from delaytasks.runtime import runtime_of

PATH = Path(__file__).parent
app = Celery("shop", broker="memory://")
delays = DelayTasks(app, f"sqlite:///{PATH}/shop.sqlite3", **SETTINGS)

with create_engine(delays.settings.database_url).begin() as connection:
    runtime_of(delays).store.schema.metadata.create_all(connection)
check_ready(runtime_of(delays))
assert delays.cancel(delays.schedule_delay("mail", {"to": "ada"}, 10))

@app.task
def remind(order): ...

remind.apply_async((7,), countdown=10)
(PATH / "modules").write_text("\\n".join(sys.modules))
"""
KEYS = ["Y4u4ZQvcCmwmGO5qY2wVH_RvEu3mHPTqVfQ4Dzw9xpE="]


def among(loaded: str, others: list[str]) -> set[str]:
    """Return the modules of `others` that are, or have a part, among the loaded ones."""
    names = loaded.split()
    assert "delaytasks.client" in names
    return {each for each in others if any(f"{name}.".startswith(f"{each}.") for name in names)}


def test_a_producer_imports_only_the_features_of_its_settings(tmp_path: Path) -> None:
    settings = {"encryption_keys": KEYS, "durable_eta": True}
    (tmp_path / "shop.py").write_text(PROJECT.replace("SETTINGS", repr(settings)))
    subprocess.check_call([sys.executable, "shop.py"], cwd=tmp_path, timeout=120)
    others = [name for name in OTHERS if not name.startswith("sqlalchemy.dialects.")]
    loaded = among((tmp_path / "modules").read_text(), OPTIONAL + others)
    assert loaded == {"cryptography", "delaytasks.durable_eta"}


@pytest.mark.parametrize(
    ("module", "needs"), [("console.application", "console"), ("http_api.routes", "HTTP API")]
)
def test_a_mount_without_its_packages_names_the_extra(module: str, needs: str) -> None:
    code = f"import sys; sys.modules['flask'] = None; import delaytasks.{module}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    error = f"ConfigError: the {needs} needs more packages (flask): pip install 'delaytasks["
    assert f"{error}{needs.split()[-1].lower()}]'" in ran.stderr.splitlines()[-1]


# -- an import loads only the modules that are needed ---------------------------------------------


def loaded_by(code: str, others: list[str]) -> set[str]:
    """Return the modules of `others` that `code` loads in a fresh interpreter.

    Modules that `import celery` and `import sqlalchemy` load do not count.
    """
    script = (
        f"import sys, celery, sqlalchemy\nbefore = set(sys.modules)\n{code}\n"
        "print(*(set(sys.modules) - before))"
    )
    return among(subprocess.check_output([sys.executable, "-c", script], text=True), others)


#: What the help of the command line does not need.
OF_COMMANDS = """
rich alembic.command delaytasks.db delaytasks.cli.status delaytasks.cli.up
delaytasks.worker.worker_runtime
""".split()
#: The rules of tasks load no storage. The contracts of imports cannot show this, since they count
#: imports for type checkers.
RULES = "delaytasks.client, delaytasks.run.chunk, delaytasks.worker.sweep"
IMPORTS = {"delaytasks": OTHERS + WITH_THE_FIRST_CALL, "delaytasks.cli.main": OF_COMMANDS}
IMPORTS[RULES] = ["delaytasks.db"]


@pytest.mark.parametrize(("modules", "others"), IMPORTS.items(), ids=[*IMPORTS])
def test_an_import_loads_nothing_that_only_others_need(modules: str, others: list[str]) -> None:
    assert loaded_by(f"import {modules}", others) == set()
