"""Sweeps in processes of their own, side by side: `python -m benchmarks.sweepers HOUSE HOUSES`, told on stdin when to
begin."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks import ours
from benchmarks.processes import Process

#: All that lies in the table is near.
HORIZON_S = 1200.0


def sweep_side_by_side(houses: int, folder: Path, deadline_s: float) -> float:
    """Sweeps the table once with so many house numbers, and returns how long the last one took."""
    made = [
        Process(f"sweeper{house}", ["benchmarks.sweepers", str(house), str(houses)], folder)
        for house in range(houses)
    ]
    try:
        for process in made:
            process.expect("ready", 30)
        for process in made:
            process.tell("sweep")
        return max(float(process.expect("swept", deadline_s)) for process in made)
    finally:
        for process in made:
            process.stop()


def _main() -> None:
    house, houses = int(sys.argv[1]), int(sys.argv[2])
    app, delays = ours.make("bench_sweeper", houses=houses, horizon_s=HORIZON_S)
    delays.clock.now()
    app.connection_for_write().ensure_connection(max_retries=1)
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.monotonic()
    delays.sweeper.sweep(house)
    print("swept", time.monotonic() - before, flush=True)


if __name__ == "__main__":
    _main()
