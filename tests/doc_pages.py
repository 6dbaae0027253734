"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: The alert rules and the Grafana dashboard.
RULES = ROOT / "deployment/monitoring/rules.yml"
DASHBOARD = RULES.with_name("dashboard.json")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
SHELLS = {"sh", "bash", "console"}
_NAMED_TEST = re.compile(r"<!-- (?:runs in|files:) (tests/[\w/]+\.py) -->")


class Block(NamedTuple):
    """A piece of code in a page, which begins at `line`."""

    language: str
    text: str
    line: int
    runs: bool
    #: The line of the page before the block, such as a comment.
    before: str

    @property
    def file(self) -> str | None:
        """The file that the first line names, such as `# shop/settings.py`."""
        named = re.match(r"# ([\w/]+\.py)\b", self.text)
        return None if named is None else named[1]

    @property
    def test(self) -> str | None:
        """The test that takes the block from the page."""
        named = _NAMED_TEST.match(self.before)
        return None if named is None else named[1]


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    before = ""
    numbers = iter(range(len(lines)))
    for number in numbers:
        stripped = lines[number].strip()
        if stripped.startswith("```") or stripped == "<!-- setup":
            end = "-->" if stripped == "<!-- setup" else "```"
            inside = []
            for inner in numbers:
                if lines[inner].strip() == end:
                    break
                inside.append(lines[inner])
            else:
                raise ValueError(f"{page}:{number + 1}: the block has no end")
            language = "python" if end == "-->" else stripped.removeprefix("```")
            runs = end == "-->" or before == "<!-- runs -->"
            if language == "diff" and runs:
                language = "python"
                inside = [line[1:] if line[:1] != "-" else "" for line in inside]
            text = textwrap.dedent("\n".join(inside)) + "\n"
            yield Block(language, text, number + 2, runs, before)
        if stripped:
            before = stripped


def block_beginning(page: str, text: str) -> Block:
    """Return the only block of a page that begins with `text`."""
    [found] = [block for block in blocks(ROOT / page) if block.text.startswith(text)]
    return found


def section(page: Path, heading: str) -> list[Block]:
    """Return the blocks of a section of the second level."""
    lines = page.read_text().splitlines()
    first = lines.index(f"## {heading}")
    rest = (n for n in range(first + 1, len(lines)) if lines[n].startswith("## "))
    last = next(rest, len(lines))
    return [block for block in blocks(page) if first < block.line <= last]


def files_test(page: Path) -> str | None:
    """Return the test that writes the files of a page and runs its commands."""
    found = [*_NAMED_TEST.finditer(page.read_text())]
    return next((each[1] for each in found if each[0].startswith("<!-- files:")), None)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process with its own SQLite file and an in-memory broker."""
    return {
        **{
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("DELAYTASKS_", "CELERY_"))
        },
        "PYTHONPATH": str(ROOT),
        "DELAYTASKS_DATABASE_URL": f"sqlite:///{folder / 'docs.sqlite3'}",
        "CELERY_BROKER_URL": "memory://",
    }
