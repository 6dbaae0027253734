"""The CPU time of an idle worker, and its requests to Redis and the database."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from celery import Celery

from benchmarks import processes, redis_server, table
from benchmarks.meters import NAN
from benchmarks.sides import START_S, Ours, Side
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError, wait_until
from tests.services import redis_program

#: After this time, connections are open and the first sweeps are over.
SETTLE_S = 15.0


@dataclass(frozen=True)
class Idle:
    """The resources of one worker, and for delaytasks also of the beat."""

    cpu_s_a_minute: float
    #: Commands per second by name, including those in scripts.
    commands: dict[str, float]
    transactions: float

    def __str__(self) -> str:
        named = ", ".join(f"{name} {rate:.2f}" for name, rate in sorted(self.commands.items()))
        return (
            f"{self.cpu_s_a_minute:.2f} s a minute; Redis {named}; {self.transactions:.2f} "
            "transactions/s"
        )


def run(stage: CaseContext) -> None:
    if redis_program() is None or not table.can_fill():
        stage.say("idle: skipped, since it needs PostgreSQL and a local redis-server")
        return
    bare = _measure(stage, stage.bare)
    for side in stage.timers:
        ours, name = _measure(stage, side), f"idle worker, {side.timer} timer"
        stage.figure("idle", f"{name}: CPU a minute", "s").add(
            ours.cpu_s_a_minute, bare.cpu_s_a_minute
        )
        commands = stage.figure("idle", f"{name} and beat: commands in Redis", "/s")
        commands.add(sum(ours.commands.values()), sum(bare.commands.values()))
        stage.figure("idle", f"{name}: transactions in the database", "/s").add(ours.transactions)


def _measure(stage: CaseContext, side: Side) -> Idle:
    """Measure in a private Redis and database, so that all requests belong to the side.

    Nearly all transactions are single statements.
    """
    with redis_server.private(side.folder) as redis, table.private() as database:
        where = {
            "BENCH_BROKER_URL": redis.url,
            "BENCH_REDIS_URL": redis.url,
            "BENCH_DATABASE_URL": database.url,
        }
        started = [
            processes.worker(
                side.app_path, f"idle_{side.name}", side.folder, side.notes.path, **where
            )
        ]
        try:
            app = Celery(broker=redis.url, set_as_current=False)
            wait_until(
                lambda: app.control.ping(timeout=0.5), START_S, f"{started[0].name} to answer", 1
            )
            app.close()
            if isinstance(side, Ours):
                started.append(processes.beat(side.app_path, side.folder, **where))
            time.sleep(SETTLE_S)
            found = _watch(stage.size(120, 30), started[0], redis, database)
            for process in started:
                if not process.is_alive:
                    raise BenchError(
                        f"idle: {process.name} ended by itself:\n{process.last_words()}"
                    )
        finally:
            for process in started:
                process.stop()
    stage.say(f"idle: {side.name} {found}")
    return found


def _watch(
    for_s: float,
    worker: processes.BenchmarkProcess,
    redis: redis_server.PrivateRedisServer,
    database: table.PrivateDatabase,
) -> Idle:
    def read() -> tuple[float, Counter[str], int]:
        usage = worker.usage()
        return NAN if usage is None else usage.cpu_s, redis.commands(), database.transactions()

    began, before = time.monotonic(), read()
    time.sleep(for_s)
    after, took_s = read(), time.monotonic() - began
    commands = {name: count / took_s for name, count in (after[1] - before[1]).items()}
    return Idle((after[0] - before[0]) / took_s * 60, commands, (after[2] - before[2]) / took_s)
