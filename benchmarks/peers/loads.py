"""Loads of processors that take time. Each system runs two tasks at a time, one in each process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Literal, NamedTuple, cast, get_args

from benchmarks.figures import percentile
from benchmarks.peers.side import Peer
from benchmarks.waiting import BenchError, sleep_until, wall

PROCESSES = 2
#: Steady tasks per second, and due in one to five seconds. Of slow processors there are fewer, so
#: that the processes are busy for this share of their time.
RATE, BUSY = 60, 0.6
SOONEST_S, LATEST_S = 1.0, 5.0
#: The maximum of tasks of a burst per second of its length, so that a busy machine can schedule
#: them one by one within the horizon.
MOST_PER_S = 1000
#: Bare Celery schedules at least as many tasks per second, one call each.
CALLS_PER_S = 250
#: Tasks that a call schedules beyond the horizon, and within it.
BEYOND_S, WITHIN_S = 3600.0, 25.0
#: Bare Celery runs five tasks per second with a broker round trip of 100 ms.
DEADLINE_S = 240.0
#: A producer connects to a distant broker in the background, in a dozen round trips.
CONNECT_S = 3.0

Kind = Literal["sleep", "compute"]
#: The name of a figure, and its value in one round.
Figures = dict[str, float]
#: Environment variables of the workers.
Variables = Mapping[str, str]


class TimedProcessor(NamedTuple):
    """A processor that sleeps or computes for some time."""

    kind: Kind
    ms: float

    @classmethod
    def parse(cls, text: str) -> TimedProcessor:
        """Parse `sleep:20`. `0` is a processor that takes no time."""
        kind, _, ms = text.rpartition(":")
        if float(ms) == 0:
            return cls("sleep", 0)
        if kind not in get_args(Kind) or float(ms) < 0:
            raise ValueError(text)
        return cls(cast(Kind, kind), float(ms))

    def __str__(self) -> str:
        return f"{self.kind} {self.ms:g} ms" if self.ms else "0 ms"

    @property
    def ideal_per_s(self) -> float | None:
        """The rate of processes that do nothing but run the processor."""
        return PROCESSES / self.ms * 1000 if self.ms else None

    @property
    def steady_per_s(self) -> int:
        return RATE if self.ideal_per_s is None else min(RATE, round(BUSY * self.ideal_per_s))

    def burst_size(self, seconds: float) -> int:
        """Return how many tasks take about `seconds`."""
        return round(seconds * min(self.ideal_per_s or MOST_PER_S, MOST_PER_S))

    @property
    def variables(self) -> Variables:
        computes = {"BENCH_COMPUTES": "1"} if self.kind == "compute" else {}
        return {"BENCH_ONE_AT_A_TIME": "1", **computes}


def burst(peer: Peer, processor: TimedProcessor, seconds: float, variables: Variables) -> Figures:
    """Run tasks that are due at one instant and ideally take `seconds`."""
    count = processor.burst_size(seconds)
    lead = 2 + count / CALLS_PER_S
    with peer.serving(takes_s=processor.ms / 1000, variables={**processor.variables, **variables}):
        meter = CpuMeter(peer, processor)
        due = wall() + lead
        made = peer.schedule_many(count, due, due, lead)
        if made.tasks < count or wall() > due:
            raise BenchError(f"{made.tasks:,} of {count:,} tasks were scheduled in {lead:.0f} s")
        sleep_until(due)
        _wait(peer, count)
        per_s = count / (peer.ended_at() - due)
        figures = {"drained/s": per_s}
        if processor.ideal_per_s is not None:
            figures["share of the ideal"] = per_s / processor.ideal_per_s
        return figures | meter.per_task(count)


def steady(peer: Peer, processor: TimedProcessor, seconds: float, variables: Variables) -> Figures:
    """Run some tasks per second for `seconds`."""
    rate = processor.steady_per_s
    count = round(rate * seconds)
    with peer.serving(takes_s=processor.ms / 1000, variables={**processor.variables, **variables}):
        meter = CpuMeter(peer, processor)
        made = peer.steady(rate, count, 1, SOONEST_S, LATEST_S, 2 * seconds)
        if made.took_s > 1.1 * seconds:
            raise BenchError(f"{made.per_s:.0f} tasks a second were scheduled instead of {rate}")
        _wait(peer, count)
        late_ms = [(note.began - note.due) * 1000 for note in peer.ran()]
        return {
            "lateness p50, ms": percentile(late_ms, 0.5),
            "lateness p99, ms": percentile(late_ms, 0.99),
            "lateness of the latest, ms": max(late_ms),
        } | meter.per_task(count)


def call(peer: Peer, count: int, variables: Variables) -> Figures:
    """Measure single calls without workers."""
    found: Figures = {}
    with peer.producing(variables):
        for name, ahead in (("beyond", BEYOND_S), ("within", WITHIN_S)):
            due = wall() + ahead
            peer.schedule(10, due, due, DEADLINE_S)  # opens connections
            time.sleep(CONNECT_S)
            peer.schedule(10, due, due, DEADLINE_S)
            made = peer.schedule(count, due, due, DEADLINE_S)
            found[f"a call {name} the horizon, ms"] = made.took_s / made.tasks * 1000
    return found


def _wait(peer: Peer, count: int) -> None:
    if not peer.wait_for(count, DEADLINE_S):
        raise BenchError(f"{len(peer.ran()):,} of {count:,} tasks ran in {DEADLINE_S:.0f} s")


class CpuMeter:
    """Measures CPU time from its creation on, without the time that processors compute."""

    def __init__(self, peer: Peer, processor: TimedProcessor) -> None:
        self._peer = peer
        self._own_ms = processor.ms if processor.kind == "compute" else 0.0
        self._began = self._spent_s()

    def per_task(self, tasks: int) -> Figures:
        workers_ms, servers_ms = (
            (now - then) / tasks * 1000
            for now, then in zip(self._spent_s(), self._began, strict=True)
        )
        workers_ms -= self._own_ms
        return {
            "CPU of the workers, ms per task": workers_ms,
            "CPU of the servers, ms per task": servers_ms,
            "CPU of both, ms per task": workers_ms + servers_ms,
        }

    def _spent_s(self) -> tuple[float, float]:
        workers_s, servers_s = self._peer.worker_cpu_s(), self._peer.server_cpu_s()
        if workers_s is None or servers_s is None:
            raise BenchError("CPU times are measured on Linux only, with local servers")
        return workers_s, servers_s
