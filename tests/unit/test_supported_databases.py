"""A database that delaytasks does not support is refused, and not taken for another one."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Column, MetaData, Table, select

from delaytasks.core.errors import ConfigError
from delaytasks.storage.migrations import comparison, ddl, exclusively
from delaytasks.storage.searching import estimate_rows
from delaytasks.storage.types import capabilities_of
from tests.running import ROOT

pytestmark = pytest.mark.quick

UNKNOWN: Any = SimpleNamespace(dialect=SimpleNamespace(name="oracle"))


def _migrate() -> None:
    with exclusively(UNKNOWN, "", None):
        pass


@pytest.mark.parametrize(
    "use",
    [
        lambda: capabilities_of("oracle"),
        lambda: estimate_rows(UNKNOWN, select(Table("t", MetaData(), Column("id")))),
        _migrate,
        lambda: ddl("oracle"),
        lambda: comparison("oracle"),
    ],
    ids=["capabilities", "estimates", "migrations", "DDL", "comparison"],
)
def test_an_unknown_database_is_refused_with_the_supported_ones(use: Any) -> None:
    with pytest.raises(ConfigError, match="'oracle'; it supports postgresql, mysql, mariadb, sqli"):
        use()


_NAMES = {"postgresql", "mysql", "mariadb", "sqlite"}
#: The modules that compare a name and cannot choose with `for_database`.
_COMPARE = {
    "storage/database.py": "SQLite URLs name no driver, and simulated time is for any engine",
    "storage/engines.py": "is about SQLite only",
    "storage/types.py": "SQLAlchemy also asks for dialects that are not supported, for a log",
}


# It does not find a comparison with a constant of another name.
def _compares_a_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and any(
        isinstance(each, ast.Constant) and each.value in _NAMES for each in ast.walk(node)
    )


def test_no_other_module_compares_the_name_of_a_database() -> None:
    package = ROOT / "delaytasks"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(map(_compares_a_name, ast.walk(ast.parse(path.read_text()))))
    }
    # The frameworks have their own names of databases.
    assert {path for path in found if not path.startswith("contrib/")} == set(_COMPARE)
