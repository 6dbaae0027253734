"""A task that runs alone: the work of one process for its claim, its run and its settlement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks import ours, table
from benchmarks.call_counts import count_calls
from benchmarks.stage import CaseContext
from delaytasks.model.task import Entry
from delaytasks.worker.processes import processes_of

TAG = "bench.lone"
WARM_UP, COUNTED = 20, 50


@ours.delays.processor(TAG)
def do_nothing(body: Any) -> None:
    """End immediately."""


def run(stage: CaseContext) -> None:
    table.clear()
    timed = stage.size(1000, 100)
    tasks = [ours.delays.schedule_delay(TAG, None, 0) for _ in range(WARM_UP + COUNTED + timed)]
    entries = [Entry.of(task) for task in tasks]
    _run_each(entries[:WARM_UP])
    calls = count_calls(lambda: _run_each(entries[WARM_UP : WARM_UP + COUNTED])) / COUNTED
    began = time.thread_time()
    _run_each(entries[WARM_UP + COUNTED :])
    spent_s = time.thread_time() - began
    stage.figure("lone", "function calls of a task", "").add(calls)
    stage.figure("lone", "CPU time of a task", "µs").add(spent_s * 1e6 / timed)
    table.clear()


def _run_each(entries: Sequence[Entry]) -> None:
    runner = processes_of(ours.app).runner()
    for entry in entries:
        runner.run([entry])
