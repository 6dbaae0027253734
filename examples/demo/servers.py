"""The broker, the workers and the beat of the demo, in a temporary folder."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from delaytasks.cli.up import die_with_parent

START_S = 30.0


class Servers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in ("one", "two"):
            self._celery(
                name,
                "worker",
                "--concurrency=2",
                f"--hostname={name}@shop",
                "--loglevel=INFO",
                "--without-gossip",
            )
        self._celery("beat", "beat", f"--schedule={self._folder / 'beat'}")
        for name in ("one", "two"):
            self._wait(name, functools.partial(self._says_ready, name))

    def kill(self, name: str) -> None:
        """Kill the worker with its pool, as a power failure does."""
        os.killpg(self._processes[name].pid, signal.SIGKILL)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass  # all processes have ended

    def log(self, name: str) -> str:
        path = self._folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _celery(self, name: str, *arguments: str) -> None:
        # celery -A delaytasks worker …
        self._start(
            name, [sys.executable, "-W", "ignore", "-m", "celery", "-A", "delaytasks", *arguments]
        )

    def _start(self, name: str, command: list[str]) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _says_ready(self, name: str) -> bool:
        return " ready." in self.log(name)

    def _wait(self, name: str, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not is_ready():
            if self._processes[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start; its log:\n{self.log(name)[-2000:]}")
            time.sleep(0.02)
