"""A user's folder with processors and a celeryconfig.py, and its processes."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.running import marked
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
DELAYTASKS = [sys.executable, "-c", "from delaytasks.cli.main import main; main()"]
#: All processes that are started here inherit this variable, which identifies them.
MARK = "DELAYTASKS_TEST_UP"


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


class UserFolder:
    """A folder whose processes can be found and ended, including indirectly started ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        self.environ = {
            k: v for k, v in os.environ.items() if not k.startswith(("DELAYTASKS_", "CELERY_"))
        }
        self.environ |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200", MARK: self.mark}
        (folder / "tasks.py").write_text(PROCESSORS)
        (folder / "celeryconfig.py").write_text("imports = ['tasks']\n")
        self.process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def start(self, command: list[str], until: str) -> None:
        """Run a command, and wait for a line in its log."""
        self._starts += 1
        self._log = self.folder / f"{self._starts}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=self.environ, stdout=log, stderr=log
            )
        self.wait_for(until, 60)

    def up(self, *options: str, app: str = "") -> None:
        chosen = ["-A", app] if app else []
        self.start([*DELAYTASKS, *chosen, "up", "--concurrency", "1", *options], "stop +Ctrl-C")

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
        """Run a command in another shell of the folder."""
        command = [*DELAYTASKS, *arguments, "--json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False
        )
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
        if self.process is not None:
            self.process.wait(10)

    def is_done(self, id: str) -> Callable[[], bool]:
        return lambda: bool(self.run("show", id)["status"] == "DONE")
