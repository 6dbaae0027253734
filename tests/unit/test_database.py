"""A database that delaytasks cannot use is refused with a remedy, and not taken for another one."""

from __future__ import annotations

import re
import sys

import pytest

from delaytasks import ConfigError
from tests.world.recording import delays_on

pytestmark = pytest.mark.quick


def test_an_unknown_database_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match="'oracle'; it supports postgresql, mysql, mariadb, sqli"):
        delays_on("oracle://h/d").find()


UNEQUAL = ["h1:5432,h2:5432/d", "/d?host=h1&host=h2&port=5432", "/d?host=h1,h2,h3&port=1,2"]
UNEQUAL += ["/d?host=h1:x&host=h2", "h1:5432,h2/d"]


@pytest.mark.parametrize("rest", UNEQUAL)
def test_unequal_numbers_of_hosts_and_ports_are_a_wrong_setting(rest: str) -> None:
    with pytest.raises(ConfigError, match="delaytasks_database_url"):
        delays_on(f"postgresql://root@{rest}").find()


PACKAGES = {"postgresql": "psycopg2-binary", "mysql": "'delaytasks[mysql]'"}
PACKAGES["postgresql+psycopg"] = "'delaytasks[psycopg]'"


@pytest.mark.parametrize("scheme", PACKAGES)
def test_a_missing_driver_has_a_remedy(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psycopg2", "psycopg", "pymysql"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install {re.escape(PACKAGES[scheme])}"):
        delays_on(f"{scheme}://h/d").find()
