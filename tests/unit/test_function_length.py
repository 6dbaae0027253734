"""Functions have at most 50 lines without their docstring. Ruff counts statements, not lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MOST = 50
ROOT = Path(__file__).parents[2]
FOLDERS = ["alembic", "benchmarks", "chaos", "delaytasks", "examples", "tests"]
#: Longer functions, and why it would be harder to read them in parts.
EXCEPTIONS = {
    "alembic/versions/0001_tables.py upgrade": "it only lists tables and columns",
    "delaytasks/composition.py build_wiring": "each line makes one part, or passes it on",
    "delaytasks/execution/runner.py __init__": "each line makes one part, or passes it on",
}


def _long_functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _lines(node)
            if ast.get_docstring(node, clean=False) is not None:
                lines -= _lines(node.body[0])
            if lines > MOST:
                yield f"{path.relative_to(ROOT)} {node.name}", lines


def _lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_have_at_most_50_lines(folder: str) -> None:
    found = dict(one for path in (ROOT / folder).rglob("*.py") for one in _long_functions(path))
    for name in EXCEPTIONS:
        found.pop(name, None)
    assert not found, f"split these functions, or state the reason in {Path(__file__).name}"


def test_each_exception_is_still_longer() -> None:
    files = {ROOT / name.split()[0] for name in EXCEPTIONS}
    assert {name for path in files for name, _ in _long_functions(path)} == set(EXCEPTIONS)
