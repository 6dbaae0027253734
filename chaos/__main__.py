"""`python -m chaos [--tasks N] [--faults N] [--every S] [--seed N] [--database …] [--broker …] [--timer …]`"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from chaos.checker import Checker
from chaos.field import Field, Site
from chaos.nemeses import NEMESES
from chaos.report import show
from chaos.run import Plan, run
from tests.services import MissingServiceError

#: It ends with this where a server is missing.
MISSING = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and of what is scheduled")
    parser.add_argument("--database", choices=["postgresql", "mariadb", "sqlite"], default="postgresql")
    parser.add_argument("--broker", choices=["redis", "rabbitmq", "embedded"], default="redis")
    parser.add_argument("--timer", choices=["eta", "redis"], default="eta")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without progress after which it ends")
    parser.add_argument("--only", action="append", metavar="WORDS", help="faults with these words in their names")
    parser.add_argument("--keep", metavar="FOLDER", help="a new one, for what all processes say")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    plan = Plan(seed, options.tasks, options.faults, options.every, options.patience, tuple(options.only or [""]))
    site = Site(options.database, options.broker, options.timer)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"seed {seed}: {plan.tasks:,} tasks and {plan.faults} faults in {plan.seconds:,.0f} s, on {site}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started is ended, however it ends
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background, where shells have it ignored
    with a_folder(options.keep) as folder:
        folder.chmod(0o755)  # the database may be another user's
        field = None
        try:
            field = Field(folder, site)
            for nemesis in NEMESES:
                if why := nemesis.misfit(field):
                    console.print(f"left out: {nemesis.kind}: {why}")
            history, quiet_us = run(field, plan, console.print)
        except MissingServiceError as error:
            console.print(f"{site} can not be had here: {error}")
            return MISSING
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # it is ending
            if field is not None:
                field.close()
    verdict = Checker(history, quiet_us=quiet_us).verdict()
    show(verdict, history, console)
    return 1 if verdict.findings else 0


@contextmanager
def a_folder(kept: str | None) -> Iterator[Path]:
    if kept is not None:
        Path(kept).mkdir(parents=True)
        yield Path(kept).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="delaytasks-chaos-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
