"""A profile of a burst by py-spy: pool processes by activity, the main process by thread."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import children
from benchmarks.sides import Ours
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, sleep_until, wall

#: Samples per second.
RATE = 200
DEADLINE_S, STOP_S = 120.0, 30.0
#: py-spy needs this time to read the interpreter's memory.
AHEAD_S = 3.0
#: Frames of this file are in every stack that runs a chunk.
CHUNK = "delaytasks/worker/pool.py"
#: The activity of a stack is the first step with one of its frames. A frame of a driver or a socket
#: waits for the database.
STEPS = (
    ("settles", "settle (delaytasks/db/claims.py"),
    ("claims", "delaytasks/db/claims.py"),
    ("runs", "delaytasks/run/calls.py"),
    ("rest of a chunk", "delaytasks/run/"),
    ("rest of a chunk", CHUNK),
)
DRIVERS = ("delaytasks/db/statements.py", "sqlalchemy/engine/default.py", "pymysql/", "(socket.py")
MAIN_THREAD = "MainThread"


class Stack(NamedTuple):
    thread: str
    #: The innermost frame first, as "function (file:line)".
    frames: list[str]
    samples: int


def run(stage: CaseContext) -> None:
    if shutil.which("py-spy") is None:
        stage.say("profile: skipped, since py-spy is not on the PATH (pip install py-spy)")
        return
    count = stage.size(50_000, 10_000)
    for side in stage.timers:
        for what, us in _profile(side, count, stage.size(30, 12)).items():
            stage.figure("profile", f"{side.timer}: {what}", "µs").add(us)


def _profile(side: Ours, count: int, lead_s: float) -> dict[str, float]:
    """Return the microseconds per task of each activity."""
    with side.serving():
        main = side.workers[0].pid
        pool = children(main)
        due = wall() + lead_s
        side.schedule_many([due] * count)
        sleep_until(due - AHEAD_S)
        with ExitStack() as held:
            spies = [held.enter_context(Spy(main, side.folder, "--gil"))]
            spies += [held.enter_context(Spy(pid, side.folder, "--idle")) for pid in pool]
            if wall() > due:
                raise BenchError("profile: the machine is too busy")
            side.wait_for(count, DEADLINE_S)
            took = side.ended_at() - due
            of_main, *of_pool = [list(spy.stacks()) for spy in spies]
    seconds: defaultdict[str, float] = defaultdict(float)
    for stack in of_main:
        seconds[f"main process, {stack.thread}"] += stack.samples / RATE
    for stack in (stack for stacks in of_pool for stack in stacks if stack.thread == MAIN_THREAD):
        if (step := _step(stack.frames)) is not None:
            seconds[f"pool, {step}"] += stack.samples / RATE
    busy = sum(s for what, s in seconds.items() if what.startswith("pool"))
    seconds["pool: waits for the next chunk or sends its report"] = took * len(pool) - busy
    return {what: seconds[what] * 1e6 / count for what in sorted(seconds)}


def _step(frames: list[str]) -> str | None:
    """Return the activity of a pool process, or None if it is idle."""
    step = next((step for step, part in STEPS if any(part in frame for frame in frames)), None)
    if step is None or not any(CHUNK in frame for frame in frames):
        return None
    return f"{step}: waits for the database" if any(file in frames[0] for file in DRIVERS) else step


class Spy:
    """Samples one process: with `--gil` the threads that hold the GIL, with `--idle` also waiting
    threads.
    """

    def __init__(self, pid: int, folder: Path, *options: str) -> None:
        self._path, self._log = folder / f"profile-{pid}", folder / f"profile-{pid}.log"
        command = [
            "py-spy",
            "record",
            "-p",
            str(pid),
            "-r",
            str(RATE),
            "-f",
            "raw",
            "-t",
            "-d",
            "600",
            *options,
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "-o", str(self._path)], stdout=log, stderr=log
            )

    def __enter__(self) -> Spy:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def stacks(self) -> Iterator[Stack]:
        """Stop sampling, and yield the stacks."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(STOP_S)
        if not self._path.exists():
            raise BenchError(f"profile: py-spy failed: {self._log.read_text()}")
        for line in self._path.read_text().splitlines():
            names, _, samples = line.rpartition(" ")
            thread, *frames = [name for name in names.split(";") if not name.startswith("process ")]
            yield Stack(thread.rpartition(": ")[2], frames[::-1], int(samples))
