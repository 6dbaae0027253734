"""The undocumented names of Celery and its libraries behave as delaytasks requires."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amqp
import billiard
import celery
import kombu
import pytest
import redis

from tests.celery_shapes import SHAPES, Worker

ROOT = Path(__file__).parents[2]
LIBRARIES = (amqp, billiard, celery, kombu, redis)
INSTALLED = ", ".join(f"{library.__name__} {library.__version__}" for library in LIBRARIES)
NAMES = [(owner, name) for owner, shapes in SHAPES.items() for name in shapes]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def attribute(worker: Worker, owner: str, name: str) -> Any:
    """Return the attribute `name` of `owner`, or raise `AttributeError` if it does not exist."""
    made = worker.of(owner)
    if made is not None:
        return getattr(made, name)
    try:
        return getattr(importlib.import_module(owner), name)
    except ModuleNotFoundError:
        module, _, kind = owner.rpartition(".")
        return getattr(getattr(importlib.import_module(module), kind), name)


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_a_name_that_is_not_documented_is_as_delaytasks_needs_it(
    owner: str, name: str, worker: Worker
) -> None:
    try:
        found = attribute(worker, owner, name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"delaytasks uses {owner}.{name}: {error} (installed: {INSTALLED})")
    assert SHAPES[owner][name](found), f"{found!r} has changed (installed: {INSTALLED})"


def test_the_package_uses_each_name() -> None:
    source = "\n".join(file.read_text() for file in (ROOT / "delaytasks").rglob("*.py"))
    assert [name for _, name in NAMES if not re.search(rf"\b{name}\b", source)] == []


#: Private names of the standard library, SQLAlchemy, Django and database drivers.
OTHERS = {
    "_asdict", "_connection_record", "_ddl_if", "_double_percents", "_fields",
    "_is_autocommit_isolation", "_make", "_mapping", "_meta", "_name_", "_previous_nested",
    "_read_timeout", "_replace", "_sock", "_value_",
}  # fmt: skip
#: delaytasks only sets these private names, or replaces them with its own functions.
SET_ONLY = {"_on_connection_disconnect"}


def test_each_private_name_that_the_package_uses_is_listed() -> None:
    own, used = set[str](), dict[str, str]()
    for file in sorted((ROOT / "delaytasks").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            own |= _defined_by(node)
            if (name := _private_name_in(node)) is not None:
                used[name] = str(file.relative_to(ROOT))
    listed = {name for _, name in NAMES} | own | OTHERS | SET_ONLY
    assert {name: file for name, file in used.items() if name not in listed} == {}


def _defined_by(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
        return {node.attr}
    return set()


def _private_name_in(node: ast.AST) -> str | None:
    """Return the private attribute that `node` reads from another object than `self`."""
    name: object = None
    if isinstance(node, ast.Attribute) and not _is_self(node.value):
        name = node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        second = node.args[1]
        if node.func.id in ("getattr", "hasattr", "setattr") and isinstance(second, ast.Constant):
            name = second.value
    if isinstance(name, str) and name.startswith("_") and not name.startswith("__"):
        return name
    return None


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
