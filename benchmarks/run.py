"""Measure the chosen cases in turn, and print their figures.

Importing this module creates the Celery apps of the benchmarks, which read the environment.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks import brokers, machine, report, table
from benchmarks.cases import CASES, GROUPS, ONCE
from benchmarks.notes import Notes
from benchmarks.sides import Bare, DurableEta, Ours, OursDirect, OursInRedis
from benchmarks.stage import CaseContext
from benchmarks.waiting import BenchError


def chosen(names: Sequence[str]) -> list[str]:
    """Return the cases of the named cases and groups, each one once.

    Raises
    ------
    ValueError
        A name is neither a case nor a group.
    """
    unknown = sorted(set(names) - set(CASES) - set(GROUPS))
    if unknown:
        raise ValueError(
            f"no case {', '.join(unknown)}; the cases are {', '.join(CASES)}; the groups are "
            f"{', '.join(GROUPS)}"
        )
    return list(dict.fromkeys(case for name in names for case in GROUPS.get(name, [name])))


def run(names: Sequence[str], rounds: int, options: Namespace) -> int:
    """Return the exit status."""
    console = report.console()
    folder = Path(tempfile.mkdtemp(prefix="delaytasks-bench-"))
    stage = _stage(folder, console, options.quick)
    failures: list[str] = []
    with ExitStack() as held:
        try:
            held.enter_context(table.alone())
            brokers.check()
            table.make()
        except BenchError as error:
            shutil.rmtree(folder)
            console.print(str(error), style="red", markup=False)
            return 2
        held.callback(brokers.clear)
        held.callback(table.drop)
        brokers.clear()
        facts = {
            **machine.facts(),
            "database": table.server_version(),
            "broker": brokers.describe(),
        }
        report.print_facts(console, facts)
        for name in names:
            failures += _measure(stage, console, name, 1 if name in ONCE else rounds)
    report.print_table(console, stage.figures)
    if options.json is not None:
        _write(options.json, facts, stage, failures)
    if failures:
        console.print(
            f"{len(failures)} failed; the logs are in {folder}", style="red", markup=False
        )
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    is_missed = any(figure.is_reached is False for figure in stage.figures)
    return 1 if is_missed and options.strict else 0


def _stage(folder: Path, console: Console, is_quick: bool) -> CaseContext:
    notes = Notes(folder / "notes")
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.0f} s  {text}[/dim]", highlight=False)

    return CaseContext(
        Ours(folder, notes),
        OursInRedis(folder, notes),
        OursDirect(folder, notes),
        DurableEta(folder, notes),
        Bare(folder, notes),
        is_quick,
        say,
    )


def _measure(stage: CaseContext, console: Console, name: str, times: int) -> list[str]:
    """Run a case `times` times, and return its failures."""
    failures = []
    for number in range(times):
        stage.say(f"{name}, round {number + 1} of {times}")
        stage.round = number
        try:
            CASES[name](stage)
        except Exception as error:  # the results of the other cases are still of use
            failures.append(f"{name}, round {number + 1}: {error}")
            text = str(error) if isinstance(error, BenchError) else traceback.format_exc()
            console.print(f"{name}: {text}", style="red", highlight=False, markup=False)
    return failures


def _write(file: Path, facts: object, stage: CaseContext, failures: Sequence[str]) -> None:
    document = {
        "machine": facts,
        "quick": stage.is_quick,
        "figures": [figure.as_json() for figure in stage.figures],
        "failures": failures,
    }
    file.write_text(json.dumps(document, indent=1) + os.linesep)
