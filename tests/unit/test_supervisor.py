"""The supervisor starts children in order, restarts dead ones, and stops in reverse order."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from delaytasks.cli.up import CombinedLog, Spec, Supervisor

pytestmark = pytest.mark.skipif(os.name != "posix", reason="up runs on Linux and macOS")

#: This program prints a line when it is ready, and another line when it receives SIGTERM.
POLITE = """
import signal, sys, time
def end(*_): print("bye", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: time.sleep(60)
"""
STUBBORN = POLITE.replace(
    "signal.signal(signal.SIGTERM, end)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
)


def spec(name: str, code: str = POLITE, stage: int = 0, patience_s: float = 10.0) -> Spec:
    return Spec(name, [sys.executable, "-c", code], "cyan", stage, patience_s, ready_line="ready")


def supervise(*specs: Spec) -> str:
    """Run the children until all are ready, stop them, and return the log."""
    said = io.StringIO()
    supervisor = Supervisor(specs, Console(file=said, width=200))
    supervisor.run(lambda: os.kill(os.getpid(), signal.SIGINT))
    return said.getvalue()


def test_the_child_that_started_first_is_stopped_last() -> None:
    log = supervise(spec("first", stage=0), spec("second", stage=1), spec("third", stage=2))
    assert re.findall(r"(\w+) +│ bye", log) == ["third", "second", "first"]


def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    dies_once = (
        f"import os, pathlib; p = pathlib.Path({str(tmp_path / 'died')!r})\n"
        "if not p.exists(): p.touch(); os._exit(3)\n"
    )
    log = supervise(spec("child", dies_once + POLITE))
    assert "child ended with exit code 3; it is started again in 1 s" in log
    assert "child │ ready" in log


def test_a_child_that_does_not_stop_is_killed() -> None:
    log = supervise(spec("child", STUBBORN, patience_s=0.3))
    assert "killing child: it did not stop within 0.3 s" in log


def test_processes_of_a_dead_child_are_killed(tmp_path: Path) -> None:
    """A worker that is killed does not end its pool processes."""
    note = tmp_path / "orphan"
    leaves = f"""
import os, pathlib, signal, subprocess, sys
note = pathlib.Path({str(note)!r})
if not note.exists():
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note.write_text(str(orphan.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    log = supervise(spec("child", leaves + POLITE))
    assert "child was killed by SIGKILL" in log
    pid = int(note.read_text())
    assert (
        not Path(f"/proc/{pid}").exists()
        or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    )


def test_a_log_line_cannot_move_the_cursor_and_keeps_its_level() -> None:
    said = io.StringIO()
    log = CombinedLog(
        Console(file=said, width=200, force_terminal=True, color_system="standard"), ["worker"]
    )
    log.line(
        spec("worker"), "[2026-01-01 10:00:00,123: ERROR/MainProcess] no\x1b[2J\rroot │ all well\n"
    )
    line = said.getvalue()
    assert "\x1b[2J" not in line
    assert "\r" not in line
    assert "MainProcess" not in line
    assert "\x1b[1;31mno" in line
