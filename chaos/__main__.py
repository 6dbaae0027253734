"""Inject random faults into a real deployment, and check that no promise is broken.

Without options, this is the two-minute run that every change has to pass.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from chaos.checker import Checker
from chaos.nemeses import NEMESES
from chaos.report import show
from chaos.run import Plan, RunOutcome, run
from chaos.system import ServerChoice, SystemUnderTest, exit_on_signals
from tests.services import MissingServiceError

#: The exit status if a required server is missing.
MISSING = 3


def main() -> int:
    options = _parser().parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    plan = Plan(
        seed,
        options.tasks,
        options.faults,
        min(options.kills, options.faults),
        options.every,
        options.patience,
        options.within,
        tuple(options.only or [""]),
    )
    site = ServerChoice(options.database, options.broker, options.timer)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"seed {seed}: {plan.tasks:,} tasks and {plan.faults} faults "
        f"in {plan.seconds:,.0f} s, on {site}"
    )
    began = time.monotonic()
    exit_on_signals()
    with _folder(options.keep) as folder:
        folder.chmod(0o755)  # the database may run as another user
        try:
            outcome = _play(folder, site, plan, console)
        except MissingServiceError as error:
            console.print(f"{site} is not available on this machine: {error}")
            return MISSING
    verdict = Checker(outcome.history, quiet_us=outcome.quiet_us, by_us=outcome.by_us).verdict()
    show(verdict, outcome.history, outcome.over_us, console)
    console.print(f"{time.monotonic() - began:.0f} s")
    return 1 if verdict.findings else 0


def _play(folder: Path, site: ServerChoice, plan: Plan, console: Console) -> RunOutcome:
    system = None
    try:
        system = SystemUnderTest(folder, site)
        for nemesis in NEMESES:
            if why := nemesis.misfit(system):
                console.print(f"skipped: {nemesis.kind}: {why}")
        return run(system, plan, console.print)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the cleanup must not be interrupted
        if system is not None:
            system.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    add = parser.add_argument
    add("--tasks", type=int, default=2000)
    add("--faults", type=int, default=30)
    add("--kills", type=int, default=22, help="minimum number of kills among the faults")
    add("--every", type=float, default=2.5, help="seconds between two faults")
    add("--seed", type=int, help="seed of the faults and of the scheduled tasks")
    add("--database", choices=["postgresql", "mariadb", "sqlite"], default="postgresql")
    add("--broker", choices=["redis", "rabbitmq"], default="redis")
    add("--timer", choices=["eta", "redis"], default="eta")
    add(
        "--patience",
        type=float,
        default=60.0,
        help="seconds without progress after which the run ends",
    )
    add(
        "--within",
        type=float,
        default=60.0,
        help="seconds after the last fault until every due task must be finished",
    )
    add(
        "--only",
        action="append",
        metavar="WORDS",
        help="use only faults whose names contain WORDS; `kill` selects all kills",
    )
    add("--keep", metavar="FOLDER", help="new folder that keeps the logs of all processes")
    return parser


@contextmanager
def _folder(kept: str | None) -> Iterator[Path]:
    if kept is not None:
        Path(kept).mkdir(parents=True)
        yield Path(kept).absolute()
        return
    with tempfile.TemporaryDirectory(
        prefix="delaytasks-chaos-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
