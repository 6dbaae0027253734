"""A process imports the modules of an optional feature only if it uses the feature."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
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
#: A deployment with one database and the timer `eta`, without limits, callbacks and encryption,
#: does not need these modules.
OPTIONAL = """
cronsim cryptography sentry_sdk requests delaytasks.console delaytasks.durable_eta
delaytasks.broker.files delaytasks.operate.forecast delaytasks.http_api delaytasks.limits
delaytasks.operate.metrics delaytasks.recurring delaytasks.testing
delaytasks.broker.redis_timer delaytasks.callbacks
""".split()
PROJECT = """
import atexit
import sys
from pathlib import Path
from celery import Celery, signals
from celery.worker import state
from sqlalchemy import create_engine
from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of

PATH = Path(__file__).parent
app = Celery("shop", broker="memory://")
delays = DelayTasks(app, f"sqlite:///{{PATH}}/shop.sqlite3", **{settings})

def write_modules():
    (PATH / "modules").write_text("\\n".join(sys.modules))
"""
PRODUCER = """
with create_engine(delays.settings.database_url).begin() as connection:
    runtime_of(delays).store.schema.metadata.create_all(connection)
runtime_of(delays).checks.check_ready()
assert delays.cancel(delays.schedule_delay("mail", {"to": "ada"}, 10))
write_modules()
"""
WORKER = """
started = []

@delays.processor("mail")
def send(body):
    state.should_stop = 0

@signals.worker_ready.connect
def schedule(**_):
    started.append(delays.schedule_delay("mail", {"to": "ada"}, 1))

@atexit.register  # after the worker has waited for rows that another thread settles
def stopped():
    assert delays.get(started[0].id).status.name == "DONE"
    write_modules()
"""

#: A worker that finds a schedule in the database, and runs a task of it.
RECURRING_WORKER = """
@delays.processor("mail")
def send(body):
    assert "delaytasks.recurring" in sys.modules
    write_modules()
    state.should_stop = 0

@signals.worker_ready.connect
def schedule(**_):
    assert "delaytasks.recurring" not in sys.modules
    delays.recurring.set("mail", "mail", every="1s")
    for name in [name for name in sys.modules if name.startswith("delaytasks.recurring")]:
        del sys.modules[name]
"""


def among(loaded: str, others: list[str]) -> set[str]:
    """Return the modules of `others` that are, or have a part, among the loaded ones."""
    names = loaded.split()
    assert "delaytasks.client" in names
    return {each for each in others if any(f"{name}.".startswith(f"{each}.") for name in names)}


def loaded_by(code: str, others: list[str]) -> set[str]:
    """Return the modules of `others` that `code` loads in a fresh interpreter.

    Modules that `import celery` and `import sqlalchemy` load do not count.
    """
    script = (
        f"import sys, celery, sqlalchemy\nbefore = set(sys.modules)\n{code}\n"
        "print(*(set(sys.modules) - before))"
    )
    return among(subprocess.check_output([sys.executable, "-c", script], text=True), others)


def imported_by(
    tmp_path: Path, source: str, command: list[str], settings: object, others: Sequence[str] = ()
) -> set[str]:
    """Run a project in a fresh interpreter; return the optional modules that it has imported."""
    (tmp_path / "shop.py").write_text(PROJECT.format(settings=settings) + source)
    (tmp_path / "modules").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.check_call([sys.executable, *command], cwd=tmp_path, env=environment, timeout=120)
    return among((tmp_path / "modules").read_text(), [*OPTIONAL, *others])


def imported_by_a_producer(tmp_path: Path, **settings: object) -> set[str]:
    """Make the tables, and schedule and cancel a task."""
    others = [name for name in OTHERS if not name.startswith("sqlalchemy.dialects.")]
    return imported_by(tmp_path, PRODUCER, ["shop.py"], settings, others)


def imported_by_a_worker(tmp_path: Path, source: str = WORKER, **settings: object) -> set[str]:
    """Start Celery's worker, which runs its tasks and stops."""
    command = ["-m", "celery", "-A", "shop", "worker", "-P", "solo", "-l", "ERROR"]
    imported = imported_by(tmp_path, source, command, settings)
    # The client of Redis imports `cryptography`, and limits may be stored at any time.
    return imported - {"cryptography", "delaytasks.limits"}


@pytest.mark.slow
def test_without_optional_features_none_of_their_modules_is_imported(tmp_path: Path) -> None:
    assert imported_by_a_producer(tmp_path) == set()
    assert imported_by_a_worker(tmp_path) == set()


def test_encryption_keys_import_encryption_only(tmp_path: Path) -> None:
    keys = ["Y4u4ZQvcCmwmGO5qY2wVH_RvEu3mHPTqVfQ4Dzw9xpE="]
    imported = imported_by_a_producer(tmp_path, encryption_keys=keys)
    assert imported == {"cryptography"}


#: A process that calls a Celery task with a delay.
CELERY_PRODUCER = """
@app.task
def remind(order): ...

remind.apply_async((7,), countdown=10)
write_modules()
"""


def test_durable_celery_tasks_are_imported_by_a_call_with_a_delay(tmp_path: Path) -> None:
    source = PRODUCER.replace("write_modules()", "") + CELERY_PRODUCER
    assert imported_by(tmp_path, source, ["shop.py"], {}) == set()
    (tmp_path / "shop.sqlite3").unlink()
    imported = imported_by(tmp_path, source, ["shop.py"], {"durable_eta": True})
    assert imported == {"delaytasks.durable_eta"}


@pytest.mark.slow
def test_recurring_schedules_are_imported_by_a_worker_that_finds_one(tmp_path: Path) -> None:
    assert imported_by_a_producer(tmp_path) == set()
    imported = imported_by_a_worker(tmp_path, RECURRING_WORKER)
    assert imported == {"cronsim", "delaytasks.recurring"}


@pytest.mark.parametrize(
    ("module", "said", "extra"),
    [
        ("console.application", "the console needs more packages (flask)", "console"),
        ("http_api.routes", "the HTTP API needs more packages (flask)", "api"),
    ],
)
def test_a_mount_without_its_packages_names_the_extra(module: str, said: str, extra: str) -> None:
    code = f"import sys; sys.modules['flask'] = None; import delaytasks.{module}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    error = f"ConfigError: {said}: pip install 'delaytasks[{extra}]'"
    assert ran.stderr.splitlines()[-1].endswith(error), ran.stderr


# -- `import delaytasks` loads only the modules that a process needs to schedule tasks -----------

READ = """
import contextlib, io
from delaytasks.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["--json", "{command}"], standalone_mode=False)
"""


def test_importing_loads_nothing_that_only_others_need() -> None:
    assert loaded_by("import delaytasks", OTHERS + WITH_THE_FIRST_CALL) == set()


def test_the_rules_of_tasks_load_no_storage() -> None:
    """The contracts of imports cannot show this, since they count imports for type checkers."""
    rules = "delaytasks.run.chunk, delaytasks.worker.sweep"
    assert loaded_by(f"import delaytasks.client, {rules}", ["delaytasks.db"]) == set()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["status", "check"])
def test_commands_that_only_read_load_no_alembic(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    subprocess.check_output([sys.executable, "-m", "delaytasks", "db", "upgrade"], timeout=120)
    assert not loaded_by(READ.format(command=command), ["alembic"])
