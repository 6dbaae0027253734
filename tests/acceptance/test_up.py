"""`delaytasks up` in an empty folder without configuration."""

from __future__ import annotations

import json
import os
import re
import secrets
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

    def up(self, *options: str) -> None:
        command = [*DELAYTASKS, *self.app, "up", "--concurrency", "1", *options]
        self.process = Process(command, self.env, self.folder / f"{secrets.token_hex(4)}.log")
        self.wait_for("stop +Ctrl-C", 60)

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


#: An app of its own without a broker, with the same processor.
SHOP = """
from celery import Celery
from delaytasks import DelayTasks

app = Celery("shop")
DelayTasks(app)
import tasks
"""


@pytest.mark.quick
def test_tasks_survive_a_restart_of_up_and_the_second_ctrl_c_waits_for_none(up: UserFolder) -> None:
    (up.folder / "shop.py").write_text(SHOP)
    up.app = ["-A", "shop"]
    up.up("--no-flower", "--no-console")
    up.wait_for(r"for your own programs: export CELERY_BROKER_URL=delaytasks-files:")
    far, near = up.schedule(3600, text="far"), up.schedule(8, text="near")
    assert up.stop(signal.SIGTERM) == 0
    assert up.notes() == []

    up.up("--no-flower", "--no-console")
    up.wait_for_status(near, "DONE")
    up.wait_for_status(far, "NOT_COMPLETE")
    slow = up.schedule(1, seconds=120, text="slow")  # through the broker's files
    up.wait_for_status(slow, "RUNNING")
    assert up.run("show", slow)["late_start"] is None
    up.process.signal(signal.SIGINT)
    up.wait_for("Warm shutdown")
    assert up.stop() == 0
    assert up.processes() == {}


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
    wait_until(lambda: not up.processes(), 20, lambda: str(up.processes()), every_s=0.05)
