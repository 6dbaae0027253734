"""A process imports the modules of an optional feature only if it uses the feature."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: A deployment with one database and the timer `eta`, without limits, callbacks, encryption and
#: encryption, does not need these modules.
OPTIONAL = (
    "cronsim",
    "cryptography",
    "sentry_sdk",
    "requests",
    "delaytasks.console",
    "delaytasks.durable_eta",
    "delaytasks.file_broker",
    "delaytasks.forecast",
    "delaytasks.http_api",
    "delaytasks.limits",
    "delaytasks.metrics",
    "delaytasks.recurrence",
    "delaytasks.testing",
    "delaytasks.timers.direct",
    "delaytasks.timers.redis_timer",
    "delaytasks.timers.redis_timer",
    "delaytasks.timers.redis_timer",
    "delaytasks.timers.redis_timer",
    "delaytasks.webhooks",
    "delaytasks.worker.redis_poller",
    "delaytasks.worker.table_poller",
)
PROJECT = """
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
delays.schedule_delay("mail", {"to": "ada"}, 10)
runs = [name for name in sys.modules if name.startswith("delaytasks.execution.")]
assert runs == ["delaytasks.execution.policy_cache"], runs
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

@signals.worker_shutdown.connect
def stopped(**_):
    assert delays.get(started[0].id).status.name == "DONE"
    write_modules()
"""

#: A worker that finds a schedule in the database, and runs a task of it.
RECURRING_WORKER = """
@delays.processor("mail")
def send(body):
    assert "delaytasks.recurrence" in sys.modules
    write_modules()
    state.should_stop = 0

@signals.worker_ready.connect
def schedule(**_):
    assert "delaytasks.recurrence" not in sys.modules
    delays.recurring.set("mail", "mail", every="1s")
    for name in [name for name in sys.modules if name.startswith("delaytasks.recurrence")]:
        del sys.modules[name]
"""


def imported_by(tmp_path: Path, source: str, command: list[str], settings: object) -> set[str]:
    """Run a project in a fresh interpreter; return the optional modules that it has imported."""
    (tmp_path / "shop.py").write_text(PROJECT.format(settings=settings) + source)
    (tmp_path / "modules").unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "modules").exists(), run.stderr
    names = (tmp_path / "modules").read_text().split()
    assert "delaytasks.scheduling.producer" in names
    return {
        module
        for module in OPTIONAL
        if any(name == module or name.startswith(f"{module}.") for name in names)
    }


def imported_by_a_producer(tmp_path: Path, **settings: object) -> set[str]:
    """Make the tables, and schedule a task."""
    return imported_by(tmp_path, PRODUCER, ["shop.py"], settings)


def imported_by_a_worker(tmp_path: Path, source: str = WORKER, **settings: object) -> set[str]:
    """Start Celery's worker, which runs its tasks and stops."""
    command = ["-m", "celery", "-A", "shop", "worker", "-P", "solo", "-l", "ERROR"]
    imported = imported_by(tmp_path, source, command, settings)
    # The client of Redis imports `cryptography`, and limits may be stored at any time.
    return imported - {"cryptography", "delaytasks.limits"}


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


def test_durable_celery_tasks_are_imported_only_if_a_task_is_called_with_a_delay(
    tmp_path: Path,
) -> None:
    source = PRODUCER.replace("write_modules()", "") + CELERY_PRODUCER
    assert imported_by(tmp_path, source, ["shop.py"], {}) == set()
    (tmp_path / "shop.sqlite3").unlink()
    imported = imported_by(tmp_path, source, ["shop.py"], {"durable_eta": True})
    assert imported == {"delaytasks.durable_eta"}


@pytest.mark.slow
def test_recurring_schedules_are_imported_by_a_worker_that_finds_one_in_the_database(
    tmp_path: Path,
) -> None:
    assert imported_by_a_producer(tmp_path) == set()
    imported = imported_by_a_worker(tmp_path, RECURRING_WORKER)
    assert imported == {"cronsim", "delaytasks.recurrence"}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import delaytasks.console.application", "the console needs more packages (flask)"),
        ("import delaytasks.http_api.routes", "the HTTP API needs more packages (flask)"),
    ],
)
def test_a_mount_without_its_packages_names_the_extra(statement: str, said: str) -> None:
    code = f"import sys; sys.modules['flask'] = None; {statement}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    extra = "console" if "console" in said else "api"
    error = f"ConfigError: {said}: pip install 'delaytasks[{extra}]'"
    assert ran.stderr.splitlines()[-1].endswith(error), ran.stderr
