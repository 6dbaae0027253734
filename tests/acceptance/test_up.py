"""`delaytasks up` in an empty folder without configuration."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running import ROOT, Process, marked
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
        ours = ("DELAYTASKS_", "CELERY_")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.env |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200", MARK: self.mark}
        (folder / "tasks.py").write_text(PROCESSORS)
        (folder / "celeryconfig.py").write_text("imports = ['tasks']\n")
        self._starts = 0

    def start(self, command: list[str], until: str) -> None:
        """Run a command, and wait for a line in its log."""
        self._starts += 1
        self.process = Process(command, self.env, self.folder / f"{self._starts}.log")
        self.wait_for(until, 60)

    def up(self, *options: str, app: str = "") -> None:
        chosen = ["-A", app] if app else []
        self.start([*DELAYTASKS, *chosen, "up", "--concurrency", "1", *options], "stop +Ctrl-C")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int | None:
        self.process.signal(number)
        wait_until(self.process.ended, 60, self.log)
        return self.process.status

    def log(self) -> str:
        return self.process.log()

    def wait_for(self, pattern: str, deadline_s: float = 30) -> None:
        def is_there() -> bool:
            return bool(re.search(pattern, self.log())) or self.process.ended()

        wait_until(is_there, deadline_s, f"{pattern!r} in the log", every_s=0.05)
        assert re.search(pattern, self.log()), self.log()

    def run(self, *arguments: str) -> Any:
        """Run a command in another shell of the folder."""
        words = [*DELAYTASKS, *arguments, "--json"]
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def schedule(self, tag: str, delay_s: float, **body: Any) -> str:
        task = self.run("schedule", tag, json.dumps(body), "--delay", f"{delay_s:g}")
        return str(task["id"])

    def notes(self) -> list[str]:
        file = self.folder / "notes.txt"
        return file.read_text().split() if file.exists() else []

    def processes(self) -> dict[int, str]:
        """Return the command line of every process that was started here."""
        return marked(f"{MARK}={self.mark}")

    def pid_of(self, words: str) -> int:
        """Return the oldest process with these words, which is not a pool process."""
        return min(pid for pid, line in self.processes().items() if words in line)

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        if self._starts:
            self.process.kill()

    def is_done(self, id: str) -> Callable[[], bool]:
        return lambda: bool(self.run("show", id)["status"] == "DONE")


HAS_PROC = Path("/proc/self/environ").exists()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_PROC, reason="needs /proc")]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UserFolder]:
    started = UserFolder(tmp_path)
    yield started
    started.end()


def test_tasks_survive_a_restart_of_up_and_the_second_ctrl_c_waits_for_none(up: UserFolder) -> None:
    up.up("--no-flower")
    far = up.schedule("note", 3600, text="far")
    near = up.schedule("note", 8, text="near")
    assert up.stop(signal.SIGTERM) == 0
    assert up.notes() == []

    up.up("--no-flower")
    wait_until(up.is_done(near), 30, "the task that fell due meanwhile")
    assert up.run("show", far)["status"] == "NOT_COMPLETE"
    id = up.schedule("note", 0, seconds=120, text="slow")
    wait_until(lambda: up.run("show", id)["status"] == "RUNNING", 20, "the slow task to run")
    up.process.signal(signal.SIGINT)
    up.wait_for("Warm shutdown")
    assert up.stop() == 0
    assert up.processes() == {}


def test_killing_up_itself_leaves_no_process(up: UserFolder) -> None:
    up.up("--no-flower")
    assert len(up.processes()) >= 4
    up.stop(signal.SIGKILL)
    what = lambda: f"{up.processes()} to end; {up.log()}"  # noqa: E731
    wait_until(lambda: not up.processes(), 20, what, every_s=0.05)


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
    up.up("--no-flower", "--no-console", app="shop")
    export = re.search(r"in other shells: export (CELERY_BROKER_URL)=(\S+)", up.log())
    assert export is not None
    up.env[export[1]] = export[2]
    id = up.run("-A", "shop", "schedule", "note", '{"text": "noted"}', "--delay", "1")["id"]
    wait_until(lambda: up.run("-A", "shop", "show", str(id))["status"] == "DONE", 20, "the task")
    assert up.stop() == 0
    assert up.notes() == ["noted"]


def test_up_serves_the_console_with_a_login_and_flower_with_its_tasks(up: UserFolder) -> None:
    pytest.importorskip("flower")
    pytest.importorskip("waitress")
    up.env["FLOWER_UNAUTHENTICATED_API"] = "true"
    up.up()
    up.wait_for(r"console at http://127\.0\.0\.1:\d+/ ready")
    assert re.search(r"first user is admin with the password \S+", up.log())
    [console] = re.findall(r"console at (http://127\.0\.0\.1:\d+)/ ready", up.log())
    with urllib.request.urlopen(console, timeout=10) as answer:
        assert answer.url == f"{console}/login"
    [flower] = re.findall(r"flower +(http://127\.0\.0\.1:\d+)", up.log())
    up.schedule("note", 0, text="seen")

    def seen() -> bool:
        try:
            with urllib.request.urlopen(f"{flower}/api/tasks", timeout=5) as answer:
                return any(task["name"] == "note" for task in json.load(answer).values())
        except urllib.error.URLError:
            return False  # it is still starting

    wait_until(seen, 30, "the task in Flower", every_s=0.2)
    assert up.stop() == 0
    assert up.processes() == {}


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
    id = up.schedule("note", 1, text="noted")
    wait_until(up.is_done(id), 30, "the task")
    up.wait_for("beat: Starting...", 30)
    up.stop()
    wait_until(lambda: not up.processes(), 10, "all processes to end", every_s=0.05)
    assert up.notes() == ["noted"]
