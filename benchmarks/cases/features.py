"""The costs of limits, callbacks and recurring schedules."""

from __future__ import annotations

import time
from itertools import accumulate

from benchmarks import ours
from benchmarks.cases.loads import burst
from benchmarks.processes import BenchmarkProcess
from benchmarks.run import Stage
from benchmarks.side import Figures, Side
from benchmarks.waiting import BenchError, instant, sleep_until, wait_until, wall
from delaytasks import NewTask, Status
from delaytasks.model.inputs import CALLBACK
from delaytasks.recurring.creation import create
from delaytasks.runtime import runtime_of

PLACES, ROW_S = 10, 0.1
#: A limit that is never reached.
HIGH = 100_000


def limits(stage: Stage, side: Side) -> Figures:
    """Far more due tasks than places, on two workers with more threads than places; and a burst
    with a limit that is not reached, compared with one without.
    """
    count = stage.size(5_000, 300)
    ideal_s = count * ROW_S / PLACES
    with side.prepared():
        side.delays.policies.set(tag=ours.SLOW, concurrency=PLACES)
        side.start_workers(2, pool="threads", processes=16)
        due = wall() + 5
        task = ours.SLOW, {"seconds": ROW_S}, instant(due)
        side.delays.schedule_many([task] * count)
        sleep_until(due)
        wait_until(
            lambda: side.rows.count(Status.DONE) == count, 4 * ideal_s + 10, "all tasks", 0.2
        )
        took_s = side.rows.last_settled_at() - due
        most = max(accumulate(int(note.due) for note in side.notes.read()))
    found = {
        f"{count:,} due, {PLACES} places, 100 ms each, share of the ideal, ratio": ideal_s / took_s,
        "simultaneous runs, most": float(most),
    }
    full, leads = stage.size(20_000, 5_000), (stage.size(60, 15), 90)

    def limit() -> None:
        side.delays.policies.set(tag=ours.TAG, concurrency=HIGH)

    for what, begin in ((f"a limit of {HIGH:,}", limit), ("no limit", None)):
        drained = burst(stage, side, f"{full:,} due together, {what}", full, leads, begin=begin)
        found |= {name: value for name, value in drained.items() if "drained" in name}
    return found


ANSWERS_AFTER_MS = 50


def callbacks(stage: Stage, side: Side) -> Figures:
    """HTTP callbacks that are due together, to a slow receiver."""
    count, lead = stage.size(10_000, 1_000), stage.size(15, 8)
    command = ["benchmarks.clients", "receiver", str(ANSWERS_AFTER_MS)]
    receiver = BenchmarkProcess("receiver", command, side.folder)
    memory_mb: list[float] = []

    def is_done() -> bool:
        memory_mb.append(side.usage().rss_mb)
        return not side.rows.has_unfinished_due()

    try:
        url = f"http://127.0.0.1:{receiver.expect('port', 10)}/"
        with side.serving():
            due = wall() + lead
            bodies = ({"url": url, "body": {"order": number}} for number in range(count))
            side.delays.schedule_many(NewTask(CALLBACK, body, at=instant(due)) for body in bodies)
            if wall() > due:
                raise BenchError("scheduling took too long")
            sleep_until(due - 0.5)
            before = side.usage()
            sleep_until(due)
            wait_until(is_done, 120, f"{count:,} callbacks", 0.25)
            took_s, spent_s = side.rows.last_settled_at() - due, side.usage().cpu_s - before.cpu_s
            receiver.tell("how many")
            received, most = map(int, receiver.expect("received", 10).split())
            done = side.rows.count(Status.DONE)
        if done != count or received < count:
            raise BenchError(f"of {count:,} {done:,} are DONE, and {received:,} were received")
    finally:
        receiver.stop()
    what = f"{count:,} due together, answered after {ANSWERS_AFTER_MS} ms, two processes"
    return {
        f"{what}, sent/s": count / took_s,
        "simultaneous requests, most": float(most),
        "worker CPU per callback, ms": spent_s / count * 1000,
        "worker memory, start, MB": before.rss_mb,
        "worker memory, peak, MB": max(memory_mb),
    }


#: Schedules for each task that is due in a minute: most of them are due daily.
SCHEDULES_A_TASK = 100
#: The zones of the schedules, so that few of them share their occurrences.
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo", "Australia/Lord_Howe")
PACE_S = 5.0


def recurring(stage: Stage, side: Side) -> Figures:
    """The sweeps of very many schedules. For comparison, as many other tasks are scheduled by
    `schedule_many`. No worker runs.
    """
    a_minute, sweeps = stage.size(1000, 200), stage.size(36, 4)
    every = a_minute * SCHEDULES_A_TASK
    with side.prepared():
        side.rows.fill_recurring(_timing(n, n < a_minute * 60) for n in range(every))
        side.rows.settle_down()
        runtime = runtime_of(side.delays)

        def made() -> int:
            return runtime.events.counts["recurring.created"]

        # The first sweep arms a whole horizon, and is not measured.
        runtime.sweeper.sweep()
        sweep_s = creation_s = scheduling_s = 0.0
        for _ in range(sweeps):
            time.sleep(PACE_S)
            before, began = made(), time.monotonic()
            if runtime.store.sweeps.has_due_schedule(side.delays.settings.recurring_lead_s):
                create(runtime)  # so that the sweep finds no schedule that is due
            created = time.monotonic()
            if count := made() - before:
                side.delays.schedule_many([(ours.TAG, {"due": 0}, 86_400.0)] * count)
            scheduled = time.monotonic()
            runtime.sweeper.sweep()
            creation_s += created - began
            scheduling_s += scheduled - created
            sweep_s += time.monotonic() - scheduled
        if made() < a_minute * sweeps * PACE_S / 60:
            raise BenchError(f"only {made():,} tasks were made")
    what = f"{every:,} schedules, {a_minute:,} due a minute"
    ms = (sweep_s + creation_s) / sweeps * 1000
    other_ms = (sweep_s + scheduling_s) / sweeps * 1000
    return {
        f"{what}: creation, % of a core": 100 * creation_s / (sweeps * PACE_S),
        "a sweep and the creation in it, ms": ms,
        "the same with schedule_many, ms": other_ms,
        "both, ratio": ms / other_ms,
    }


def _timing(number: int, is_hourly: bool) -> tuple[str, str]:
    """Return the cron expression and the time zone of a schedule."""
    hour = "*" if is_hourly else str(number // 60 % 24)
    return f"{number % 60} {hour} * * *", ZONES[number % len(ZONES)]
