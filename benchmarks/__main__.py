"""Measure delaytasks and bare Celery, or other systems with --peers.

`work`, `networks` and `compare` have options of their own: bench work --help.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import settings


def main() -> int:
    if sys.argv[1:2] == ["work"]:
        from benchmarks import work

        return work.main(sys.argv[2:])
    if sys.argv[1:2] == ["networks"]:
        from benchmarks import networks

        return networks.main(sys.argv[2:])
    if sys.argv[1:2] == ["compare"]:
        from benchmarks import compare

        return compare.main(sys.argv[2:])
    parser = _parser()
    options = parser.parse_intermixed_args()
    if options.pages is not None:
        from benchmarks.peers import pages

        print(*pages.write(options.pages), sep="\n")
        return 0
    settings.use(options.broker)
    rounds = options.rounds or (1 if options.quick else 3)
    # The imported modules read the environment, which `settings.use` has changed.
    if options.peers is not None:
        return _peers(parser, options, rounds)
    from benchmarks import run

    try:
        names = run.chosen(options.names or ["short"])
    except ValueError as error:
        parser.error(str(error))
    return run.run(names, rounds, options)


def _peers(parser: argparse.ArgumentParser, options: argparse.Namespace, rounds: int) -> int:
    from benchmarks.peers import run

    try:
        systems, workloads = run.chosen(options.peers, options.names)
    except ValueError as error:
        parser.error(str(error))
    return run.run(systems, workloads, rounds, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", help="cases or groups; the default is the group `short`")
    add(
        "--quick",
        action="store_true",
        help="fewer tasks and one round, to check that everything works",
    )
    add("--rounds", type=int, help="default: 3, with --quick 1")
    add("--json", type=Path, metavar="FILE", help="also write all values to FILE")
    add("--broker", metavar="URL", help="broker instead of DELAYTASKS_BENCH_BROKER_URL")
    add("--strict", action="store_true", help="exit with status 1 if a target is missed")
    add("--peers", nargs="*", metavar="NAME", help="compare with the named systems, or with all")
    add(
        "--backlog",
        type=int,
        metavar="N",
        help="with --peers: number of tasks that are due tomorrow",
    )
    add("--pages", type=Path, metavar="FILE", help="only write docs/peers.md from FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
