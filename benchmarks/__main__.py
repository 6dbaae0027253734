"""Measure delaytasks and bare Celery on the same broker, or with --peers also other systems.

`work`, `networks` and `compare` have options of their own: bench work --help.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.cases import CASES, GROUPS, network_case, work_case
from benchmarks.figures import OURS
from benchmarks.run import Case, run
from benchmarks.systems import PEERS, SYSTEMS

#: Round trips in milliseconds, each while the other one is 0.
DATABASE_MS, BROKER_MS = (0.0, 1.0, 5.0, 20.0), (0.0, 1.0, 20.0, 100.0)
PROCESSORS = ("0", *(f"{kind}:{ms}" for kind in ("sleep", "compute") for ms in (1, 5, 20, 100)))


def main(words: Sequence[str]) -> int:
    command = words[0] if words and words[0] in ("work", "networks", "compare") else ""
    if command == "compare":
        from benchmarks import compare

        return compare.main(words[1:])
    parser = argparse.ArgumentParser(prog=f"bench {command}".strip(), description=__doc__)
    _add_common(parser)
    if command == "work":
        loads = ["burst", "steady"]
        parser.add_argument("--processors", nargs="+", default=PROCESSORS, metavar="KIND:MS",
                            help="for example sleep:20 compute:5 0; default: all")  # fmt: skip
    elif command == "networks":
        loads = ["burst", "steady", "call"]
        for name, default in (("--database", DATABASE_MS), ("--broker", BROKER_MS)):
            parser.add_argument(name, nargs="*", type=float, default=default, metavar="MS")
    else:
        parser.add_argument("names", nargs="*", help=f"cases: {', '.join(CASES)}; or groups: "
                            f"{', '.join(GROUPS)}; default: short")  # fmt: skip
        parser.add_argument("--broker", metavar="URL", help="RabbitMQ instead of Redis")
    if command:
        parser.add_argument("--loads", nargs="+", choices=loads, default=loads)
    options = parser.parse_intermixed_args(words[bool(command) :])
    options.rounds = options.rounds or (1 if options.quick else 3)
    try:
        options.sides = _sides(options)
        cases = _cases(command, options)
    except ValueError as error:
        parser.error(str(error))
    if not command and options.broker:
        os.environ["DELAYTASKS_BENCH_BROKER_URL"] = options.broker
    return run(cases, options)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="small and one round, to check that it works")
    add("--rounds", type=int, help="default: 3, with --quick 1")
    add("--json", type=Path, metavar="FILE", help="also write all values to FILE")
    add("--peers", nargs="*", metavar="NAME",
        help=f"measure delaytasks with these: {', '.join(PEERS)}; default: all")  # fmt: skip
    add("--alone", action="store_true", help="measure only delaytasks")


def _cases(command: str, options: argparse.Namespace) -> list[Case]:
    if command == "work":
        return [work_case(load, each) for each, load in product(options.processors, options.loads)]
    if command == "networks":
        places = [(ms, 0.0) for ms in options.database] + [(0.0, ms) for ms in options.broker]
        places = list(dict.fromkeys(places))
        return [network_case(load, *place) for place, load in product(places, options.loads)]
    names = options.names or ["short" if options.peers is None else "peers"]
    if unknown := sorted({*names} - {*CASES} - {*GROUPS}):
        raise ValueError(f"no case {', '.join(unknown)}; there are {', '.join([*CASES, *GROUPS])}")
    chosen = dict.fromkeys(case for name in names for case in GROUPS.get(name, [name]))
    if options.peers is not None and (
        others := [name for name in chosen if not CASES[name].is_load]
    ):
        raise ValueError(f"only delaytasks is measured by {', '.join(others)}")
    return [CASES[name] for name in chosen]


def _sides(options: argparse.Namespace) -> list[str]:
    """Return the sides that replace those of the cases, or an empty list."""
    if options.peers is None:
        return [OURS] if options.alone else []
    if unknown := sorted({*options.peers} - {*SYSTEMS}):
        raise ValueError(f"no system {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return [OURS, *(options.peers or PEERS)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
