"""Measure delaytasks and bare Celery eta with distant servers, through proxies that delay.

Each row has a round trip to the database or to the broker. The workers, or for the time of a call
the producer, reach both servers through a proxy on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from benchmarks.peers import loads
from benchmarks.peers.catalogue import SYSTEMS
from benchmarks.peers.comparison import BARE, OURS, ComparisonRow
from benchmarks.peers.loads import Figures, TimedProcessor, Variables
from benchmarks.peers.servers import POSTGRESQL
from benchmarks.peers.side import Peer
from benchmarks.work import LOADS, SECONDS, add_options, comparison
from tests.proxy import proxy_to

#: Round trips in milliseconds.
DATABASE_MS, BROKER_MS = (0.0, 1.0, 5.0, 20.0), (0.0, 1.0, 20.0, 100.0)
PROCESSOR = TimedProcessor("sleep", 20)
#: Single calls whose mean duration is measured, in full and in quick runs.
CALLS = (100, 20)


class Network(NamedTuple):
    """The round trips to the servers, in milliseconds."""

    database_ms: float
    broker_ms: float

    def __str__(self) -> str:
        return f"database {self.database_ms:g} ms, broker {self.broker_ms:g} ms"

    @contextmanager
    def variables(self, peer: Peer) -> Iterator[Variables]:
        """Yield the variables with which a process of `peer` reaches its servers this way."""
        direct = peer.environment
        database = proxy_to(direct["BENCH_DATABASE_URL"])
        broker = proxy_to(direct["BENCH_BROKER_URL"])
        database.delay_s, broker.delay_s = self.database_ms / 2000, self.broker_ms / 2000
        try:
            yield {
                "BENCH_DATABASE_URL": database.url(direct["BENCH_DATABASE_URL"]),
                "BENCH_BROKER_URL": broker.url(direct["BENCH_BROKER_URL"]),
            }
        finally:
            database.close()
            broker.close()


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench networks", description=__doc__)
    add_options(parser)
    for name, default in (("--database", DATABASE_MS), ("--broker", BROKER_MS)):
        shown = " ".join(f"{ms:g}" for ms in default)
        parser.add_argument(
            name,
            nargs="*",
            type=float,
            default=default,
            metavar="MS",
            help=f"round trips, while the other one is 0; default: {shown}",
        )
    kinds = (*LOADS, "call")
    parser.add_argument("--loads", nargs="+", choices=kinds, default=kinds, help="default: all")
    options = parser.parse_args(words)
    networks = [Network(ms, 0) for ms in options.database] + [
        Network(0, ms) for ms in options.broker
    ]
    rows = [
        ComparisonRow(
            f"{load}, {network}",
            partial(_measure, load, network, options.quick),
            frozenset({POSTGRESQL} if network.database_ms else ()),
        )
        for network in dict.fromkeys(networks)
        for load in options.loads
    ]
    systems = [SYSTEMS[OURS], SYSTEMS[BARE]]
    return comparison(options, "networks", words).run(rows, systems)


def _measure(load: str, network: Network, is_quick: bool, peer: Peer) -> Figures:
    with network.variables(peer) as variables:
        if load == "call":
            return loads.call(peer, CALLS[is_quick], variables)
        return LOADS[load](peer, PROCESSOR, SECONDS[load][is_quick], variables)
