"""`python -m chaos [--tasks N] [--seconds S] [--seed N] [--database …] [--timer …]`"""

from __future__ import annotations

import argparse
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.checker import Checker, Verdict
from chaos.field import PRODUCERS, Field, Producer
from chaos.history import Fault, History, read
from chaos.nemeses import NEMESES
from chaos.project import now_us
from delaytasks.core.errors import DelayTaskError
from delaytasks.core.states import FINISHED

#: Later than this is somebody's fault.
LATE_US = 1_000_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and of what is scheduled")
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="postgresql")
    parser.add_argument("--timer", choices=["eta", "redis"], default="eta")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds for all to be over after the last fault")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started is ended, however it ends
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    console = Console()
    console.print(f"seed {seed}: {options.tasks:,} tasks, {options.database}, Redis, timer {options.timer}")
    with tempfile.TemporaryDirectory(prefix="delaytasks-chaos-") as folder:
        Path(folder).chmod(0o755)  # the database may be another user's
        field = Field(Path(folder), options.database, options.timer)
        try:
            history, quiet_us = run(field, seed, options, console)
        finally:
            field.close()
    verdict = Checker(history, quiet_us=quiet_us).verdict()
    show(verdict, history, console)
    return 1 if verdict.findings else 0


def run(field: Field, seed: int, options: argparse.Namespace, console: Console) -> tuple[History, int]:
    chance = random.Random(seed)
    fitting = [nemesis for nemesis in NEMESES if nemesis.fits(field)]
    seconds = options.faults * options.every * 2
    producers = [Producer(field, seed + n, options.tasks / PRODUCERS / seconds) for n in range(PRODUCERS)]
    faults: list[Fault] = []
    while len(faults) < options.faults or sum(producer.count for producer in producers) < options.tasks:
        time.sleep(chance.uniform(0, 2 * options.every))
        if len(faults) < options.faults:
            fault = chance.choice(fitting).fault(field, chance)
            faults.append(fault)
            count = sum(producer.count for producer in producers)
            console.print(f"{len(faults):4} {fault.kind}: {fault.target} ({count:,} tasks so far)")
    for producer in producers:
        producer.stop()
    wait_for_quiet(field, options.patience)
    history = read(field.notes, field.recorder.changes())
    history.faults += faults
    return history, now_us()


def wait_for_quiet(field: Field, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            if not field.waiting():
                return
        except DelayTaskError:
            pass
        time.sleep(0.5)


def show(verdict: Verdict, history: History, console: Console) -> None:
    late = lateness(history)
    table = Table("fault", "times", "tasks late by it", "p50 s", "p99 s", "max s")
    for kind, times in sorted(Counter(fault.kind for fault in history.faults).items()):
        some = sorted(late.get(kind, []))
        cells = [f"{some[min(int(len(some) * part), len(some) - 1)]:.1f}" if some else "" for part in (0.5, 0.99, 1)]
        table.add_row(kind, str(times), str(len(some)), *cells)
    console.print(table)
    asked = Counter(f"{told.call} {told.answer}" for told in history.told)
    console.print(", ".join(f"{count:,} {what}" for what, count in sorted(asked.items())))
    console.print(str(verdict), markup=False, highlight=False)


def lateness(history: History) -> dict[str, list[float]]:
    """Seconds from the time when a task was due, or broken off, to its end, by the fault before it."""
    found: dict[str, list[float]] = {}
    due: dict[int, int] = {}
    faults = sorted(history.faults, key=lambda fault: fault.from_us)
    for change in history.changes:
        if change.status in FINISHED:
            late_us = change.at_us - due.get(change.id, change.due_us)
            before = [fault for fault in faults if fault.from_us <= change.at_us]
            if late_us > LATE_US and before:
                found.setdefault(before[-1].kind, []).append(late_us / 1e6)
        due[change.id] = change.due_us
    return found


if __name__ == "__main__":
    sys.exit(main())
