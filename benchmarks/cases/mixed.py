"""A queue of quick and slow tasks that are due together, in random order.

Rates depend on the load of the machine. The claims of a task hardly do: a task that is given back,
because a slow one before it took the time of its chunk, is claimed again.
"""

from __future__ import annotations

import random

from benchmarks import brokers, ours, table
from benchmarks.cases.burst import DEADLINE_S
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, instant, sleep_until, wall
from delaytasks.model.moves import Status

SLOW_S = 0.1
PROCESSES = 2
#: One task in this many is slow.
ONE_IN = (2, 10, 100)
#: The time of the slow tasks for two ideal processes.
BURST_S = 5.0
LEAD_S = 10.0


def run(stage: CaseContext) -> None:
    for one_in in ONE_IN:
        with stage.ours.serving():
            _together(stage, one_in)
            stage.ours.clear()
        brokers.clear()


def _together(stage: CaseContext, one_in: int) -> None:
    seconds = stage.size(int(BURST_S), 1)
    slow = int(seconds * PROCESSES / SLOW_S)
    takes = [SLOW_S] * slow + [0.0] * (slow * (one_in - 1))
    random.Random(one_in).shuffle(takes)
    due = wall() + LEAD_S
    at = instant(due)
    ours.delays.schedule_many(
        (ours.WORK if took else ours.TAG, {"due": due, "seconds": took}, at) for took in takes
    )
    sleep_until(due)
    stage.ours.wait_for(len(takes), DEADLINE_S)
    took_s = table.last_settled_at() - due
    if table.count(Status.DONE) != len(takes):
        raise BenchError(f"mixed: of {len(takes):,} tasks {table.count(Status.DONE):,} are DONE")
    what = f"one in {one_in} takes {SLOW_S * 1000:g} ms, the others nothing, {len(takes):,} tasks"
    stage.figure("mixed", f"{what}: share of the ideal", "").add(seconds / took_s)
    stage.figure("mixed", f"{what}: claims of a task", "").add(table.claims() / len(takes))
    if table.can_fill():
        stage.figure("mixed", f"{what}: rows in a settlement", "").add(
            len(takes) / table.settlements()
        )
