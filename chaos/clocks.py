"""Run producers, workers and databases whose clocks are an hour apart.

`python -m chaos.clocks DELAY…` is the producer, a process with its own clock.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import text

from chaos.calls import body
from chaos.checker import Checker, Finding, Verdict
from chaos.history import CallRecord, notebook, now_us
from chaos.pids import children_of
from chaos.report import console, show
from chaos.system import Servers, Site, System, exit_on_signals
from delaytasks.model.clock import to_us
from tests import running as faketime
from tests.running import Process
from tests.services import MissingServiceError
from tests.waiting import wait_until

HOUR_S = 3600
OFFSETS = (0, HOUR_S, -HOUR_S)
#: Delays of the tasks that are due immediately or soon, and of the tasks that an idle worker waits
#: for.
SOON = [0.0] * 10 + [n / 10 for n in range(1, 11)]
LATER_S, LATER = 6.0, 20
#: The idle period of the worker, in seconds after the call.
REST_S = (2.5, 5.5)
#: The most that an idle worker may use: a share of one core, and statements per second. A loop
#: without a pause uses far more.
MOST_CPU, MOST_STATEMENTS = 0.7, 100.0
PATIENCE_S = 40.0
#: The tolerance between the clock offset that a worker measured and the real one.
ABOUT_S = 60
#: The tolerance of a clock that a process has measured.
ABOUT_US = 100_000


class Hours(NamedTuple):
    """How far ahead each clock is, in seconds."""

    producer: int
    worker: int
    database: int


class Outcome(NamedTuple):
    verdict: Verdict
    figures: str


def produce(seconds: Sequence[float]) -> None:
    from delaytasks.celery import delays  # the instance that the environment configures

    for delay in seconds:
        asked_us = now_us()
        task = delays.schedule_delay("note", body(), delay)
        due_us = to_us(task.expected_time)
        if abs(due_us - asked_us - delay * 1e6) > ABOUT_US + now_us() - asked_us:
            due_us = asked_us + int(delay * 1e6)  # the requested time, by the database's clock
        notebook().note(CallRecord(task.id, "schedule", "ok", asked_us, now_us(), due_us))


@contextmanager
def servers(database: str, ahead_s: int) -> Iterator[Servers]:
    """Start Redis, and a database whose clock is `ahead_s` seconds ahead."""
    prefix, environment = "delaytasks-clocks-", faketime.environment(ahead_s) if ahead_s else {}
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        started = Servers(Path(folder), Site(database, "redis", "eta"), environment)
        try:
            yield started
        finally:
            started.close()


def try_out(folder: Path, database_url: str, broker_url: str, hours: Hours) -> Outcome:
    """Run one worker and one producer for some seconds."""
    system = System(folder, database_url, broker_url, hours.database)
    try:
        worker = system.new_worker(**_skewed(hours.worker))
        delays, began = [*SOON, *[LATER_S] * LATER], time.monotonic()
        environment = {**system.environment, **_skewed(hours.producer)}
        command = ("producer", "chaos.clocks", *map(str, delays))
        producer = system.deployment.python(*command, **environment)
        wait_until(producer.ended, PATIENCE_S, "the producer to end", every_s=0.05)
        assert producer.status == 0, producer.log()
        began = max(began, time.monotonic() - 1)
        cpu, statements = _at_rest(system, worker, began)
        until = time.monotonic() + PATIENCE_S
        while system.live() and time.monotonic() < until:
            time.sleep(0.1)
        history = system.history()
        quiet_us = now_us() + hours.database * 1_000_000
        verdict = Checker(history, quiet_us=quiet_us).verdict()
        offset = f"SELECT clock_offset_us FROM {system.deployment.store.schema.workers.name}"
        off_s = _one(system, offset) / 1e6
        late_ms = sorted(
            (run.began_us - task.changes[0].due_us) / 1e3
            for task in history.tasks.values()
            for run in task.runs.values()
        )
        wrong = {
            f"{cpu:.2f} of a core while idle": cpu > MOST_CPU,
            f"{statements:.0f} statements/s while idle": statements > MOST_STATEMENTS,
            f"it measured {off_s:+.0f} s": abs(off_s - hours.worker + hours.database) > ABOUT_S,
            f"{len(late_ms)} runs": len(late_ms) != len(delays),
        }
        found = [Finding("clocks", "wrong", what) for what, is_so in wrong.items() if is_so]
        verdict.findings += found
        middle_ms = late_ms[len(late_ms) // 2] if late_ms else 0
        late = f"late by {middle_ms:.0f} ms (p50), at most {max(late_ms, default=0):.0f} ms"
        return Outcome(verdict, f"{late}, {', '.join(wrong)}")
    finally:
        system.close()


def _skewed(ahead_s: int) -> dict[str, str]:
    return faketime.environment(ahead_s) if ahead_s else {}


def _at_rest(system: System, worker: Process, began: float) -> tuple[float, float]:
    """Return the share of a core and the statements per second while the worker is idle."""
    measured = []
    for at_s in REST_S:
        time.sleep(max(began + at_s - time.monotonic(), 0.5))
        measured.append((time.monotonic(), cpu_s(worker.pid), _statements(system)))
    (began, *before), (ended, *after) = measured
    cpu, statements = (b - a for a, b in zip(before, after, strict=True))
    return cpu / (ended - began), statements / (ended - began)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its children."""
    ticks = 0
    for one in (pid, *children_of(pid)):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _statements(system: System) -> float:
    if system.deployment.store.database.backend == "postgresql":
        return _one(system, "SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database")
    status, name = "information_schema.global_status", "variable_name = 'QUESTIONS'"
    return _one(system, f"SELECT variable_value FROM {status} WHERE {name}")


def _one(system: System, sql: str) -> float:
    database = system.deployment.store.database
    return database.autocommitted(lambda c: float(c.execute(text(sql)).scalar_one()))


# -- the command ----------------------------------------------------------------------------------


def add_options(parser: ArgumentParser) -> None:
    add, only = parser.add_argument, "producer, worker, database"
    add("--database", choices=["postgresql", "mariadb"], action="append")
    add("--only", metavar="SECONDS,SECONDS,SECONDS", action="append", help=only)


def main(options: Namespace) -> int:
    if faketime.library() is None:
        raise MissingServiceError(faketime.MISSING)
    combinations = [Hours(*each) for each in itertools.product(OFFSETS, repeat=3)]
    if options.only:
        combinations = [Hours(*map(int, each.split(","))) for each in options.only]
    exit_on_signals()
    verdict, output = Verdict(), console()
    for database in options.database or ["postgresql", "mariadb"]:
        for ahead_s in sorted({hours.database for hours in combinations}):
            with servers(database, ahead_s) as started, tempfile.TemporaryDirectory() as folder:
                for hours in (each for each in combinations if each.database == ahead_s):
                    place = Path(folder) / "".join(f"{s:+}" for s in hours)
                    place.mkdir()
                    outcome = try_out(place, started.database_url, started.broker.url, hours)
                    apart = ", ".join(f"{name} {s:+} s" for name, s in hours._asdict().items())
                    output.print(f"{database}, {apart}: {outcome.figures}")
                    verdict.add(outcome.verdict)
    return show(verdict, output, has_table=False)


if __name__ == "__main__":
    produce([float(word) for word in sys.argv[1:]])
