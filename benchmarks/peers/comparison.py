"""Rows that are measured with several systems in turn, and the table of their figures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks import machine, report, table
from benchmarks.peers import documents, servers
from benchmarks.peers.catalogue import System
from benchmarks.peers.loads import Figures
from benchmarks.peers.side import Peer
from benchmarks.waiting import BenchError

OURS, BARE = "delaytasks", "celery"


class ComparisonRow(NamedTuple):
    """One measurement of each system. `needs` are the servers without which it makes no sense."""

    name: str
    measure: Callable[[Peer], Figures]
    needs: frozenset[str] = frozenset()


class Comparison:
    """The values of each row, figure, system and round."""

    def __init__(
        self,
        console: Console,
        rounds: int,
        file: Path | None,
        document: Path | None = None,
        command: str = "",
    ) -> None:
        self._console = console
        self._rounds = rounds
        self._file = file
        #: Where to write Markdown tables of as many rounds as fit into the limit, and the command
        #: that they name.
        self._document = document
        self._command = command
        self._began = time.monotonic()
        self._facts: dict[str, str] = {}
        self._loads: dict[str, list[float]] = {}
        self._values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
        self._failures: list[str] = []

    def run(self, rows: Sequence[ComparisonRow], systems: Sequence[System]) -> int:
        """Measure the rows, print the table, and return the exit status."""
        signal.signal(signal.SIGTERM, _interrupt)
        folder = Path(tempfile.mkdtemp(prefix="delaytasks-rows-"))
        try:
            with ExitStack() as held:
                held.enter_context(table.alone())
                here = held.enter_context(servers.started(folder))
                self._facts = {**machine.facts(), **here.versions()}
                if self._document is None:
                    self._facts["rounds"] = str(self._rounds)
                report.print_facts(self._console, self._facts)
                peers = [Peer(system, here, folder) for system in systems]
                ready = [peer for peer in peers if not peer.lacks(self.say)]
                for row, number in self._turns(rows):
                    self._measure(row, number, [peer for peer in ready if _has(peer, row.needs)])
        except BenchError as error:
            self._console.print(str(error), style="red", markup=False)
            return 2
        finally:
            self._write()
            if self._values:
                self._print()
        if self._failures:
            self._console.print(f"{len(self._failures)} failed; the logs are in {folder}")
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        return 0

    def say(self, text: str) -> None:
        took_s = time.monotonic() - self._began
        self._console.print(f"[dim]{took_s:5.0f} s  {text}[/dim]", highlight=False)

    def _turns(self, rows: Sequence[ComparisonRow]) -> Iterator[tuple[ComparisonRow, int]]:
        if self._document is not None:
            yield from documents.rounds_within(rows)
        else:
            yield from ((row, number) for row in rows for number in range(self._rounds))

    def _measure(self, row: ComparisonRow, number: int, peers: Sequence[Peer]) -> None:
        # Each round begins with another system, because one system's aftereffects may slow the
        # next one.
        first = number % len(peers)
        for peer in [*peers[first:], *peers[:first]]:
            load = machine.load()
            self._loads.setdefault(row.name, []).append(load)
            try:
                figures = row.measure(peer)
            except Exception as error:  # the other systems are still measured
                self._fail(f"{row.name}, {peer.system.title}", error)
                continue
            for figure, value in figures.items():
                values = self._values.setdefault((row.name, figure), {})
                values.setdefault(peer.system.name, {})[number] = value
            said = ", ".join(f"{name} {report.short(value)}" for name, value in figures.items())
            self.say(f"{row.name}: {peer.system.title}: {said}; load before {load:.1f}")
        self._write()

    def _fail(self, what: str, error: Exception) -> None:
        text = str(error) if isinstance(error, BenchError) else traceback.format_exc()
        self._failures.append(f"{what}: {text.splitlines()[0]}")
        self._console.print(f"{what}: {text}", style="red", highlight=False, markup=False)

    def _systems(self) -> list[str]:
        return list(dict.fromkeys(name for values in self._values.values() for name in values))

    @staticmethod
    def _ratios(values: dict[str, dict[int, float]]) -> list[float]:
        """Return the ratio to bare Celery of each round. What slows the machine slows both."""
        bare = values.get(BARE, {})
        return [
            ours / bare[number] for number, ours in values.get(OURS, {}).items() if bare.get(number)
        ]

    def _print(self) -> None:
        made = Table(
            title="median (min to max of the rounds)", title_justify="left", header_style="bold"
        )
        systems = self._systems()
        for name in ("row", "figure", *systems, f"{OURS} / {BARE}"):
            made.add_column(name, justify="left" if name in ("row", "figure") else "right")
        for (row, figure), values in self._values.items():
            ratios = self._ratios(values)
            made.add_row(
                row,
                figure,
                *(_spread(values.get(name)) for name in systems),
                report.spread(ratios) if ratios else "–",
            )
        self._console.print(made)

    def _write(self) -> None:
        if self._file is not None:
            self._file.write_text(json.dumps(self._as_json(), indent=1) + os.linesep)
        if self._document is not None and self._values:
            shown = self._facts, self._loads, self._values
            self._document.write_text(documents.markdown(self._command, *shown, OURS, BARE))

    def _as_json(self) -> dict[str, Any]:
        figures = [
            {
                "row": row,
                "figure": figure,
                "values": {name: list(rounds.values()) for name, rounds in values.items()},
                "ratios": self._ratios(values),
            }
            for (row, figure), values in self._values.items()
        ]
        return {
            "machine": self._facts,
            "loads": self._loads,
            "figures": figures,
            "failures": self._failures,
        }


def _spread(rounds: dict[int, float] | None) -> str:
    return report.spread(list(rounds.values())) if rounds else "–"


def _has(peer: Peer, needs: frozenset[str]) -> bool:
    return needs <= set(peer.system.servers)


def _interrupt(number: int, frame: object) -> None:
    """Treat the signal as an interrupt, so that processes are ended and figures are written."""
    raise KeyboardInterrupt
