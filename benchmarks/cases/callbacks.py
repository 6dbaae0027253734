"""HTTP callbacks that are due together, to a slow receiver: the rate at which they are sent."""

from __future__ import annotations

import time

from benchmarks import brokers, table
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.processes import BenchmarkProcess
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, instant, sleep_until, wait_until, wall
from delaytasks import NewTask
from delaytasks.model.inputs import CALLBACK
from delaytasks.model.moves import Status

ANSWERS_AFTER_MS = 50
DEADLINE_S = 120.0
LOOK_S = 0.25


def run(stage: CaseContext) -> None:
    count, lead = stage.size(10_000, 1_000), stage.size(15, 8)
    receiver = BenchmarkProcess(
        "receiver", ["benchmarks.receiver", str(ANSWERS_AFTER_MS)], stage.ours.folder
    )
    try:
        _send(stage, receiver, f"http://127.0.0.1:{receiver.expect('port', 10)}/", count, lead)
    finally:
        receiver.stop()


def _send(
    stage: CaseContext, receiver: BenchmarkProcess, url: str, count: int, lead: float
) -> None:
    what = f"{count:,} due together, answered after {ANSWERS_AFTER_MS} ms, two processes"
    sent = stage.figure("callbacks", what, "sent/s", Target("value", least=1000))
    side, memory = stage.ours, []

    def is_done() -> bool:
        memory.append(side.rss_mb() or 0.0)
        return not table.has_unfinished_due()

    with side.serving():
        due = wall() + lead
        when = instant(due)
        bodies = ({"url": url, "body": {"order": number}} for number in range(count))
        side.delays.schedule_many(NewTask(CALLBACK, body, at=when) for body in bodies)
        if wall() > due:
            raise BenchError("callbacks: scheduling took too long")
        sleep_until(due - 0.5)
        start_mb, cpu_s, receiver_s = side.rss_mb(), side.cpu_s(), _cpu_s(receiver)
        sleep_until(due)
        wait_until(is_done, DEADLINE_S, f"{count:,} callbacks", LOOK_S)
        took, lateness = table.last_settled_at() - due, side.lateness_ms()
        cpu_ms, receiver_ms = (
            (now - then) / count * 1000
            for now, then in ((side.cpu_s() or 0, cpu_s or 0), (_cpu_s(receiver), receiver_s))
        )
        time.sleep(1)
        end_mb = side.rss_mb()
        _check(receiver, count)
    brokers.clear()
    sent.add(count / took)
    stage.figure("callbacks", "worker CPU per callback", "ms").add(cpu_ms)
    for when_, value in (("start", start_mb), ("peak", max(memory)), ("end", end_mb)):
        stage.figure("callbacks", f"worker memory, {when_}", "MB").add(value or 0.0)
    stage.say(
        f"callbacks: {count:,} in {took:.2f} s, {count / took:,.0f}/s, lateness p50 "
        f"{percentile(lateness, 0.5):.0f} "
        f"ms, CPU each: worker {cpu_ms:.2f} ms, receiver {receiver_ms:.2f} ms, simultaneous "
        f"{_most(receiver)}, memory "
        f"{start_mb:.0f} → {max(memory):.0f} → {end_mb:.0f} MB, ran again {table.repeated()}, "
        f"load {load():.1f}"
    )


def _check(receiver: BenchmarkProcess, count: int) -> None:
    done, received = table.count(Status.DONE), _told(receiver)[0]
    if done != count or received < count:
        raise BenchError(
            f"callbacks: of {count:,} {done:,} are DONE, and {received:,} were received"
        )


def _told(receiver: BenchmarkProcess) -> tuple[int, int]:
    receiver.tell("how many")
    received, most = map(int, receiver.expect("received", 10).split())
    return received, most


def _most(receiver: BenchmarkProcess) -> int:
    return _told(receiver)[1]


def _cpu_s(process: BenchmarkProcess) -> float:
    usage = process.usage()
    return 0.0 if usage is None else usage.cpu_s
