"""Play some failpoints on a deployment in a separate process."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from chaos.failpoints.catalogue import BY_NAME
from chaos.failpoints.orders import Act
from chaos.failpoints.world import Episode, FailpointDeployment

#: The exit status of a process that was asked to end.
ENDED = 128 + signal.SIGTERM


class Part(NamedTuple):
    names: tuple[str, ...]
    first: int
    seeds: int
    timer: str
    #: Empty for a SQLite file in the deployment's folder.
    database_url: str
    broker_url: str
    redis_url: str
    act: Act


@dataclass
class PartResult:
    episodes: list[Episode]
    tasks: int
    runs: int
    findings: int
    verdict: str


def play(part: Part) -> PartResult:
    signal.signal(signal.SIGTERM, _end)
    try:
        return _play(part)
    except SystemExit:
        # The pool would take SystemExit for a result and start the next part.
        os._exit(ENDED)


def _play(part: Part) -> PartResult:
    with tempfile.TemporaryDirectory(prefix="delaytasks-failpoints-") as folder:
        database_url = part.database_url or f"sqlite:///{folder}/failpoints.sqlite3"
        world = FailpointDeployment(
            Path(folder), database_url, part.broker_url, part.timer, part.redis_url
        )
        try:
            world.begin()
            seeds = range(part.first, part.first + part.seeds)
            episodes = [
                world.play(BY_NAME[name], seed, part.act) for name in part.names for seed in seeds
            ]
            verdict = world.verdict(episodes)
        finally:
            world.close()
    return PartResult(episodes, verdict.tasks, verdict.runs, len(verdict.findings), str(verdict))


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # during the cleanup
    sys.exit(ENDED)
