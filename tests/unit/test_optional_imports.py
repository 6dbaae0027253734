"""A process imports the modules of an optional feature only if it uses the feature."""

from __future__ import annotations

import os
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

@app.task
def remind(order): ...

remind.apply_async((7,), countdown=10)
write_modules()
"""
#: A worker that runs a task and stops.
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
KEYS = ["Y4u4ZQvcCmwmGO5qY2wVH_RvEu3mHPTqVfQ4Dzw9xpE="]


def among(loaded: str, others: list[str]) -> set[str]:
    """Return the modules of `others` that are, or have a part, among the loaded ones."""
    names = loaded.split()
    assert "delaytasks.client" in names
    return {each for each in others if any(f"{name}.".startswith(f"{each}.") for name in names)}


def run(tmp_path: Path, source: str, *command: str, **settings: object) -> str:
    """Run a project in a fresh interpreter; return the modules that it has imported."""
    (tmp_path / "shop.py").write_text(PROJECT.format(settings=settings) + source)
    (tmp_path / "modules").unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.check_call([sys.executable, *command], cwd=tmp_path, env=environment, timeout=120)
    return (tmp_path / "modules").read_text()


PRODUCERS: list[tuple[dict[str, object], set[str]]] = [({}, set())]
PRODUCERS += [({"encryption_keys": KEYS}, {"cryptography"})]
PRODUCERS += [({"durable_eta": True}, {"delaytasks.durable_eta"})]


@pytest.mark.parametrize(("settings", "expected"), PRODUCERS)
def test_a_producer_imports_only_the_features_of_its_settings(
    tmp_path: Path, settings: dict[str, object], expected: set[str]
) -> None:
    others = [name for name in OTHERS if not name.startswith("sqlalchemy.dialects.")]
    assert among(run(tmp_path, PRODUCER, "shop.py", **settings), OPTIONAL + others) == expected


@pytest.mark.slow
def test_a_worker_imports_no_feature_that_its_deployment_does_not_use(tmp_path: Path) -> None:
    run(tmp_path, PRODUCER, "shop.py")
    worker = run(tmp_path, WORKER, *"-m celery -A shop worker -P solo -l ERROR".split())
    # The client of Redis imports `cryptography`, and limits may be stored at any time.
    assert among(worker, OPTIONAL) <= {"cryptography", "delaytasks.limits"}


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


READ = """
import contextlib, io
from delaytasks.cli.main import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["--json", "{command}"], standalone_mode=False)
"""


@pytest.mark.slow
def test_commands_that_only_read_load_no_alembic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    subprocess.check_output([sys.executable, "-m", "delaytasks", "db", "upgrade"], timeout=120)
    for command in ("status", "check"):
        assert not loaded_by(READ.format(command=command), ["alembic"])
