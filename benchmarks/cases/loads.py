"""Loads that any system can run: bursts, steady work, a backlog, calls, and a killed worker.

The processors only record the time, or sleep or compute. Two tasks run at a time, one in each
process, unless a system runs many in an event loop and the processors take no time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

from benchmarks.figures import late, percentile
from benchmarks.run import Stage
from benchmarks.side import NONE, CpuMeter, Figures, Scheduled, Side
from benchmarks.waiting import BenchError, sleep_until, wall
from delaytasks import Status
from tests.proxy import proxy_to

HOUR_S, DAY_S = 3600.0, 86400.0
#: Bare Celery runs five tasks per second with a broker round trip of 100 ms.
DEADLINE_S = 240.0
#: Steady tasks are due in one to five seconds.
SOONEST_S, LATEST_S = 1.0, 5.0
RATE = 50
#: Seconds ahead for a burst of single calls: within the horizon, where each call sends a message,
#: or beyond it, where the sweep sends hundreds of tasks in one. Later values are tried if the
#: machine is too busy.
NEAR_S, FAR_S = (20, 25, 29), (60, 90)
PRODUCERS = 2


# -- processors that take no time ----------------------------------------------------------------


def burst_bulk(
    stage: Stage, side: Side, full: int = 50_000, leads: Sequence[int] = (60, 120)
) -> Figures:
    """Schedule many tasks that are due at one instant, in bulk if possible."""
    count, leads = stage.size(full, 5_000), (15, 30) if stage.is_quick else leads
    what = f"{count:,} due together, schedule_many {leads[0]} s ahead"
    return burst(stage, side, what, count, leads)


def burst_single(stage: Stage, side: Side, leads: Sequence[int] = NEAR_S) -> Figures:
    """Schedule one call at a time, in several concurrent producers."""
    count = stage.size(20_000, 4_000)
    what = f"{count:,} due together, one call each {leads[0]} s ahead"
    return burst(stage, side, what, count, leads, PRODUCERS)


def burst(
    stage: Stage, side: Side, what: str, count: int, leads: Sequence[int], producers: int = 0
) -> Figures:
    """Schedule tasks due at one instant: in bulk, or one by one in several producers."""
    for lead in leads:
        with side.serving(producers=producers or 1):
            meter, due = CpuMeter(side), wall() + lead
            schedule = side.schedule if producers else side.schedule_many
            made = schedule(count, due, due, lead - 2)
            if (made.tasks < count or wall() > due) and lead != leads[-1]:
                stage.say(f"{side.name} scheduled {made.tasks:,} tasks in {lead} s: more time")
                continue
            return _drained(stage, side, what, made, count, due) | meter.per_task(made.tasks)
    raise AssertionError("the last attempt returns")


def _drained(
    stage: Stage, side: Side, what: str, made: Scheduled, count: int, due: float
) -> Figures:
    fewer(stage, side, made, count)
    if wall() > due:
        stage.remark(side.name, "the last tasks were scheduled after their due time")
    sleep_until(due)
    is_done = side.ran_all(made.tasks, DEADLINE_S)
    ran = len(side.ran())
    if not is_done:
        stage.remark(side.name, f"{ran:,} of {made.tasks:,} ran within {DEADLINE_S:.0f} s")
    if not ran:
        raise BenchError("no task ran")
    found = {f"{what}, drained/s": ran / (side.ended_at() - due)}
    if side.is_ours:
        check(side, made.tasks)
        settled = side.rows.last_settled_at() - due
        if side.name == "ours_eta":
            found["messages published, tasks/s"] = made.tasks / settled
    return found | late(side.claimed_late_ms()) | began_late(side)


def began_late(side: Side) -> Figures:
    """Return how late the processors began: a moment that all systems have."""
    late_ms = side.lateness_ms()
    return {
        "processors began after, p50, ms": percentile(late_ms, 0.5),
        "processors began after, p99, ms": percentile(late_ms, 0.99),
    }


def check(side: Side, count: int) -> None:
    """Check that all tasks are DONE, and that none was early."""
    done, every = side.rows.count(Status.DONE), side.rows.count()
    if not done == every == count:
        raise BenchError(f"of {count:,} tasks {done:,} are DONE, and there are {every:,} rows")
    if min(side.rows.lateness_ms()) < 0:
        raise BenchError("a task began early")


def fewer(stage: Stage, side: Side, made: Scheduled, wanted: int) -> None:
    if made.tasks < wanted:
        stage.remark(side.name, f"scheduled {made.tasks:,} of {wanted:,} before the time limit")


def steady(stage: Stage, side: Side, rate: int = RATE, batch: int = 1) -> Figures:
    """Run tasks that are due in one to five seconds, scheduled singly or in batches."""
    with side.serving():
        meter = CpuMeter(side)
        late_ms = steady_work(stage, side, rate, batch)
        return {
            f"{rate}/s due in 1 to 5 s, lateness p50, ms": percentile(late_ms, 0.5),
            "lateness p99, ms": percentile(late_ms, 0.99),
            **began_late(side),
            "begun early, tasks": float(sum(one < 0 for one in late_ms)),
            **meter.per_task(len(late_ms)),
        }


def steady_work(stage: Stage, side: Side, rate: int = RATE, batch: int = 1) -> list[float]:
    """Run steady work, and return the lateness of each task in milliseconds, as in our rows."""
    run_steadily(stage, side, rate, batch)
    found = side.claimed_late_ms()
    if not found:
        raise BenchError("no task ran")
    return found


def run_steadily(stage: Stage, side: Side, rate: int = RATE, batch: int = 1) -> None:
    """Schedule tasks at a rate, and wait until they have run. No other tasks may have run."""
    seconds = stage.size(20, 8)
    made = side.steady(rate, rate * seconds, batch, SOONEST_S, LATEST_S, 2 * seconds)
    if made.took_s > seconds * 1.1:
        stage.remark(side.name, f"could schedule only {made.per_s:,.0f} a second")
    if not side.ran_all(made.tasks, 60):
        text = f"{len(side.ran()):,} of {made.tasks:,} ran within 60 s after the last call"
        stage.remark(side.name, text)


def durable_eta(stage: Stage, side: Side) -> Figures:
    """Celery tasks with an eta whose messages wait as rows, compared with bare Celery."""
    count, lead = stage.size(20_000, 4_000), stage.size(90, 30)
    found = burst(stage, side, f"{count:,} due together", count, (lead, 120))
    return found | steady(stage, side)


def backlog(stage: Stage, side: Side, far: int = 1_000_000) -> Figures:
    """Measure near tasks, add many tasks that are due tomorrow, and measure near tasks again."""
    rows = stage.size(far, 20_000)
    with side.serving():
        steady_work(stage, side)  # allocates the memory that any work needs
        side.forget()
        without = steady_work(stage, side)
        side.forget()
        worker_mb, server_mb, due = side.usage().rss_mb, side.server_mb(), wall() + DAY_S
        made = side.schedule_many(rows, due, due, max(rows / 5000, 30))
        fewer(stage, side, made, rows)
        if stage.servers.backend == "postgresql" and side.is_ours:
            side.rows.settle_down()
        behind = steady_work(stage, side)
        found = {
            **late(without, "without the backlog, "),
            **late(behind, f"before {made.tasks:,} tasks due tomorrow, "),
            "worker memory grew by, MB": side.usage().rss_mb - worker_mb,
            "memory or disk of the servers, bytes per far task": (
                (side.server_mb() - server_mb) * 2**20 / made.tasks
            ),
        }
        p99 = [value for name, value in found.items() if "p99" in name]
        return found | {"lateness p99 with / without it, ratio": p99[1] / p99[0]}


def calls(stage: Stage, side: Side) -> Figures:
    """Schedule one call after the other, without workers."""
    return {"single calls, tasks/s": _scheduled(stage, side, side.schedule, stage.size(3000, 300))}


def bulk(stage: Stage, side: Side) -> Figures:
    """Schedule in bulk, by one producer."""
    rows = stage.size(200_000, 10_000)
    if not side.system.has_bulk:
        stage.remark(side.name, "it has no call that schedules many tasks")
        return {}
    per_s = _scheduled(stage, side, side.schedule_many, rows)
    return {f"schedule_many, {rows:,} rows, rows/s": per_s}


def _scheduled(stage: Stage, side: Side, schedule: Callable[..., Scheduled], count: int) -> float:
    """Schedule `count` tasks, and before that a share of them to warm up connections and caches."""
    with side.producing():
        due = wall() + HOUR_S
        schedule(count // 10, due, due, 5)
        made = schedule(count, due, due, stage.size(30, 10))
    fewer(stage, side, made, count)
    return made.per_s


def recovery(stage: Stage, side: Side) -> Figures:
    """Kill one of two workers when it begins a task of 300 ms: four processes, and one task for
    each of them at every step.
    """
    steps, limit_s, step_s = stage.size(20, 8), stage.size(75, 30), 0.5
    count = 4 * steps
    with side.serving(2, takes_s=0.3):
        first = wall() + 5
        for step in range(steps):
            due = first + step * step_s
            # Due times differ by microseconds, so that each task is identifiable.
            side.schedule(4, due, due + 4e-6, 5)
        sleep_until(first + steps // 2 * step_s)
        side.kill_a_busy_one()
        ends = first + steps * step_s + limit_s
        while len(runs := {note.due: note for note in reversed(side.ran())}) < count:
            if wall() > ends:
                break
            time.sleep(0.1)
    found = {f"did not run within {limit_s} s, tasks": float(count - len(runs))}
    if len(runs) == count:
        latest = max(note.began - note.due for note in runs.values())
        found["a worker is killed, lateness of the last task, s"] = latest
    return found


def idle(stage: Stage, side: Side) -> Figures:
    """Measure what a worker and its beat use without work."""
    with side.serving():
        time.sleep(15)  # connections are open, and the first sweeps are over

        def read() -> tuple[float, float, int, int]:
            on_postgresql = stage.servers.backend == "postgresql"
            transactions = stage.servers.transactions() if on_postgresql else 0
            commands = sum(stage.servers.commands().values())
            return time.monotonic(), side.usage().cpu_s, commands, transactions

        before = read()
        time.sleep(stage.size(120, 20))
        took_s, cpu_s, commands, transactions = (
            now - then for now, then in zip(read(), before, strict=True)
        )
        return {
            "an idle worker, CPU s per minute": cpu_s / took_s * 60,
            "commands in Redis, /s": commands / took_s,
            "transactions in PostgreSQL, /s": transactions / took_s,
        }


# -- processors that take time, and distant servers ------------------------------------------------

#: Steady tasks per second. Of slow processors there are fewer, so that the processes are busy for
#: this share of their time.
WORK_RATE, BUSY = 60, 0.6
#: The maximum of tasks of a burst per second of its length, and what bare Celery schedules at
#: least per second, one call each.
MOST_PER_S, CALLS_PER_S = 1000, 250
#: Tasks that a call schedules beyond the horizon, and within it.
BEYOND_S, WITHIN_S = 3600.0, 25.0
#: A producer connects to a distant broker in the background, in a dozen round trips.
CONNECT_S = 3.0


def _variables(kind: str) -> dict[str, str]:
    """Return the variables of workers whose processes run one task at a time."""
    return {"BENCH_ONE_AT_A_TIME": "1", **({"BENCH_COMPUTES": "1"} if kind == "compute" else {})}


def timed_burst(
    stage: Stage, side: Side, kind: str, ms: float, variables: Mapping[str, str] = NONE
) -> Figures:
    """Run tasks that are due at one instant, and that take 5 s in two processes that do nothing
    but run the processor.
    """
    ideal = 2000 / ms if ms else math.inf
    count = round(stage.size(5, 1) * min(ideal, MOST_PER_S))
    lead = 2 + count / CALLS_PER_S
    with side.serving(takes_s=ms / 1000, variables={**_variables(kind), **variables}):
        meter, due = CpuMeter(side, ms if kind == "compute" else 0), wall() + lead
        made = side.schedule_many(count, due, due, lead)
        if made.tasks < count or wall() > due:
            raise BenchError(f"{made.tasks:,} of {count:,} tasks were scheduled in {lead:.0f} s")
        sleep_until(due)
        side.wait_for(count, DEADLINE_S)
        per_s = count / (side.ended_at() - due)
        share = {"share of the ideal, ratio": per_s / ideal}
        return {"drained, tasks/s": per_s, **(share if ms else {}), **meter.per_task(count)}


def timed_steady(
    stage: Stage, side: Side, kind: str, ms: float, variables: Mapping[str, str] = NONE
) -> Figures:
    """Run some tasks per second."""
    rate = min(WORK_RATE, round(BUSY * 2000 / ms)) if ms else WORK_RATE
    seconds = stage.size(10, 3)
    with side.serving(takes_s=ms / 1000, variables={**_variables(kind), **variables}):
        meter, count = CpuMeter(side, ms if kind == "compute" else 0), rate * seconds
        made = side.steady(rate, count, 1, SOONEST_S, LATEST_S, 2 * seconds)
        if made.took_s > 1.1 * seconds:
            raise BenchError(f"{made.per_s:.0f} tasks a second were scheduled instead of {rate}")
        side.wait_for(count, DEADLINE_S)
        late_ms = side.lateness_ms()
        latest = {"lateness of the latest, ms": max(late_ms)}
        return late(late_ms) | latest | meter.per_task(count)


def distant_calls(stage: Stage, side: Side, variables: Mapping[str, str]) -> Figures:
    """Measure single calls without workers."""
    found, count = {}, stage.size(100, 20)
    with side.producing(variables=variables):
        for name, ahead in (("beyond", BEYOND_S), ("within", WITHIN_S)):
            due = wall() + ahead
            side.schedule(10, due, due, DEADLINE_S)  # opens connections
            time.sleep(CONNECT_S)
            side.schedule(10, due, due, DEADLINE_S)
            made = side.schedule(count, due, due, DEADLINE_S)
            found[f"a call {name} the horizon, ms"] = made.took_s / made.tasks * 1000
    return found


def across(stage: Stage, side: Side, load: str, database_ms: float, broker_ms: float) -> Figures:
    """Run a load whose processes reach the servers through proxies with these round trips."""
    with ExitStack() as held:
        variables = {}
        for name, ms in (("BENCH_DATABASE_URL", database_ms), ("BENCH_BROKER_URL", broker_ms)):
            url = side.environment[name]
            proxy = held.enter_context(closing(proxy_to(url)))
            proxy.delay_s = ms / 2000
            variables[name] = proxy.url(url)
        if load == "call":
            return distant_calls(stage, side, variables)
        timed = timed_burst if load == "burst" else timed_steady
        return timed(stage, side, "sleep", 20, variables)


far = partial(burst_single, leads=FAR_S)
steady_1000 = partial(steady, rate=1000, batch=20)
