"""The two timers and bare Celery eta on the same broker and database."""

from __future__ import annotations

import random
from functools import partial

from benchmarks import brokers, redis_server, table
from benchmarks.cases import burst, steady
from benchmarks.figures import Target, percentile
from benchmarks.machine import load
from benchmarks.meters import Meter
from benchmarks.sides import Bare, Side
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, wait_until, wall

#: Tasks per second, and tasks per call. A thousand calls per second would measure scheduling.
RATES = {50: 1, 1000: 20}
#: Due times within the horizon. Bare Celery has no horizon, and needs more time to schedule.
NEAR_S = {True: (60.0, 70.0), False: (24.0, 29.0)}


def run_steady(stage: CaseContext) -> None:
    for rate, batch in RATES.items():
        *ours, bare = stage.each(
            partial(_steady, stage, rate=rate, batch=batch), *stage.timers, stage.bare
        )
        for side, found in zip(stage.timers, ours, strict=True):
            for what, (unit, value) in found.items():
                target = _TARGETS.get((rate, what))
                figure = stage.figure(
                    "timer_steady", f"{side.timer}: {rate:,}/s, {what}", unit, target
                )
                figure.add(value, bare[what][1])


_TARGETS = {
    (50, "lateness p50"): Target("ratio", most=2),
    (50, "lateness p99"): Target("ratio", most=2),
    (50, "begun early"): Target("value", most=0),
    (1000, "lateness p99"): Target("value", most=20),
    (1000, "begun early"): Target("value", most=0),
    (1000, "CPU per task, worker and servers"): Target("ratio", most=1),
}


def _steady(stage: CaseContext, side: Side, rate: int, batch: int) -> dict[str, tuple[str, float]]:
    with side.serving():
        meter = Meter(side)
        lateness = steady.work(stage, side, rate, batch)
        cost = meter.cost(len(lateness))
    brokers.clear()
    p50, p99 = percentile(lateness, 0.5), percentile(lateness, 0.99)
    stage.say(
        f"timer_steady: {side.name} at {rate:,}/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms, worst "
        f"{max(lateness):.1f} ms, "
        f"CPU a task: {cost}, load {load():.1f}"
    )
    return {
        "lateness p50": ("ms", p50),
        "lateness p99": ("ms", p99),
        "begun early": ("tasks", float(sum(late < 0 for late in lateness))),
        "worker CPU per task": ("ms", cost.worker_ms),
        "Redis CPU per task": ("ms", cost.redis_ms),
        "database CPU per task": ("ms", cost.database_ms),
        "CPU per task, worker and servers": ("ms", cost.all_ms),
    }


def run_burst(stage: CaseContext) -> None:
    count = stage.size(20_000, 5_000)
    schedule = burst.due_together(count, stage.size(60, 15))
    eta, redis, bare = stage.each(
        lambda side: burst.drain(stage, "timer_burst", side, count, schedule),
        *stage.timers,
        stage.bare,
    )
    burst_of = f"{count:,} due together"
    what, target = f"redis compared with eta: {burst_of}", Target("ratio", least=1)
    stage.figure("timer_burst", what, "drained/s", target, against="eta timer:").add(
        redis.per_s, eta.per_s
    )
    for timer, found in (("eta", eta), ("redis", redis)):
        for measure, unit, ours, theirs in (
            (burst_of, "drained/s", found.per_s, bare.per_s),
            ("lateness p99", "ms", found.p99_ms, bare.p99_ms),
            ("worker CPU per task", "ms", found.cost.worker_ms, bare.cost.worker_ms),
            ("Redis CPU per task", "ms", found.cost.redis_ms, bare.cost.redis_ms),
        ):
            stage.figure("timer_burst", f"{timer}: {measure}", unit).add(ours, theirs)


def run_memory(stage: CaseContext) -> None:
    """The memory of waiting tasks: resident memory of the worker, and of the keys in Redis."""
    many, few = stage.size(100_000, 10_000), stage.size(10_000, 2_000)
    try:
        bare = _bytes_each(stage, stage.bare, few)
    except (
        BenchError
    ) as error:  # on RabbitMQ, a worker of bare Celery receives only some near tasks per second
        stage.say(f"timer_memory: bare Celery is skipped: {str(error).splitlines()[0]}")
        brokers.clear()
        bare = {}
    for side in stage.timers:
        found = _bytes_each(stage, side, many)
        for place, value in found.items():
            figure = stage.figure("timer_memory", f"{side.timer}: near task, in {place}", "bytes")
            figure.add(value, bare.get(place))


def _bytes_each(stage: CaseContext, side: Side, count: int) -> dict[str, float]:
    chance = random.Random(3)
    with side.serving():
        rss_mb, in_redis = side.rss_mb(), redis_server.bytes_held()
        now = wall()
        dues = [now + chance.uniform(*NEAR_S[isinstance(side, Bare)]) for _ in range(count)]
        side.schedule_many(dues)
        wait_until(
            lambda: side.holds(count),
            min(dues) - wall(),
            f"{side.name} to hold {count:,} near tasks",
        )
        rss_after_mb = side.rss_mb()
        found = {"Redis": (redis_server.bytes_held() - in_redis) / count}
        if rss_mb is not None and rss_after_mb is not None:
            found["the worker"] = (rss_after_mb - rss_mb) * 2**20 / count
    brokers.clear()
    table.clear()  # the tasks do not have to run
    values = ", ".join(f"{value:,.0f} bytes in {place}" for place, value in found.items())
    stage.say(f"timer_memory: {side.name} with {count:,} near tasks: {values} each")
    return found
