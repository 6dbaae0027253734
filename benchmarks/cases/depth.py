"""Many due rows: those that always wait, those of an outage, and what more processes gain."""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from benchmarks import ours
from benchmarks.cases.loads import burst
from benchmarks.figures import late
from benchmarks.run import Stage
from benchmarks.side import CpuMeter, Figures, Side
from benchmarks.waiting import BenchError, instant, sleep_until, wait_until, wall
from delaytasks import Status

HOUR_S, MINUTE_S = 3600.0, 60.0
DEADLINE_S = 900.0
DEPTHS = (1_000, 5_000, 20_000, 1_000_000)
#: The first seconds are not measured, since the worker learns the size of its chunks.
WARM_S, MEASURED_S, LOOK_S = 4.0, 10.0, 0.05


def standing(stage: Stage, side: Side) -> Figures:
    """A producer adds as many due tasks as have run, so that as many always wait."""
    normal = _burst(stage, side, 50_000)
    found = {"a burst, drained/s": normal}
    for depth in DEPTHS[:2] if stage.is_quick else DEPTHS:
        if depth > 100_000 and stage.servers.backend != "postgresql":
            continue
        with side.serving():
            runs = _feed(side, depth, _after(WARM_S + MEASURED_S))
        warm = [(at, done) for at, done in runs if at >= runs[0][0] + WARM_S]
        per_s = (warm[-1][1] - warm[0][1]) / (warm[-1][0] - warm[0][0])
        found[f"{depth:,} due tasks wait all the time, run/s"] = per_s
        found[f"{depth:,}, x a burst"] = per_s / normal
    return found


def _after(seconds: float) -> Callable[[int], bool]:
    """Return a function that is true from `seconds` after its first call on."""
    ends = cache(lambda: wall() + seconds)
    return lambda _: wall() > ends()


def memory(stage: Stage, side: Side) -> Figures:
    """The memory of a worker after it has run very many tasks."""
    first, last, mb = 50_000, stage.size(1_000_000, 100_000), list[float]()

    def is_over(done: int) -> bool:
        if done >= (last if mb else first):
            mb.append(side.usage().rss_mb)
        return len(mb) == 2

    with side.serving():
        _feed(side, 5_000, is_over)
    what = f"worker memory after {last:,} tasks, above that after {first:,}, MB"
    return {what: mb[1] - mb[0]}


def _feed(side: Side, depth: int, is_over: Callable[[int], bool]) -> list[tuple[float, int]]:
    """Let `depth` due tasks wait all the time. Return how many had run, and when."""
    runs, scheduled, began = list[tuple[float, int]](), 0, wall()
    if depth > 100_000:
        side.rows.fill(depth, Status.NOT_COMPLETE, -1, 0)
        scheduled = depth
    while not is_over(len(side.notes)):
        if wall() > began + DEADLINE_S:
            raise BenchError(f"{len(side.notes):,} tasks ran in {DEADLINE_S:.0f} s")
        now, done = wall(), len(side.notes)
        runs.append((now, done))
        missing = depth - (scheduled - done)
        if missing > 0:
            side.delays.schedule_many([(ours.TAG, {"due": now}, instant(now))] * missing)
            scheduled += missing
        sleep_until(now + LOOK_S)
    return runs


def _burst(stage: Stage, side: Side, full: int) -> float:
    count = stage.size(full, 5_000)
    return next(iter(burst(stage, side, "a burst", count, (stage.size(30, 15), 60)).values()))


# -- an outage -------------------------------------------------------------------------------------

#: New tasks per second, and when they are due.
RATE, SOONEST_S, LATEST_S = 50, 0.5, 3.0


@dataclass
class Samples:
    """The messages in the broker and the memory of the worker, while a case runs."""

    queued: list[int] = field(default_factory=lambda: [0])
    worker_mb: list[float] = field(default_factory=list)


def overload(stage: Stage, side: Side, in_order: bool = True) -> Figures:
    """Start a worker in front of overdue rows, in the order of their due times or in random
    order, and schedule new tasks meanwhile.

    Bursts are measured before and after, because the speed of the machine varies.
    """
    rows, normal = stage.size(1_000_000, 50_000), [_burst(stage, side, 100_000)]
    with side.producing():
        side.rows.fill(rows, Status.NOT_COMPLETE, -HOUR_S, -MINUTE_S, in_order=in_order)
        side.rows.settle_down()
        began = wall()
        side.start_workers()
        wait_until(lambda: len(side.notes), DEADLINE_S, "the first row to run", 0.01)
        meter, first = CpuMeter(side), min(note.began for note in side.notes.read())
        with _sampled(stage, side) as samples, _scheduling(side) as fresh:
            wait_until(lambda: len(side.notes) >= rows, DEADLINE_S, f"{rows:,} tasks", 0.1)
        cost = meter.per_task(rows)
        side.wait_for(rows + len(fresh), DEADLINE_S)
        notes = side.notes.read()
        late_ms = [(note.began - note.due) * 1000 for note in notes if note.due > began]
        ended = [note.ended for note in notes if note.due < began]
        if (side.rows.count(Status.DONE), len(ended), len(late_ms)) != (
            rows + len(fresh),
            rows,
            len(fresh),
        ):
            raise BenchError(f"{len(ended):,} of {rows:,} rows ran, and {len(late_ms):,} new ones")
    normal.append(_burst(stage, side, 100_000))
    per_s = rows / (max(ended) - first)
    return {
        f"{rows:,} overdue, from the worker's start to the first run, s": first - began,
        f"{rows:,} overdue, drained/s": per_s,
        "the same, x the bursts around it": per_s / statistics.mean(normal),
        **late(late_ms, f"new tasks meanwhile, {RATE}/s, "),
        "messages in the broker, most": max(samples.queued),
        "worker memory, peak above its start, MB": max(samples.worker_mb) - samples.worker_mb[0],
        **cost,
    }


@contextmanager
def _sampled(stage: Stage, side: Side) -> Iterator[Samples]:
    samples = Samples()

    def look(is_over: threading.Event) -> None:
        with stage.servers.messages_in(f"{ours.NAMESPACE}.default") as count:
            while True:
                samples.queued.append(count())
                samples.worker_mb.append(side.usage().rss_mb)
                if is_over.wait(0.1):
                    return

    with in_background(look):
        yield samples


@contextmanager
def _scheduling(side: Side) -> Iterator[list[float]]:
    """Schedule tasks at a steady rate, and yield the list of their due times."""
    dues: list[float] = []

    def schedule(is_over: threading.Event) -> None:
        chance, began = random.Random(1), wall()
        while not is_over.wait(max(began + len(dues) / RATE - wall(), 0)):
            due = wall() + chance.uniform(SOONEST_S, LATEST_S)
            side.delays.schedule_delay(ours.TAG, {"due": due}, at=instant(due))
            dues.append(due)

    with in_background(schedule):
        yield dues


@contextmanager
def in_background(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread until the block ends, and raise its error."""
    is_over, errors = threading.Event(), list[Exception]()

    def run() -> None:
        try:
            work(is_over)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if errors:
        raise errors[0]


# -- more processes --------------------------------------------------------------------------------

PROCESSES = (1, 2, 4)
#: The processor's duration in milliseconds, and the number of tasks that are due together.
KINDS = ((0, 20_000), (5, 2_000), (20, 500))


def growth(stage: Stage, side: Side) -> Figures:
    """Bursts of tasks that take no time or wait, with several numbers of processes."""
    found: Figures = {}
    for processes in PROCESSES:
        for ms, full in KINDS:
            count, what = stage.size(full, full // 5), f"{ms} ms, {processes} processes"
            with side.serving(processes=processes):
                meter, written, due = CpuMeter(side), stage.servers.wal_bytes(), wall() + 15
                task = ours.WORK, {"due": due, "seconds": ms / 1000}, instant(due)
                for start in range(0, count, 100):
                    side.delays.schedule_many([task] * min(100, count - start))
                sleep_until(due)
                side.wait_for(count, DEADLINE_S)
                found[f"{what}, drained/s"] = count / (side.ended_at() - due)
                written = stage.servers.wal_bytes() - written
                found[f"{what}: WAL of a task, bytes"] = written / count
                for name, value in meter.per_task(count).items():
                    found[f"{what}: {name}"] = value
    return found
