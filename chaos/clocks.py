"""Run producers, workers and databases whose clocks are an hour apart."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from chaos.checker import Checker, Verdict
from chaos.history import History, read
from chaos.pids import children_of
from chaos.project import now_us, time_environment
from chaos.recorder import Recorder
from chaos.system import SETTINGS, exit_on_signals
from delaytasks.model.moves import Status
from tests import running as faketime
from tests.running import Deployment, Process
from tests.services import MariaDBServer, PostgresServer, RedisServer
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


class Hours(NamedTuple):
    """How far ahead each clock is, in seconds."""

    producer: int
    worker: int
    database: int


class ClockOutcome(NamedTuple):
    verdict: Verdict
    #: Seconds from due time to begin by the database's clock, sorted.
    late_s: Sequence[float]
    #: Usage while the worker is idle: share of a core, and statements per second.
    cpu: float
    statements: float
    #: The clock offset that the worker measured, relative to the database.
    off_s: float
    is_mistaken: bool

    @property
    def middle_s(self) -> float:
        return self.late_s[len(self.late_s) // 2] if self.late_s else 0.0

    @property
    def violations(self) -> list[str]:
        found = [f"{count} {kind}" for kind, count in self.verdict.counts().items()]
        found += [f"hot: {self.cpu:.2f} of a core"] if self.cpu > MOST_CPU else []
        found += (
            [f"hot: {self.statements:.0f} statements/s"]
            if self.statements > MOST_STATEMENTS
            else []
        )
        found += (
            [f"its clock is {self.off_s:+.0f} s off by its own measurement"]
            if self.is_mistaken
            else []
        )
        missing = len(SOON) + LATER - len(self.late_s)
        return found + ([f"{missing} never ran"] if missing else [])


@contextmanager
def server(database: str, ahead_s: int) -> Iterator[str]:
    """Start a database whose clock is `ahead_s` seconds ahead, and yield its URL."""
    environment = faketime.environment(ahead_s) if ahead_s else {}
    with tempfile.TemporaryDirectory(
        prefix="delaytasks-clocks-", ignore_cleanup_errors=True
    ) as folder:
        Path(folder).chmod(0o755)  # the database may run as another user
        place = Path(folder) / "database"
        place.mkdir()
        made: MariaDBServer | PostgresServer
        if database == "mariadb":
            made = MariaDBServer(place, environment)
        else:
            made = PostgresServer(place, environment)
        try:
            yield made.url
        finally:
            made.crash()
            faketime.forget_the_dead()


def try_out(folder: Path, database_url: str, broker_url: str, hours: Hours) -> ClockOutcome:
    """Run one worker and one producer for some seconds."""
    conf = {"imports": ["chaos.project"]}
    deployment = Deployment(folder, database_url, broker_url, conf, **SETTINGS)
    recorder = Recorder(deployment.store)
    try:
        recorder.start()
        shared = time_environment(hours.database)
        worker = deployment.worker(**dict[str, Any](shared | _skewed(hours.worker)))
        notes = folder / "notes"
        delays = [*SOON, *[LATER_S] * LATER]
        arguments = [str(notes), *map(str, delays)]
        began = time.monotonic()
        producer = deployment.python(
            "producer", "chaos.distant", *arguments, **shared, **_skewed(hours.producer)
        )
        wait_until(producer.ended, PATIENCE_S, "the producer to end", every_s=0.05)
        assert producer.status == 0, producer.log()
        began = max(began, time.monotonic() - 1)
        cpu, statements = _at_rest(deployment, worker, began)
        t = deployment.store.schema.tasks
        count = f"SELECT count(*) FROM {t.name} WHERE status <> {int(Status.DONE)}"
        try:
            wait_until(
                lambda: _one(deployment, count) == 0,
                PATIENCE_S,
                "all tasks to be done",
                every_s=0.1,
            )
        except AssertionError:
            pass  # the checker reports the unfinished tasks
        history = read(notes, recorder.changes())
        quiet_us = now_us() + hours.database * 1_000_000
        verdict = Checker(history, quiet_us=quiet_us).verdict()
        off_s = (
            _one(deployment, f"SELECT clock_offset_us FROM {deployment.store.schema.workers.name}")
            / 1e6
        )
        is_mistaken = abs(off_s - (hours.worker - hours.database)) > ABOUT_S
        return ClockOutcome(verdict, _lateness(history), cpu, statements, off_s, is_mistaken)
    finally:
        recorder.stop()
        deployment.close()


def _skewed(ahead_s: int) -> dict[str, str]:
    return faketime.environment(ahead_s) if ahead_s else {}


def _at_rest(deployment: Deployment, worker: Process, began: float) -> tuple[float, float]:
    from_s, until_s = REST_S
    time.sleep(max(began + from_s - time.monotonic(), 0))
    before = (time.monotonic(), cpu_s(worker.pid), _statements(deployment))
    time.sleep(max(began + until_s - time.monotonic(), 0.5))
    after = (time.monotonic(), cpu_s(worker.pid), _statements(deployment))
    seconds = after[0] - before[0]
    return (after[1] - before[1]) / seconds, (after[2] - before[2]) / seconds


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its children."""
    ticks = 0
    for one in (pid, *children_of(pid)):
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _statements(deployment: Deployment) -> float:
    if deployment.store.database.url.get_backend_name() == "postgresql":
        return _one(deployment, "SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database")
    sql = (
        "SELECT variable_value FROM information_schema.global_status "
        "WHERE variable_name = 'QUESTIONS'"
    )
    return _one(deployment, sql)


def _one(deployment: Deployment, sql: str) -> float:
    return deployment.store.database.autocommitted(
        lambda c: float(c.execute(text(sql)).scalar_one())
    )


def _lateness(history: History) -> list[float]:
    due = {change.id: change.due_us for change in history.changes}
    return sorted(
        (ran.began_us - due[ran.id]) / 1e6 for ran in history.run_records if ran.id in due
    )


# -- the command ----------------------------------------------------------------------------------

COLUMNS = (
    "server",
    *Hours._fields,
    "runs",
    "late ms: p50",
    "max",
    "of a core",
    "statements/s",
    "found",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="clocks", description=__doc__)
    parser.add_argument("--database", choices=["postgresql", "mariadb"], action="append")
    parser.add_argument(
        "--only",
        metavar="SECONDS,SECONDS,SECONDS",
        action="append",
        help="producer, worker, database",
    )
    options = parser.parse_args()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if faketime.library() is None:
        console.print(faketime.MISSING)
        return 2
    combinations = [Hours(*each) for each in itertools.product(OFFSETS, repeat=3)]
    if options.only:
        combinations = [Hours(*map(int, each.split(","))) for each in options.only]
    exit_on_signals()
    console.width = max(console.width, 110)  # also if the output is a file
    table = Table(*COLUMNS)
    with_violations = 0
    for database in options.database or ["postgresql", "mariadb"]:
        for hours, outcome in _outcomes(database, combinations):
            with_violations += bool(outcome.violations)
            row = _row(database, hours, outcome)
            table.add_row(*row)
            console.print("  ".join(row))
            if outcome.verdict.findings:
                console.print(str(outcome.verdict))
    console.print(table)
    return 1 if with_violations else 0


def _row(database: str, hours: Hours, outcome: ClockOutcome) -> Sequence[str]:
    """Return one cell for each of COLUMNS."""
    return (
        database,
        *(f"{s:+} s" for s in hours),
        str(len(outcome.late_s)),
        *(f"{1000 * s:.0f}" for s in (outcome.middle_s, max(outcome.late_s, default=0))),
        f"{outcome.cpu:.2f}",
        f"{outcome.statements:.0f}",
        ", ".join(outcome.violations) or "nothing",
    )


def _outcomes(database: str, combinations: Sequence[Hours]) -> Iterator[tuple[Hours, ClockOutcome]]:
    """Run the combinations one after the other, grouped by the database's clock."""
    for ahead_s in sorted({hours.database for hours in combinations}):
        with (
            server(database, ahead_s) as url,
            tempfile.TemporaryDirectory(prefix="delaytasks-clocks-") as folder,
        ):
            redis = RedisServer(Path(folder))
            try:
                for number, hours in enumerate(
                    each for each in combinations if each.database == ahead_s
                ):
                    place = Path(folder) / str(number)
                    place.mkdir()
                    yield hours, try_out(place, url, redis.url, hours)
            finally:
                redis.stop()


if __name__ == "__main__":
    sys.exit(main())
