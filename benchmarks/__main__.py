"""Measure delaytasks and bare Celery, or other systems with --peers."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import settings


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="cases or groups; the default is the group `short`"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer tasks and one round, to check that everything works",
    )
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all values to FILE")
    parser.add_argument(
        "--broker", metavar="URL", help="broker instead of DELAYTASKS_BENCH_BROKER_URL"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with status 1 if a target is missed"
    )
    parser.add_argument(
        "--peers", nargs="*", metavar="NAME", help="compare with the named systems, or with all"
    )
    parser.add_argument(
        "--backlog",
        type=int,
        metavar="N",
        help="with --peers: number of tasks that are due tomorrow",
    )
    parser.add_argument(
        "--pages", type=Path, metavar="FILE", help="only write docs/peers.md from FILE"
    )
    options = parser.parse_intermixed_args()
    if options.pages is not None:
        from benchmarks.peers import pages

        print(*pages.write(options.pages), sep="\n")
        return 0
    settings.use(options.broker)
    if options.peers is not None:
        return _peers(parser, options)

    # Importing these modules creates their Celery apps, which read the environment.
    from benchmarks import brokers, machine, report, table
    from benchmarks.cases import CASES, GROUPS, ONCE
    from benchmarks.notes import Notes
    from benchmarks.sides import Bare, Ours, OursDirect, OursInRedis
    from benchmarks.stage import CaseContext
    from benchmarks.waiting import BenchError

    unknown = sorted(set(options.names) - set(CASES) - set(GROUPS))
    if unknown:
        parser.error(
            f"no case {', '.join(unknown)}; the cases are {', '.join(CASES)}; the groups are "
            f"{', '.join(GROUPS)}"
        )
    names = list(
        dict.fromkeys(
            case for name in options.names or ["short"] for case in GROUPS.get(name, [name])
        )
    )
    rounds = options.rounds or (1 if options.quick else 3)
    console = report.console()
    folder = Path(tempfile.mkdtemp(prefix="delaytasks-bench-"))
    notes = Notes(folder / "notes")
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.0f} s  {text}[/dim]", highlight=False)

    sides = (
        Ours(folder, notes),
        OursInRedis(folder, notes),
        OursDirect(folder, notes),
        Bare(folder, notes),
    )
    stage = CaseContext(*sides, options.quick, say)
    facts: dict[str, Any] = {}
    failures: list[str] = []
    held = ExitStack()
    try:
        held.enter_context(table.alone())
        brokers.check()
        table.make()
    except BenchError as error:
        held.close()
        shutil.rmtree(folder)
        console.print(str(error), style="red", markup=False)
        return 2
    try:
        brokers.clear()
        facts = {
            **machine.facts(),
            "database": table.server_version(),
            "broker": brokers.describe(),
        }
        report.print_facts(console, facts)
        for name in names:
            times = 1 if name in ONCE else rounds
            for number in range(times):
                say(f"{name}, round {number + 1} of {times}")
                stage.round = number
                try:
                    CASES[name](stage)
                except Exception as error:  # the other cases are still worth their results
                    failures.append(f"{name}, round {number + 1}: {error}")
                    text = str(error) if isinstance(error, BenchError) else traceback.format_exc()
                    console.print(f"{name}: {text}", style="red", highlight=False, markup=False)
    finally:
        table.drop()
        brokers.clear()
        held.close()
    report.print_table(console, stage.figures)
    if options.json is not None:
        found = [figure.as_json() for figure in stage.figures]
        text = json.dumps(
            {"machine": facts, "quick": options.quick, "figures": found, "failures": failures},
            indent=1,
        )
        options.json.write_text(text + os.linesep)
    if failures:
        console.print(
            f"{len(failures)} failed; the logs are in {folder}", style="red", markup=False
        )
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    is_missed = any(figure.is_reached is False for figure in stage.figures)
    return 1 if is_missed and options.strict else 0


def _peers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from benchmarks.peers import run

    try:
        systems, workloads = run.chosen(options.peers, options.names)
    except run.UnknownNameError as error:
        parser.error(str(error))
    return run.run(systems, workloads, options.rounds or (1 if options.quick else 3), options)


if __name__ == "__main__":
    sys.exit(main())
