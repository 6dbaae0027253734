"""Run the command line on projects of their own.

Their database is SQLite, and their only broker is kombu's in-memory transport.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import insert

from delaytasks import DelayedTask, DelayTasks, Status
from delaytasks.cli.main import main
from delaytasks.db.store import Store
from delaytasks.db.types import db_now_plus
from delaytasks.runtime import runtime_of
from tests.running import ROOT
from tests.world.recording import make_tables, set_columns

HOSTILE = "\x1b[31mred\x1b[0m [red]markup[/red] \x9b1m \u202e \r\nforged line"
FAR = "2999-01-01T00:00:00Z"

MODULE = """
import os, signal, time
from celery import Celery
from delaytasks import DelayTasks

app = Celery("shop", set_as_current=False)
delays = DelayTasks(app, tags="any")

@delays.processor("ok")
def ok(body): pass

@delays.processor("mail", queue="letters")
def mail(body): pass

@delays.processor("bad")
def bad(body): raise ValueError({hostile!r})

@delays.processor("noisy")
def noisy(body): print("noise")

stopped = []

@delays.processor("stop")
def stop(body):
    if not stopped:  # the first task that runs
        stopped.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        while signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
            time.sleep(0.01)  # the main thread begins to handle the signal
        time.sleep(0.2)

@delays.processor("long")
def long(body, task):
    first = lease = delays.get(task.id).lease_until
    ends = time.monotonic() + 10
    while lease == first:
        assert time.monotonic() < ends, "nobody renewed the lease"
        lease = delays.get(task.id).lease_until
"""

RUN = "from delaytasks.cli.main import main; main(prog_name='delaytasks')"


class Project:
    def __init__(self, name: str, patch: pytest.MonkeyPatch) -> None:
        self.name = name
        self.patch = patch

    def __call__(self, *args: str, typed: str | bytes | None = None, color: bool = False) -> Result:
        """Run a command. With `color`, its output is that on a terminal."""
        command = ["-A", self.name, *args]
        result = CliRunner().invoke(main, command, input=typed, color=color)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result

    def process(self, *command: str, **pipes: Any) -> subprocess.Popen[str]:
        """Start Python in the folder of the project."""
        pipes = pipes or dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.getcwd()}"}
        return subprocess.Popen([sys.executable, *command], env=env, text=True, **pipes)

    def is_at_terminal(self) -> None:
        """Let the next commands take their input and output for a terminal."""
        self.patch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True)
        self.patch.setenv("TERM", "xterm")

    def json(self, *arguments: str, exit_code: int = 0, typed: str | bytes | None = None) -> Any:
        """Return the document on stdout, which contains nothing else."""
        result = self(*arguments, "--json", typed=typed)
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    def error(self, *arguments: str, exit_code: int, typed: str | None = None) -> Any:
        """Return the document on stderr, which contains nothing else."""
        result = self(*arguments, "--json", typed=typed)
        assert result.exit_code == exit_code, result.output
        found = json.loads(result.stderr)
        assert exit_code != 2 or not result.stdout, "nothing was done"
        assert found.keys() - {"argument"} == {"error", "type"}
        # The text output reports the same error.
        plain = self(*arguments, typed=typed)
        assert plain.exit_code == exit_code
        assert "Error: " in plain.stderr
        assert "Traceback" not in plain.output
        return found

    def wrong(self, *arguments: str) -> str:
        """Return the argument that is invalid, or the type of an error in the usage."""
        found = self.error(*arguments, exit_code=2)
        return str(found.get("argument", found["type"]))

    @property
    def delays(self) -> DelayTasks:
        made: DelayTasks = import_module(self.name).delays
        return made

    @property
    def store(self) -> Store:
        return runtime_of(self.delays).store

    def schedule(
        self, tag: str = "ok", delay: float = 0, body: Any = None, **options: Any
    ) -> DelayedTask:
        return self.delays.schedule_delay(tag, body, delay, **options)

    def insert(self, **values: Any) -> None:
        """Insert a row directly, as another program does."""
        row = {"tag": "ok", "message_body": "{}", **values}
        with self.store.database.begin() as connection:
            connection.execute(insert(self.store.schema.tasks).values(**row))

    def hold(self, *tasks: DelayedTask) -> None:
        """Let these tasks be held as the claim of a worker holds them."""
        for task in tasks:
            set_columns(self.store, "tasks", {"id": task.id}, status=int(Status.HELD))

    def overdue(self, tag: str = "ok", **options: Any) -> DelayedTask:
        """Schedule a task that was due 90 s ago."""
        task = self.schedule(tag, **options)
        set_columns(self.store, "tasks", {"id": task.id}, expected_time=db_now_plus(-90))
        return task

    def status(self, task: DelayedTask) -> Status:
        return self.delays.get(task.id).status


def write(name: str, text: str) -> str:
    Path(f"{name}.py").write_text(text)
    return name


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
    make_tables(bare.delays)
    return bare


@pytest.fixture
def forget(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that removes this test's modules from `sys.modules` at teardown."""
    return lambda *names: request.addfinalizer(lambda: [sys.modules.pop(it, None) for it in names])
