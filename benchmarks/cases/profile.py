"""Where the time of a burst goes, as py-spy sees it: that of the pool's processes by what they do, that of the main
process by its threads."""

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
from benchmarks.stage import Stage
from benchmarks.waiting import BenchError, sleep_until, wall

#: Samples a second.
RATE = 200
DEADLINE_S, STOP_S = 120.0, 30.0
#: py-spy reads the interpreter's memory first.
AHEAD_S = 3.0
#: Whoever runs a chunk is in here.
CHUNK = "delaytasks/worker/job.py"
#: What the innermost frame that is named here does. What is in a driver's frame or a socket's waits for the database.
STEPS = (
    ("claims", "delaytasks/storage/claims.py"),
    ("settles", "delaytasks/storage/settlements.py"),
    ("runs", "delaytasks/execution/executor.py"),
    ("rest of a chunk", "delaytasks/execution/"),
    ("rest of a chunk", CHUNK),
)
DRIVERS = (
    "delaytasks/storage/prepared_statements.py",
    "sqlalchemy/engine/default.py",
    "pymysql/",
    "(socket.py",
)
MAIN_THREAD = "MainThread"


class Stack(NamedTuple):
    thread: str
    #: The innermost first, as "function (file:line)".
    frames: list[str]
    samples: int


def run(stage: Stage) -> None:
    if shutil.which("py-spy") is None:
        stage.say("profile: left out, since there is no py-spy on the PATH (pip install py-spy)")
        return
    count = stage.size(50_000, 10_000)
    for side in stage.timers:
        for what, us in _profile(side, count, stage.size(30, 12)).items():
            stage.figure("profile", f"{side.timer}: {what}", "µs").add(us)


def _profile(side: Ours, count: int, lead_s: float) -> dict[str, float]:
    """Microseconds for each task, of one process or another."""
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
    seconds["pool, waits for the next chunk, or hands its report over"] = took * len(pool) - busy
    return {what: seconds[what] * 1e6 / count for what in sorted(seconds)}


def _step(frames: list[str]) -> str | None:
    """What a process of the pool does; None if there is nothing to do."""
    step = next((step for frame in frames for step, file in STEPS if file in frame), None)
    if step is None or not any(CHUNK in frame for frame in frames):
        return None
    return f"{step}: waits for the database" if any(file in frames[0] for file in DRIVERS) else step


class Spy:
    """Of one process: with `--gil` of who runs Python there, with `--idle` also of who waits."""

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
        """Ends it."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(STOP_S)
        if not self._path.exists():
            raise BenchError(f"profile: py-spy failed: {self._log.read_text()}")
        for line in self._path.read_text().splitlines():
            names, _, samples = line.rpartition(" ")
            thread, *frames = [name for name in names.split(";") if not name.startswith("process ")]
            yield Stack(thread.rpartition(": ")[2], frames[::-1], int(samples))
