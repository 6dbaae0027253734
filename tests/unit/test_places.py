"""Different URLs of the same database are recognized."""

from __future__ import annotations

import pytest
from sqlalchemy import make_url

from delaytasks.core.errors import ConfigError
from delaytasks.storage.database import Database
from delaytasks.storage.engines import addresses_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("postgresql://me@h/d", "postgresql+psycopg://you@h:5432/d?sslmode=require"),
        ("postgresql://h1,h2/d", "postgresql://h2/d"),
        ("postgresql:///d?host=h1:5433&host=h2", "postgresql://h1:5433/d"),
        ("postgresql:///d?host=h1,h2&port=1,2", "postgresql:///d?host=h2:2&host=h1:1"),
        ("postgresql:///d?host=/run/a&port=5433", "postgresql:///d?host=/run/a&port=5433&user=me"),
        ("mysql://h/d", "mariadb+pymysql://h:3306/d"),
        ("sqlite:////srv/d", "sqlite+aiosqlite:////srv/d"),
    ],
)
def test_urls_that_may_name_the_same_server_have_a_common_address(one: str, other: str) -> None:
    assert addresses_of(make_url(one)) & addresses_of(make_url(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("postgresql:///d?host=h1&host=h2", "postgresql:///d?host=h3&host=h4"),
        ("postgresql:///d?host=h:1&host=i:1", "postgresql:///d?host=h:2&host=i:2"),
        ("postgresql:///d?host=h1,h2&port=1,2", "postgresql:///d?host=h1,h2&port=2,1"),
        ("postgresql:///d?host=/run/a", "postgresql:///d?host=/run/b"),
        ("postgresql:///d?service=a", "postgresql:///d?service=b"),
        ("postgresql://h/d", "postgresql://h/e"),
        ("mysql://localhost/d?unix_socket=/run/a", "mysql://localhost/d?unix_socket=/run/b"),
        ("mysql://h/d", "postgresql://h/d"),
        ("sqlite:////srv/d", "sqlite:////srv/e"),
    ],
)
def test_urls_of_different_servers_have_no_common_address(one: str, other: str) -> None:
    assert not addresses_of(make_url(one)) & addresses_of(make_url(other))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://root@h1:5432,h2:5432/d",
        "postgresql://root@/d?host=h1&host=h2&port=5432",
        "postgresql://root@/d?host=h1,h2,h3&port=1,2",
        "postgresql://root@/d?host=h1:x&host=h2",
        "postgresql://root@h1:5432,h2/d",
    ],
)
def test_unequal_numbers_of_hosts_and_ports_are_a_wrong_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"delaytasks_database_url .*host=h1:5432&host=h2:5432"):
        Database(url).auto.connect()
