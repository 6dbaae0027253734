"""Producer processes: `python -m benchmarks.producers SIDE` reads its work from stdin."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from benchmarks.processes import BenchmarkProcess
from benchmarks.waiting import TooSlowError, wall

if TYPE_CHECKING:
    from benchmarks.sides import Side
    from benchmarks.stage import CaseContext

PRODUCERS = 2


def schedule_singly(stage: CaseContext, side: Side, count: int, lead: float) -> float:
    """Schedule `count` tasks in single calls, due at one instant, and return that instant."""
    each = count // PRODUCERS
    made = [
        BenchmarkProcess(f"producer{n}", ["benchmarks.producers", side.name], side.folder)
        for n in range(PRODUCERS)
    ]
    try:
        for process in made:
            process.expect("ready", 30)
        due = wall() + lead
        for process in made:
            process.tell(f"{each} {due!r}")
        took = max(float(process.expect("scheduled", lead + 120)) for process in made)
        if wall() > due:
            took_s = wall() - due + lead
            raise TooSlowError(
                f"{side.name} scheduled {count:,} tasks in {took_s:.1f} s, not in {lead:g} s"
            )
        stage.say(
            f"{side.name}: {count:,} calls by {PRODUCERS} simultaneous producers in {took:.1f} s"
        )
    finally:
        for process in made:
            process.stop()
    return due


def _main() -> None:
    from benchmarks.sides import Bare, DurableEta, Ours, OursInRedis

    side = {made.name: made for made in (Ours(), OursInRedis(), DurableEta(), Bare())}[sys.argv[1]]
    side.connect()
    print("ready", flush=True)
    count, due = sys.stdin.readline().split()
    before = time.monotonic()
    for _ in range(int(count)):
        side.schedule(float(due))
    print("scheduled", time.monotonic() - before, flush=True)


if __name__ == "__main__":
    _main()
