"""A name stands for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.running import ROOT

#: Names that frameworks and conventions prescribe, and a type variable for decorated functions.
PRESCRIBED = {"Command", "Migration", "__all__", "app", "logger", "F", "T"}


def _definitions(folder: str) -> Iterator[tuple[str, ast.stmt, str]]:
    """Yield the name, the node and the file of each class and constant of a module."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        place = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield node.name, node, place
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                # A target is a name, or a tuple of names.
                for name in (each for target in targets for each in ast.walk(target)):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        yield name.id, node, place


def _ambiguous(definitions: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, place in definitions:
        places[name].append(place)
    return {name: where for name, where in places.items() if len(set(where)) > 1}


def test_a_class_or_constant_of_delaytasks_is_defined_in_one_module() -> None:
    defined = ((name, place) for name, _, place in _definitions("delaytasks"))
    assert _ambiguous((name, place) for name, place in defined if name not in PRESCRIBED) == {}


def test_a_class_of_tests_chaos_and_benchmarks_is_defined_once() -> None:
    classes = (
        (name, f"{place}:{node.lineno}")
        for folder in ("tests", "chaos", "benchmarks")
        for name, node, place in _definitions(folder)
        # Pytest's own test classes are not used by name.
        if isinstance(node, ast.ClassDef) and not name.startswith("Test")
    )
    assert _ambiguous(classes) == {}
