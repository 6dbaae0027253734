"""`check` names a server that is a standby, or that has lost its synchronous standbys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks.cli.setup import warnings_of
from delaytasks.db import migrations
from delaytasks.runtime import runtime_of
from tests.services import MariaDBServer, PostgresServer
from tests.waiting import wait_until
from tests.world.recording import delays_on

pytestmark = pytest.mark.slow


def warnings(server: PostgresServer | MariaDBServer) -> list[str]:
    delays = delays_on(server.url)
    try:
        return warnings_of(delays)
    finally:
        delays.close()


@pytest.fixture
def postgresql(own_postgresql: PostgresServer) -> Iterator[PostgresServer]:
    delays = delays_on(own_postgresql.url)
    migrations.upgrade(runtime_of(delays).store.database)
    delays.close()
    assert warnings(own_postgresql) == []
    yield own_postgresql
    own_postgresql.execute("ALTER SYSTEM RESET synchronous_standby_names")


def test_a_postgresql_without_its_synchronous_standby_is_named(postgresql: PostgresServer) -> None:
    postgresql.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    postgresql.execute("SELECT pg_reload_conf()")
    wait_until(lambda: warnings(postgresql) != [], 30, "the server to reload its configuration")
    [warning] = warnings(postgresql)
    assert "no synchronous standby is connected" in warning


def test_a_mariadb_that_is_a_standby_or_lacks_one_is_named(logging_mariadb: MariaDBServer) -> None:
    delays = delays_on(logging_mariadb.url)
    migrations.upgrade(runtime_of(delays).store.database)
    delays.close()
    assert warnings(logging_mariadb) == []
    logging_mariadb.execute("SET GLOBAL rpl_semi_sync_master_enabled = ON")
    [warning] = warnings(logging_mariadb)
    assert "no synchronous standby is connected" in warning
    logging_mariadb.execute("SET GLOBAL read_only = ON")
    [warning] = warnings(logging_mariadb)
    assert "it is a standby" in warning
