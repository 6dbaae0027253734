"""Measure the chosen cases with their sides in turn, and print their figures."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import figures, processes, servers
from benchmarks.figures import OURS, Results
from benchmarks.servers import POSTGRESQL, Servers
from benchmarks.systems import SYSTEMS
from benchmarks.waiting import BenchError

if TYPE_CHECKING:
    from benchmarks.side import Side


@dataclass
class Stage:
    """What a case needs beside the side that it measures."""

    servers: Servers
    results: Results
    is_quick: bool
    began: float = field(default_factory=time.monotonic)
    case: str = ""

    def size(self, full: int, quick: int) -> int:
        return quick if self.is_quick else full

    def say(self, text: str) -> None:
        took_s = time.monotonic() - self.began
        self.results.console.print(f"[dim]{took_s:5.0f} s  {text}[/dim]", highlight=False)

    def remark(self, side: str, text: str) -> None:
        self.results.remark(self.case, side, text)


@dataclass(frozen=True)
class Case:
    """A measurement, which is called once per round and side.

    The names of its figures end with a comma and the unit.
    """

    name: str
    #: Called with the stage and a `benchmarks.side.Side`, which imports the app of the benchmarks
    #: and with it the environment of the run.
    measure: Callable[..., Mapping[str, float]]
    sides: tuple[str, ...] = (OURS,)
    #: Bounds by the ends of the names of figures.
    targets: Mapping[str, str] = field(default_factory=dict)
    #: It can measure any side.
    is_load: bool = False
    needs_postgresql: bool = False
    #: It takes minutes to set up, and computes medians itself.
    is_once: bool = False


def run(cases: Sequence[Case], options: Namespace) -> int:
    """Return the exit status. Each round begins with another side, since one side's aftereffects
    may slow the next one.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    results = Results(figures.console())
    folder = Path(tempfile.mkdtemp(prefix="delaytasks-bench-"))
    try:
        with ExitStack() as held:
            here = held.enter_context(servers.started(folder))
            results.machine = {**processes.facts(), **here.versions(), "broker": here.broker_name}
            shown = " · ".join(f"{name} {fact}" for name, fact in results.machine.items())
            results.console.print(shown, highlight=False)
            stage = Stage(here, results, options.quick)
            for case in cases:
                if case.needs_postgresql and here.missing((POSTGRESQL,)):
                    stage.say(f"{case.name} is skipped: it needs PostgreSQL")
                else:
                    _measure(stage, case, _sides(stage, case, options, folder), options)
    except BenchError as error:
        results.console.print(str(error), style="red", markup=False)
        return 2
    finally:
        results.write(options.json, quick=options.quick)
    if results.failures:
        text = f"{len(results.failures)} failed; the logs are in {folder}"
        results.console.print(text, style="red", markup=False)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _sides(stage: Stage, case: Case, options: Namespace, folder: Path) -> list[Side]:
    """Return the sides that can be measured here."""
    from benchmarks.side import Side

    names = (options.sides or case.sides) if case.is_load else case.sides
    sides = []
    for name in dict.fromkeys(names):
        system = SYSTEMS[name]
        reason = stage.servers.missing(system.servers) or system.install(stage.say)
        if reason:
            stage.say(f"{system.title} is left out: {reason}")
        else:
            sides.append(Side(system, stage.servers, folder))
    return sides


def _measure(stage: Stage, case: Case, sides: Sequence[Side], options: Namespace) -> None:
    results, stage.case = stage.results, case.name
    rounds = 1 if case.is_once else options.rounds
    for number in range(rounds if sides else 0):
        first = number % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            before = f"round {number + 1} of {rounds}, load {processes.load():.1f}"
            try:
                found = case.measure(stage, side)
            except Exception as error:  # the results of the others are still of use
                text = str(error) if isinstance(error, BenchError) else traceback.format_exc()
                results.failures.append(f"{case.name}, {side.name}: {text}")
                results.console.print(results.failures[-1], style="red", markup=False)
                continue
            results.add(case.name, side.name, number, found, case.targets)
            values = "; ".join(f"{name} {figures.short(value)}" for name, value in found.items())
            stage.say(f"{case.name}, {before}: {side.name}: {values}")
        results.write(options.json, quick=options.quick)
    if any(figure.case == case.name for figure in results.figures.values()):
        results.print_case(case.name)


def _interrupt(number: int, frame: object) -> None:
    """Treat the signal as an interrupt, so that processes are ended and figures are written."""
    raise KeyboardInterrupt
