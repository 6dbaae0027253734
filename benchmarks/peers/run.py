"""`./dev bench --peers`: install the peers, and measure each workload with each system in turn."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks import machine, report, table
from benchmarks.peers import environment, servers
from benchmarks.peers.catalogue import ALWAYS, SYSTEMS, System
from benchmarks.peers.results import Results
from benchmarks.peers.side import Peer
from benchmarks.peers.workloads import WORKLOADS, WorkloadContext
from benchmarks.waiting import BenchError


def chosen(names: Sequence[str], workloads: Sequence[str]) -> tuple[list[System], list[str]]:
    """Return the selected systems (all without names) and workloads, with the systems that are
    always measured.

    Raises
    ------
    ValueError
        No system or workload has one of the names.
    """
    unknown = sorted(set(names) - set(SYSTEMS))
    if unknown:
        raise ValueError(f"no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    unknown = sorted(set(workloads) - set(WORKLOADS))
    if unknown:
        raise ValueError(
            f"no workload {', '.join(unknown)} of peers; there are {', '.join(WORKLOADS)}"
        )
    found = [system for system in SYSTEMS.values() if not names or system.name in {*names, *ALWAYS}]
    return found, [name for name in WORKLOADS if not workloads or name in workloads]


def run(
    systems: Sequence[System], workloads: Sequence[str], rounds: int, options: Namespace
) -> int:
    console = report.console()
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.0f} s  {text}[/dim]", highlight=False)

    signal.signal(signal.SIGTERM, _end)
    results = Results(is_quick=options.quick)
    stage = WorkloadContext(
        results, options.quick, options.backlog or (2000 if options.quick else 100_000), say
    )
    folder = Path(tempfile.mkdtemp(prefix="delaytasks-peers-"))
    try:
        with ExitStack() as held:
            held.enter_context(table.alone())
            here = held.enter_context(servers.started(folder))
            results.machine = {**machine.facts(), **here.versions(), "rounds": str(rounds)}
            report.print_facts(console, results.machine)
            peers = [Peer(system, here, folder) for system in systems]
            ready = [peer for peer in peers if _is_ready(peer, results, stage)]
            for number in range(rounds):
                # Each round begins with another system, because one system's aftereffects may slow
                # the next one.
                first = number % len(ready) if ready else 0
                for workload in workloads:
                    say(f"{workload}, round {number + 1} of {rounds}")
                    for peer in ready[first:] + ready[:first]:
                        _measure(workload, stage, peer, console)
                    _write(results, options.json)
    except BenchError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    finally:
        _write(results, options.json)
    if results.failures:
        console.print(
            f"{len(results.failures)} failed; the logs are in {folder}", style="red", markup=False
        )
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _write(results: Results, file: Path | None) -> None:
    """Write the results so far. A run takes hours, and an abort must not lose them."""
    if file is not None:
        file.write_text(json.dumps(results.as_json(), indent=1) + os.linesep)


def _end(number: int, frame: object) -> None:
    """Treat the signal as an interrupt, so that processes are ended and results are written."""
    raise KeyboardInterrupt


def _is_ready(peer: Peer, results: Results, stage: WorkloadContext) -> bool:
    system = peer.system
    reason = peer.lacks(stage.say)
    if reason:
        results.left_out[system.name] = reason
        return False
    results.systems[system.name] = {
        "title": system.title,
        "version": environment.version(system),
        "servers": list(system.servers),
        "setup": system.setup,
        "source": system.source,
        "limits": list(system.limits),
        "most_at_once": system.most_due_together,
    }
    return True


def _measure(workload: str, stage: WorkloadContext, peer: Peer, console: Console) -> None:
    try:
        WORKLOADS[workload](stage, peer)
    except Exception as error:  # the other systems are still measured
        text = str(error) if isinstance(error, BenchError) else traceback.format_exc()
        first = text.splitlines()[0] if isinstance(error, BenchError) else repr(error)
        stage.results.failures.append(f"{workload}, {peer.system.title}: {first}")
        stage.results.remark(workload, peer.system.name, f"failed: {first}")
        console.print(
            f"{workload}, {peer.system.title}: {text}", style="red", highlight=False, markup=False
        )
