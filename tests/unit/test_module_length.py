"""Modules have at most 300 lines without their docstrings, and modules of tests 500."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = {
    "benchmarks": 300,
    "chaos": 300,
    "delaytasks": 300,
    "examples": 300,
    "pytest_delaytasks": 300,
    "tests": 500,
}
#: Longer modules, and why it would be harder to read them in parts.
EXCEPTIONS = {
    "benchmarks/table.py": "all cases read and write their rows with it",
    "chaos/checker.py": "it lists the promises, one method each",
    "chaos/failpoints/catalogue.py": "it lists the failpoints",
    "chaos/nemeses.py": "it lists the faults, one class each",
    "chaos/simulation/worker.py": "it is one worker with all its loops",
    "delaytasks/async_twins.py": "it is generated",
    "delaytasks/client.py": "it has the signatures of all public functions",
    "delaytasks/composition.py": "each line makes one part, or passes it on",
    "delaytasks/core/settings.py": "it lists the settings with their checks",
    "delaytasks/execution/runner.py": "its constructor takes 50 lines of it",
    "delaytasks/http_api/schemas.py": "it lists the schemas",
    "delaytasks/storage/schema.py": "it lists the tables and their columns",
}


def _length(path: Path) -> int:
    """Return the number of lines without docstrings."""
    text = path.read_text()
    length = len(text.splitlines())
    for node in ast.walk(ast.parse(text)):
        has_body = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, has_body) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            length -= docstring.end_lineno - docstring.lineno + 1
    return length


def _long_modules(folder: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        if _length(path) > MOST[folder]
    }


@pytest.mark.parametrize("folder", MOST)
def test_modules_have_at_most_300_lines_or_a_reason(folder: str) -> None:
    expected = {name for name in EXCEPTIONS if name.startswith(f"{folder}/")}
    assert _long_modules(folder) == expected, f"split it, or change {Path(__file__).name}"
