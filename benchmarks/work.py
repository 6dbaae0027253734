"""Measure bursts and steady loads of processors that sleep or compute, with several systems.

`./dev bench work` compares delaytasks with bare Celery eta, and with `--peers` also with others.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import report
from benchmarks.peers import loads
from benchmarks.peers.catalogue import SYSTEMS, System
from benchmarks.peers.comparison import BARE, OURS, Comparison, ComparisonRow
from benchmarks.peers.loads import Figures, TimedProcessor
from benchmarks.peers.side import Peer

LOADS = {"burst": loads.burst, "steady": loads.steady}
#: Seconds of each load, in full and in quick runs.
SECONDS = {"burst": (5.0, 1.0), "steady": (10.0, 3.0)}
PROCESSORS = [
    TimedProcessor.parse(text)
    for text in ("0", *(f"{kind}:{ms}" for kind in ("sleep", "compute") for ms in (1, 5, 20, 100)))
]
PEERS = ("pgqueuer", "procrastinate", "bullmq")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench work", description=__doc__)
    add_options(parser)
    add = parser.add_argument
    add(
        "--processors",
        nargs="+",
        type=TimedProcessor.parse,
        default=PROCESSORS,
        metavar="KIND:MS",
        help="for example sleep:20 compute:5 0; default: all",
    )
    add("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all")
    add(
        "--peers",
        nargs="*",
        choices=PEERS,
        metavar="NAME",
        help=f"also measure these, or {', '.join(PEERS)}",
    )
    options = parser.parse_args(words)
    names = [] if options.peers is None else options.peers or PEERS
    systems = [one_at_a_time(SYSTEMS[name]) for name in (OURS, BARE, *names)]
    rows = [
        ComparisonRow(f"{load}, {processor}", partial(_measure, load, processor, options.quick))
        for processor in options.processors
        for load in options.loads
    ]
    return comparison(options, "work", words).run(rows, systems)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--quick", action="store_true", help="short loads, to check that they work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all values to FILE")
    parser.add_argument(
        "--document",
        type=Path,
        metavar="FILE",
        help="measure as many rounds as fit into 20 minutes, and write Markdown tables to FILE",
    )


def comparison(options: argparse.Namespace, name: str, words: Sequence[str]) -> Comparison:
    shown = re.sub(r" --document(=| +)\S+", "", " " + " ".join(words))
    command = name + shown
    console = report.console()
    return Comparison(console, options.rounds, options.json, options.document, command)


def _measure(load: str, processor: TimedProcessor, is_quick: bool, peer: Peer) -> Figures:
    return LOADS[load](peer, processor, SECONDS[load][is_quick], {})


def one_at_a_time(system: System) -> System:
    """Return the system with processes that run one task at a time.

    Programs of systems with an event loop read this from their environment; only Procrastinate
    has an option of its command.
    """
    words = {"30": "1"} if system.name == "procrastinate" else {}
    worker = tuple(tuple(words.get(word, word) for word in command) for command in system.worker)
    return replace(system, worker=worker)
