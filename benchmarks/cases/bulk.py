"""`schedule_many` from a generator: its rate, and proof that its memory does not grow."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy.orm import Session

from benchmarks import ours, table
from benchmarks.figures import Target
from benchmarks.stage import CaseContext

Tasks = Iterator[tuple[str, dict[str, Any], float]]
DELAY_S = 86400.0
#: The target in rows per second.
LEAST = {"postgresql": 100_000, "mysql": 50_000, "sqlite": 100_000}
#: After this number of rows, the process has allocated its working memory.
WARM = 100_000
GROWN_MB = 10


def run(stage: CaseContext) -> None:
    rows = stage.size(200_000, 40_000)
    per_s = _schedule(rows, _tasks(rows))
    target = Target("value", least=LEAST[table.backend()])
    stage.figure("bulk", f"schedule_many, {rows:,} rows", "rows/s", target).add(per_s)


def run_stream(stage: CaseContext) -> None:
    rows = stage.size(10_000_000, 400_000)
    _stream(stage, rows, f"schedule_many, {rows:,} rows")
    with table.session() as caller:
        _stream(stage, rows, "the same in one transaction of the caller", caller)


def _stream(stage: CaseContext, rows: int, what: str, caller: Session | None = None) -> None:
    warm_mb = 0.0

    def tasks() -> Tasks:
        nonlocal warm_mb
        yield from _tasks(WARM)
        warm_mb = _peak_mb()
        yield from _tasks(rows - WARM)

    stage.figure("stream", what, "rows/s").add(_schedule(rows, tasks(), caller))
    memory = f"{what}: peak memory above that of {WARM:,} rows"
    stage.figure("stream", memory, "MB", Target("value", most=GROWN_MB)).add(_peak_mb() - warm_mb)


def _tasks(count: int) -> Tasks:
    return (
        (ours.TAG, {"due": 0.5, "order": n, "customer": "c-1234"}, DELAY_S) for n in range(count)
    )


def _schedule(rows: int, tasks: Tasks, caller: Session | None = None) -> float:
    """Return the rows per second."""
    table.clear()
    before = time.perf_counter()
    ours.delays.schedule_many(tasks, session=caller)
    if caller is not None:
        caller.commit()
    took = time.perf_counter() - before
    assert table.count() == rows
    table.clear()
    return rows / took


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
