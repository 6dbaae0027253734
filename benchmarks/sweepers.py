"""Concurrent sweeps in separate processes.

`python -m benchmarks.sweepers PARTITION PARTITIONS` begins when a line arrives on stdin.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks import ours
from benchmarks.processes import BenchmarkProcess
from delaytasks.runtime import runtime_of

#: All rows of the table are near.
HORIZON_S = 1200.0


def sweep_concurrently(partitions: int, folder: Path, deadline_s: float) -> float:
    """Sweep the table once with all partitions, and return the duration of the slowest sweep."""
    processes = [
        BenchmarkProcess(
            f"sweeper{partition}", ["benchmarks.sweepers", str(partition), str(partitions)], folder
        )
        for partition in range(partitions)
    ]
    try:
        for process in processes:
            process.expect("ready", 30)
        for process in processes:
            process.tell("sweep")
        return max(float(process.expect("swept", deadline_s)) for process in processes)
    finally:
        for process in processes:
            process.stop()


def _main() -> None:
    partition, partitions = int(sys.argv[1]), int(sys.argv[2])
    app, delays = ours.make("bench_sweeper", sweep=(5, partitions), horizon=HORIZON_S)
    runtime_of(delays).clock.now()
    app.connection_for_write().ensure_connection(max_retries=1)
    print("ready", flush=True)
    sys.stdin.readline()
    before = time.monotonic()
    runtime_of(delays).sweeper.sweep(partition)
    print("swept", time.monotonic() - before, flush=True)


if __name__ == "__main__":
    _main()
