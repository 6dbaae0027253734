"""Limited tags: whether all slots are always used, and the cost of a limit that is not reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

from benchmarks import brokers, ours, table
from benchmarks.cases.burst import drain, due_together
from benchmarks.figures import Target
from benchmarks.machine import load
from benchmarks.stage import CaseContext
from benchmarks.waiting import instant, sleep_until, wait_until, wall
from delaytasks.model.moves import Status

THREADS = ["-P", "threads", "-c", "16"]
CAPACITY, ROW_S = 10, 0.1
#: A limit that is never reached.
HIGH = 100_000


def run(stage: CaseContext) -> None:
    _full(stage)
    _high(stage)


def _full(stage: CaseContext) -> None:
    """Far more due tasks than slots, on two workers with more threads than slots."""
    count, side = stage.size(5_000, 600), stage.ours
    what = (
        f"{count:,} due, {CAPACITY} places, {ROW_S * 1000:g} ms each: share of the ideal throughput"
    )
    share = stage.figure("limits", what, "", Target("value", least=0.9))
    most = stage.figure(
        "limits", "maximum of simultaneous runs", "tasks", Target("value", most=CAPACITY)
    )
    with limited(ours.SLOW, concurrency=CAPACITY), side.serving(2, THREADS):
        due = wall() + 5
        ours.delays.schedule_many(
            (ours.SLOW, {"seconds": ROW_S}, instant(due)) for _ in range(count)
        )
        sleep_until(due)
        ideal_s = count * ROW_S / CAPACITY
        wait_until(
            lambda: table.count(Status.DONE) == count, 4 * ideal_s + 10, f"{count:,} tasks", 0.2
        )
        took_s = table.last_settled_at() - due
        running = list(accumulate(int(note.due) for note in side.notes.read()))
    brokers.clear()
    share.add(ideal_s / took_s)
    most.add(float(max(running)))
    stage.say(
        f"limits: {count:,} in {took_s:.2f} s, ideal {ideal_s:.2f} s: {ideal_s / took_s:.1%}, at "
        f"most {max(running)} "
        f"simultaneous, load {load():.1f}"
    )


def _high(stage: CaseContext) -> None:
    """A burst with a limit that is never reached, and without a limit."""
    count = stage.size(20_000, 5_000)
    what = f"{count:,} due at once, drained with a limit of {HIGH:,}"
    figure = stage.figure(
        "limits", what, "per s", Target("ratio", least=0.5), against="without it:"
    )
    schedule = due_together(count, stage.size(60, 15))
    with limited(ours.TAG, concurrency=HIGH):
        with_limit = drain(stage, "limits", stage.ours, count, schedule)
    figure.add(with_limit.per_s, drain(stage, "limits", stage.ours, count, schedule).per_s)


@contextmanager
def limited(tag: str, concurrency: int) -> Iterator[None]:
    """Set the policy before the workers start, so that they read it at startup."""
    ours.delays.policies.set(tag=tag, concurrency=concurrency)
    try:
        yield
    finally:
        table.forget_policies()
