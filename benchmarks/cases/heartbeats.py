"""Connections that keep extending their timeouts, until some of them stop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

from benchmarks import brokers, ours, table
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.sides import Ours
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, sleep_until, wall
from delaytasks import DelayTasks, NewTask
from delaytasks.runtime import runtime_of

TIMEOUT_S, EVERY_S = 15.0, 5.0
#: Connections whose heartbeats arrive together.
BATCH_ROWS = 100
SILENT = 100
DEADLINE_S = 30.0


class HeartbeatConnections:
    """Touches each key every EVERY_S seconds, together with the other keys of its batch."""

    def __init__(self, delays: DelayTasks) -> None:
        self._delays = delays
        self._turns: deque[tuple[float, list[str]]] = deque()
        #: The database times before and after the last touch of each key.
        self.touched: dict[str, tuple[datetime, datetime]] = {}
        self.calls = 0
        #: The maximum delay of a touch.
        self.behind_s = 0.0
        #: The time that this thread spent on touches.
        self.touching_s = self.cpu_s = 0.0

    def open(self, count: int) -> None:
        """Schedule the timeouts, and begin to touch existing ones immediately."""
        for start in range(0, count, BATCH_ROWS):
            keys = [
                f"connection-{number}" for number in range(start, min(start + BATCH_ROWS, count))
            ]
            self._delays.schedule_many(
                NewTask(ours.TAG, {"due": 0.5}, TIMEOUT_S, key=key) for key in keys
            )
            self._turns.append((wall() + EVERY_S, keys))
            self.live_until(wall())

    def live_until(self, end: float) -> None:
        while self._turns[0][0] <= end:
            at, keys = self._turns.popleft()
            sleep_until(at)
            self.behind_s = max(self.behind_s, wall() - at)
            self._touch(keys)
            self._turns.append((at + EVERY_S, keys))
        sleep_until(end)

    def silence(self, count: int) -> set[str]:
        """Stop touching `count` keys, the same number in each batch."""
        batches = [keys for _, keys in self._turns]
        return {batches[number % len(batches)].pop() for number in range(count)}

    def _touch(self, keys: list[str]) -> None:
        now = runtime_of(self._delays).clock.now
        at, before, cpu_before = now(), time.perf_counter(), time.thread_time()
        missed = self._delays.touch(tag=ours.TAG, key=keys, delay=TIMEOUT_S).gone
        self.cpu_s += time.thread_time() - cpu_before
        self.touching_s += time.perf_counter() - before
        self.touched.update(dict.fromkeys(keys, (at, now())))
        self.calls += 1
        if missed:
            raise BenchError(
                f"heartbeats: {len(missed)} timeouts of {len(keys)} had passed when touched"
            )


class Reading(NamedTuple):
    """The resources that were used so far; NaN if they cannot be measured."""

    at: float
    calls: float
    touching_s: float
    toucher_cpu_s: float
    worker_cpu_s: float
    database_s: float
    messages: float

    def since(self, before: Reading) -> Reading:
        return Reading(*(now - then for now, then in zip(self, before, strict=True)))


def run(stage: CaseContext) -> None:
    for side in stage.timers:
        _run(stage, side)
        brokers.clear()
    table.clear()


def _run(stage: CaseContext, side: Ours) -> None:
    count, for_s = stage.size(10_000, 1_000), stage.size(40, 20)
    connections = HeartbeatConnections(side.delays)
    with side.serving(), brokers.watching() as messages:
        connections.open(count)
        before = _read(side, connections, messages)
        connections.live_until(wall() + for_s)
        spent = _read(side, connections, messages).since(before)
        fired = len(table.runs())
        silent = connections.silence(SILENT)
        connections.live_until(wall() + TIMEOUT_S)
        side.wait_for(fired + len(silent), DEADLINE_S)
        runs = table.runs()
    _check(runs, connections, silent)
    late = [(began - due).total_seconds() * 1000 for due, began in runs.values()]
    none = Target("value", most=0)
    found = (
        (f"{count:,} keys touched every {EVERY_S:g} s, fired", "", fired, none),
        ("messages", "", spent.messages, none),
        (f"touch of {BATCH_ROWS} keys", "ms", spent.touching_s / spent.calls * 1000, None),
        ("CPU of the worker", "% of a core", spent.worker_cpu_s / spent.at * 100, None),
        (
            "CPU of the process that touches",
            "% of a core",
            spent.toucher_cpu_s / spent.at * 100,
            None,
        ),
        ("time in statements, database", "% of the time", spent.database_s / spent.at * 100, None),
        (
            f"{SILENT} fall silent, lateness p50",
            "ms",
            percentile(late, 0.5),
            Target("value", most=3),
        ),
        ("lateness p99", "ms", percentile(late, 0.99), Target("value", most=10)),
        ("latest", "ms", max(late), None),
    )
    known = [line for line in found if not math.isnan(line[2])]
    for what, unit, value, target in known:
        stage.figure("heartbeats", f"{side.timer}: {what}", unit, target).add(value)
    values = ", ".join(f"{what} {value:,.2f} {unit}".strip() for what, unit, value, _ in known)
    stage.say(
        f"heartbeats: {side.timer}: {values}; touches up to {connections.behind_s:.2f} s late, "
        f"load {load():.1f}"
    )


def _read(
    side: Ours, connections: HeartbeatConnections, messages: Callable[[], int] | None
) -> Reading:
    worker_s, database_s = side.cpu_s(), table.active_s()
    return Reading(
        wall(),
        connections.calls,
        connections.touching_s,
        connections.cpu_s,
        math.nan if worker_s is None else worker_s,
        math.nan if database_s is None else database_s,
        math.nan if messages is None else messages(),
    )


def _check(
    runs: dict[str, tuple[datetime, datetime]], connections: HeartbeatConnections, silent: set[str]
) -> None:
    if set(runs) != silent:
        others = len(set(runs) - silent)
        raise BenchError(
            f"heartbeats: {len(runs) - others} of the {SILENT} silent ones fired, and {others} "
            "others"
        )
    for key, (due, began) in runs.items():
        before, after = (
            instant + timedelta(seconds=TIMEOUT_S) for instant in connections.touched[key]
        )
        if not before <= due <= after or began < due:
            raise BenchError(
                f"heartbeats: {key}, touched until {after}, was due at {due}, and began at {began}"
            )
