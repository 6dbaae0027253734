"""`bench compare COMMIT [CASE]...`: measure an earlier commit and this tree in turn.

Each commit runs its own benchmarks, with the installed libraries of this tree and on one Redis, and
only the side of delaytasks. A round of one tree follows one of the other, since the speed of a
shared machine changes within minutes, and each round begins with the other tree. A ratio whose
range includes 1 shows nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from benchmarks.figures import console, spread
from benchmarks.processes import ROOT
from benchmarks.servers import private_redis

DEFAULT = ["call", "burst_bulk", "steady"]
#: Runs benchmarks from before `--alone`, in which every side is replaced by the first one.
FIRST_SIDE = """
import sys
from benchmarks import stage
stage.CaseContext.each = lambda self, work, *sides: [work(sides[0])] * len(sides)
from benchmarks.__main__ import main
sys.exit(main())
"""
#: The names of a case and of its figure, and the unit.
Name = tuple[str, str, str]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench compare", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small, to check that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all values to FILE")
    options = parser.parse_intermixed_args(arguments)
    more = ["--quick"] if options.quick else []
    values: dict[Name, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    with _checked_out(options.commit) as before:
        trees = [(before, 0), (ROOT, 1)]
        for number in range(options.rounds):
            for tree, side in trees if number % 2 == 0 else trees[::-1]:
                # Each gets an empty Redis, since a benchmark refuses one with keys of others.
                with private_redis(before.parent) as redis:
                    found = _round(tree, [*(options.names or DEFAULT), *more], redis)
                for name, value in found:
                    values[name][side].append(value)
    _print(options.commit, values)
    if options.json is not None:
        document = [
            {"case": case, "what": what, "unit": unit, "before": old, "now": new}
            for (case, what, unit), (old, new) in values.items()
        ]
        options.json.write_text(json.dumps(document, indent=1) + os.linesep)
    return 0


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="delaytasks-compare-") as folder:
        tree = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _round(tree: Path, words: Sequence[str], redis: str) -> list[tuple[Name, float]]:
    is_old = (tree / "benchmarks" / "stage.py").exists()
    start = ["-c", FIRST_SIDE] if is_old else ["-m", "benchmarks", "--alone"]
    with tempfile.NamedTemporaryFile(suffix=".json") as found:
        command = [sys.executable, *start, *words, "--rounds", "1", "--json", found.name]
        # The programs that a benchmark starts import the package of its tree, too.
        given = os.environ.get("DELAYTASKS_BENCH_BROKER_URL", redis)
        places = {"PYTHONPATH": str(tree), "DELAYTASKS_BENCH_BROKER_URL": given}
        environment = {**os.environ, **places}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=sys.stderr)
        figures = json.load(found)["figures"]
    return [
        ((each["case"], each["what"], each["unit"]), each["delaytasks"][0])
        for each in figures
        if each.get("delaytasks")
    ]


def _print(commit: str, values: dict[Name, tuple[list[float], list[float]]]) -> None:
    made = Table(title="median (min to max)", title_justify="left", header_style="bold")
    for heading in ("case", "what", f"{commit:.12}", "this tree", "ratio"):
        made.add_column(heading)
    for (case, what, unit), (old, new) in values.items():
        if old and new:
            ratios = [b / a for a, b in zip(old, new, strict=False) if a]
            made.add_row(case, f"{what}, {unit}", spread(old), spread(new), spread(ratios))
    console().print(made)
