"""`bench compare COMMIT [CASE]...`: measure an earlier commit and this tree in turn.

Each commit runs its own benchmarks, with the installed libraries of this tree, and only the side of
delaytasks. Bare Celery is the same in both. A round of one tree follows one of the other, since the
speed of a shared machine changes within minutes, and each round begins with the other tree. A ratio
whose range includes 1 shows nothing.
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

from benchmarks import report

ROOT = Path(__file__).parent.parent
DEFAULT = ["call", "burst_bulk", "steady"]
#: Runs the benchmarks of the working directory. Every side is replaced by the first one.
ONE_SIDE = """
import sys
from benchmarks import stage
stage.CaseContext.each = lambda self, work, *sides: [work(sides[0])] * len(sides)
from benchmarks.__main__ import main
sys.exit(main())
"""
#: The names of a case and of its figure, and the unit.
Name = tuple[str, str, str]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks compare", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("names", nargs="*", metavar="CASE", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all values to FILE")
    options = parser.parse_args(arguments)
    names = options.names or DEFAULT
    values: dict[Name, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    with _checked_out(options.commit) as before:
        trees = [(before, 0), (ROOT, 1)]
        for number in range(options.rounds):
            for tree, side in trees if number % 2 == 0 else trees[::-1]:
                for name, value in _round(tree, names):
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


def _round(tree: Path, names: Sequence[str]) -> list[tuple[Name, float]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as found:
        command = [sys.executable, "-c", ONE_SIDE, *names, "--rounds", "1", "--json", found.name]
        # The programs that a benchmark starts import the package of its tree, too.
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=sys.stderr)
        figures = json.load(found)["figures"]
    return [
        ((each["case"], each["what"], each["unit"]), each["delaytasks"][0])
        for each in figures
        if each["delaytasks"]
    ]


def _print(commit: str, values: dict[Name, tuple[list[float], list[float]]]) -> None:
    made = Table(title="median (min to max)", title_justify="left", header_style="bold")
    for heading in ("case", "what", f"{commit:.12}", "this tree", "ratio"):
        made.add_column(heading)
    for (case, what, unit), (old, new) in values.items():
        if old and new:
            ratios = [b / a for a, b in zip(old, new, strict=False) if a]
            cells = [f"{report.spread(old)} {unit}", f"{report.spread(new)} {unit}"]
            made.add_row(case, what, *cells, report.spread(ratios) if ratios else "–")
    report.console().print(made)
