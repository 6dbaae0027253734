"""Run the simulation for many seeds in several processes, or for one seed."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence

from chaos.checker import Verdict
from chaos.simulation.script import play_seeds

#: The number of seeds that a process plays before it reports.
BATCH_ROWS = 100


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play only this seed")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args(arguments)
    first, seeds = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    batches = [
        range(at, min(at + BATCH_ROWS, first + seeds))
        for at in range(first, first + seeds, BATCH_ROWS)
    ]
    began, all_in_all, broken = time.monotonic(), Verdict(), 0
    with multiprocessing.get_context("spawn").Pool(min(options.processes, len(batches))) as pool:
        for some in pool.imap_unordered(play_seeds, batches):
            for seed, verdict in some:
                all_in_all.tasks += verdict.tasks
                all_in_all.runs += verdict.runs
                all_in_all.explained += verdict.explained
                all_in_all.published += verdict.published
                all_in_all.claimed_ahead += verdict.claimed_ahead
                if verdict.findings:
                    broken += 1
                    say(f"seed {seed}: {verdict}\n")
    seconds = time.monotonic() - began
    say(
        f"{seeds:,} seeds in {seconds:.0f} s ({seeds / seconds * 60:,.0f} a minute), "
        f"{broken} with findings"
    )
    say(
        str(all_in_all).replace(
            "nothing found", f"{broken} seeds with findings" if broken else "nothing found"
        )
    )
    return 1 if broken else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
