"""`delaytasks up` in an empty folder without configuration."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running import ROOT, Process, clean_environment, marked, output_of
from tests.waiting import wait_until

DELAYTASKS = [sys.executable, "-c", "from delaytasks.cli.main import main; main()"]
#: All processes that are started here inherit this variable, which identifies them.
MARK = "DELAYTASKS_TEST_UP"


PROCESSORS = """
import time
from delaytasks import processor

@processor("note")
def note(body):
    time.sleep(body.get("seconds", 0))
    with open("notes.txt", "a") as file:
        file.write(body["text"] + "\\n")
"""


class UserFolder:
    """A folder whose processes can be found and ended, including indirectly started ones."""

    process: Process

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        own = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", MARK: self.mark}
        self.env = clean_environment(**own)
        self.app: list[str] = []
        (folder / "tasks.py").write_text(PROCESSORS)
        (folder / "celeryconfig.py").write_text("imports = ['tasks']\n")

    def start(self, command: list[str], until: str) -> None:
        """Run a command, and wait for a line in its log."""
        log = self.folder / f"{secrets.token_hex(4)}.log"
        self.process = Process(command, self.env, log)
        self.wait_for(until, 60)

    def up(self, *options: str) -> None:
        command = [*DELAYTASKS, *self.app, "up", "--concurrency", "1", *options]
        self.start(command, "stop +Ctrl-C")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int | None:
        self.process.signal(number)
        wait_until(self.process.ended, 60, self.process.log)
        return self.process.status

    def wait_for(self, pattern: str, deadline_s: float = 30) -> str:
        """Wait for a pattern in the log, and return its match, or that of its group."""
        what = lambda: f"{pattern!r} in the log: {self.process.log()}"  # noqa: E731
        found: list[str] = wait_until(
            lambda: re.findall(pattern, self.process.log()), deadline_s, what, 0.05
        )
        return found[0]

    def run(self, *arguments: str) -> Any:
        """Run a command in another shell of the folder."""
        words = [*DELAYTASKS, *self.app, *arguments, "--json"]
        return json.loads(output_of(words, self.folder, self.env))

    def schedule(self, delay_s: float, **body: Any) -> str:
        task = self.run("schedule", "note", json.dumps(body), "--delay", f"{delay_s:g}")
        return str(task["id"])

    def wait_for_status(self, id: str, status: str) -> None:
        def has_status() -> bool:
            return bool(self.run("show", id)["status"] == status)

        wait_until(has_status, 30, lambda: f"the task to be {status}\n{self.process.log()}")

    def notes(self) -> list[str]:
        file = self.folder / "notes.txt"
        return file.read_text().split() if file.exists() else []

    def processes(self) -> dict[int, str]:
        """Return the command line of every process that was started here."""
        return marked(f"{MARK}={self.mark}")

    def wait_for_the_end(self) -> None:
        what = lambda: f"{self.processes()} to end; {self.process.log()}"  # noqa: E731
        wait_until(lambda: not self.processes(), 20, what, every_s=0.05)


HAS_PROC = Path("/proc/self/environ").exists()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_PROC, reason="needs /proc")]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UserFolder]:
    started = UserFolder(tmp_path)
    yield started
    for pid in started.processes():
        os.kill(pid, signal.SIGKILL)
    if "process" in vars(started):
        started.process.kill()


def test_tasks_survive_a_restart_of_up_and_the_second_ctrl_c_waits_for_none(up: UserFolder) -> None:
    up.up("--no-flower")
    far, near = up.schedule(3600, text="far"), up.schedule(8, text="near")
    assert up.stop(signal.SIGTERM) == 0
    assert up.notes() == []

    up.up("--no-flower")
    up.wait_for_status(near, "DONE")
    up.wait_for_status(far, "NOT_COMPLETE")
    up.wait_for_status(up.schedule(0, seconds=120, text="slow"), "RUNNING")
    up.process.signal(signal.SIGINT)
    up.wait_for("Warm shutdown")
    assert up.stop() == 0
    assert up.processes() == {}


#: An app of its own, with the same processor.
SHOP = """
from celery import Celery
from delaytasks import DelayTasks

app = Celery("shop")
DelayTasks(app)
import tasks
"""


@pytest.mark.quick
def test_up_runs_an_app_that_has_no_broker(up: UserFolder) -> None:
    (up.folder / "shop.py").write_text(SHOP)
    up.app = ["-A", "shop"]
    up.up("--no-flower", "--no-console")
    up.wait_for(r"for your own programs: export CELERY_BROKER_URL=delaytasks-files:")
    task = up.schedule(1, text="noted")  # through the same files
    up.wait_for_status(task, "DONE")
    assert up.run("show", task)["late_start"] is None
    assert up.stop() == 0
    assert up.notes() == ["noted"]


def test_up_serves_the_console_and_flower_and_leaves_no_process_if_it_is_killed(
    up: UserFolder,
) -> None:
    pytest.importorskip("flower")
    pytest.importorskip("waitress")
    up.env["FLOWER_UNAUTHENTICATED_API"] = "true"
    up.up()
    console = up.wait_for(r"console at (http://127\.0\.0\.1:\d+)/ ready")
    assert re.search(r"first user is admin with the password \S+", up.process.log())
    with urllib.request.urlopen(console, timeout=10) as answer:
        assert answer.url == f"{console}/login"
    flower = up.wait_for(r"flower +(http://127\.0\.0\.1:\d+)")
    up.schedule(0, text="seen")

    def seen() -> bool:
        try:
            with urllib.request.urlopen(f"{flower}/api/tasks", timeout=5) as answer:
                return any(task["name"] == "note" for task in json.load(answer).values())
        except urllib.error.URLError:
            return False  # it is still starting

    wait_until(seen, 30, "the task in Flower", every_s=0.2)
    assert len(up.processes()) >= 5
    up.stop(signal.SIGKILL)
    up.wait_for_the_end()


# -- The Procfile, as `honcho start` runs it ------------------------------------------------------


def test_honcho_runs_worker_and_beat_without_configuration(up: UserFolder) -> None:
    pytest.importorskip("honcho")
    lines = dict(line.split(": ", 1) for line in (ROOT / "Procfile").read_text().splitlines())
    assert list(lines) == ["worker", "beat", "flower"]
    assert all(f"celery -A delaytasks {name}" in line for name, line in lines.items())
    shutil.copy(ROOT / "Procfile", up.folder)
    up.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    up.run("db", "upgrade")
    # Without Flower, since its port may be in use on this machine.
    up.start([sys.executable, "-m", "honcho", "start", "worker", "beat"], " ready[.]")
    up.wait_for_status(up.schedule(1, text="noted"), "DONE")
    up.wait_for("beat: Starting...")
    up.stop()
    up.wait_for_the_end()
    assert up.notes() == ["noted"]
