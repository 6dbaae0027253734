"""`delaytasks up` in a folder of its own, with nothing configured: everything is embedded."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks.embedded import socket_path
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from delaytasks.cli.main import main; main()"]
#: Its processes are found by a variable that they all inherit.
MARK = "DELAYTASKS_TEST_UP"

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")

PROCESSORS = """
import time
from delaytasks import processor

@processor("note")
def note(body):
    with open("notes.txt", "a") as file:
        file.write(body["text"] + "\\n")

@processor("slow")
def slow(body):
    time.sleep(body["seconds"])
    note(body)
"""


class Up:
    """A folder of a user, and the `delaytasks up` that is running there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("DELAYTASKS_", "CELERY_"))}
        self.environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200", MARK: self.mark}
        (folder / "tasks.py").write_text(PROCESSORS)
        (folder / "celeryconfig.py").write_text("imports = ['tasks']\n")
        self.process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self, *options: str) -> None:
        self._starts += 1
        self._log = self.folder / f"up{self._starts}.log"
        with self._log.open("wb") as log:
            command = [*COMMAND, "up", "--concurrency", "1", *options]
            self.process = subprocess.Popen(command, cwd=self.folder, env=self.environ, stdout=log, stderr=log)
        self.wait_for("stop +Ctrl-C", 60)

    def stop(self, number: int = signal.SIGINT) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: str, deadline_s: float = 30) -> None:
        def is_there() -> bool:
            assert self.process is not None
            return bool(re.search(pattern, self.log())) or self.process.poll() is not None

        wait_until(is_there, deadline_s, f"{pattern!r} in the log", every_s=0.05)
        assert re.search(pattern, self.log()), self.log()

    def run(self, *arguments: str) -> Any:
        """A command in another shell of the folder."""
        command = [*COMMAND, *arguments, "--json"]
        done = subprocess.run(command, cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def schedule(self, tag: str, delay_s: float, **body: Any) -> str:
        task = self.run("schedule", tag, json.dumps(body), "--delay", f"{delay_s:g}")
        return str(task["id"])

    def notes(self) -> list[str]:
        file = self.folder / "notes.txt"
        return file.read_text().split() if file.exists() else []

    def processes(self) -> dict[int, str]:
        """The command line of every process that came from us."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue  # it ended, or is another user's
        return {pid: line for pid, line in found.items() if line}

    def pid_of(self, words: str) -> int:
        """The oldest process with these words: a worker's main process, not one of its pool."""
        return min(pid for pid, line in self.processes().items() if words in line)

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    started = Up(tmp_path)
    yield started
    started.end()


def is_done(up: Up, id: str) -> Callable[[], bool]:
    return lambda: bool(up.run("show", id)["status"] == "DONE")


def test_up_runs_tasks_restarts_a_killed_worker_and_stops_cleanly(up: Up) -> None:
    up.start("--no-flower")
    first = up.schedule("note", 1, text="first")
    wait_until(is_done(up, first), 20, "the first task")

    worker = up.pid_of(" worker ")
    os.kill(worker, signal.SIGKILL)
    up.wait_for("worker was killed by SIGKILL; it is started again in 1 s")
    wait_until(lambda: up.log().count(" ready.") == 2, 30, "the new worker", every_s=0.05)
    assert up.pid_of(" worker ") != worker
    second = up.schedule("note", 0, text="second")
    wait_until(is_done(up, second), 20, "the task after the kill")

    assert up.stop() == 0
    assert up.processes() == {}
    assert not socket_path(up.folder / ".delaytasks").parent.exists()
    assert up.notes() == ["first", "second"]
    stops = re.findall(r"(\w+) stopped$", up.log(), re.MULTILINE)
    assert stops == ["beat", "worker", "redis", "all"] or stops == ["beat", "worker", "all"]


def test_what_was_scheduled_survives_a_restart_of_up(up: Up) -> None:
    up.start("--no-flower")
    far = up.schedule("note", 3600, text="far")
    near = up.schedule("note", 8, text="near")
    assert up.stop(signal.SIGTERM) == 0
    assert up.notes() == []

    up.start("--no-flower")
    wait_until(is_done(up, near), 30, "the task that fell due meanwhile")
    assert up.run("show", far)["status"] == "NOT_COMPLETE"
    assert up.stop() == 0


def test_killing_up_itself_leaves_no_process(up: Up) -> None:
    up.start("--no-flower")
    assert len(up.processes()) >= 4
    up.stop(signal.SIGKILL)
    wait_until(lambda: not up.processes(), 20, "all processes to end", every_s=0.05)


def test_the_second_ctrl_c_does_not_wait_for_a_running_task(up: Up) -> None:
    up.start("--no-flower")
    id = up.schedule("slow", 0, seconds=120, text="slow")
    wait_until(lambda: up.run("show", id)["status"] == "RUNNING", 20, "the slow task to run")
    assert up.process is not None
    up.process.send_signal(signal.SIGINT)
    up.wait_for("Warm shutdown")
    assert up.stop() == 0
    assert up.processes() == {}


def test_a_second_up_in_the_same_folder_is_refused(up: Up) -> None:
    up.start("--no-flower")
    command = [*COMMAND, "up", "--no-flower"]
    again = subprocess.run(command, cwd=up.folder, env=up.environ, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "runs already" in again.stderr
    assert up.stop() == 0


def test_flower_shows_the_tasks_that_up_runs(up: Up) -> None:
    pytest.importorskip("flower")
    up.environ["FLOWER_UNAUTHENTICATED_API"] = "true"
    up.start()
    url = re.search(r"http://127\.0\.0\.1:\d+", up.log())
    assert url is not None
    up.schedule("note", 0, text="seen")

    def seen() -> bool:
        try:
            with urllib.request.urlopen(f"{url[0]}/api/tasks", timeout=5) as answer:
                return any(task["name"] == "note" for task in json.load(answer).values())
        except urllib.error.URLError:
            return False  # it is starting

    wait_until(seen, 30, "the task in Flower", every_s=0.2)
    assert up.stop() == 0
    assert up.processes() == {}
