"""A database that delaytasks does not support is refused, and not taken for another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Column, MetaData, Table, select

from delaytasks.core.errors import ConfigError
from delaytasks.storage.migrations import comparison, ddl, exclusively
from delaytasks.storage.searching import estimate_rows
from delaytasks.storage.types import capabilities_of

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
