"""Checks name a server that is a standby, or that has lost its synchronous standbys. Each node of
a Galera cluster serves claims and settlements."""

from __future__ import annotations

from contextlib import closing

import pytest
from sqlalchemy import create_engine, select, text

from delaytasks import DelayedTask, Status
from delaytasks.db import migrations
from delaytasks.operate.state import NO_STANDBY, READ_ONLY, server_problem
from delaytasks.runtime import runtime_of
from tests.conformance.test_metrics import Values
from tests.conftest import open_store
from tests.services import GaleraNode, MariaDBServer, PostgresServer
from tests.waiting import wait_until
from tests.world import Settlement
from tests.world.recording import delays_on

pytestmark = pytest.mark.slow


def problem(server: PostgresServer | MariaDBServer) -> str | None:
    with closing(delays_on(server.url)) as delays:
        return server_problem(runtime_of(delays).store.database)


def scraped(server: PostgresServer | MariaDBServer) -> dict[str, float]:
    """Return what the exporter's metric says of the server."""
    with closing(delays_on(server.url)) as delays:
        values = Values(delays)
        names = ("read_only", "no_standby")
        return {name: values.of("database_problem", problem=name) or 0 for name in names}


def migrate(server: PostgresServer | MariaDBServer) -> None:
    with closing(delays_on(server.url)) as delays:
        migrations.upgrade(runtime_of(delays).store.database)
    assert problem(server) is None


def test_a_postgresql_without_its_synchronous_standby_is_named(
    own_postgresql: PostgresServer,
) -> None:
    migrate(own_postgresql)
    own_postgresql.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    own_postgresql.execute("SELECT pg_reload_conf()")
    reloaded = "the server to reload its configuration"
    wait_until(lambda: problem(own_postgresql) == NO_STANDBY, 30, reloaded)
    own_postgresql.execute("ALTER SYSTEM RESET synchronous_standby_names")


def test_a_mariadb_that_is_a_standby_or_lacks_one_is_named(logging_mariadb: MariaDBServer) -> None:
    migrate(logging_mariadb)
    logging_mariadb.execute("SET GLOBAL rpl_semi_sync_master_enabled = ON")
    assert problem(logging_mariadb) == NO_STANDBY
    assert scraped(logging_mariadb) == {"read_only": 0, "no_standby": 1}
    logging_mariadb.execute("SET GLOBAL read_only = ON")
    assert problem(logging_mariadb) == READ_ONLY
    assert scraped(logging_mariadb) == {"read_only": 1, "no_standby": 0}


def test_a_galera_node_settles_what_another_node_has_just_claimed(
    galera: tuple[GaleraNode, GaleraNode],
) -> None:
    """The node of the settlement applies the claim later, here behind a large transaction."""
    stores = [open_store(node.url) for node in galera]
    claiming, settling = (store.claims("worker", None) for store in stores)
    work, other_node = "work (id INT PRIMARY KEY)", create_engine(galera[1].url)
    galera[0].execute(f"CREATE TABLE {work}")
    was_behind, t = set(), stores[0].schema.tasks.c
    with other_node.connect() as plain:
        for n in range(3):
            now = stores[0].tasks.now()
            stores[0].tasks.new.insert(DelayedTask(n + 1, "t", "{}", now, create_time=now))
            galera[0].execute(f"INSERT INTO work SELECT seq + {n}000000 FROM seq_1_to_200000")
            [claimed] = claiming.claim_alone(n + 1, 0)
            status = plain.execute(select(t.status).where(t.id == n + 1))
            was_behind.add(status.scalar() != Status.RUNNING)
            assert settling.settle([Settlement(claimed, "succeed")]) == {n + 1}
            plain.rollback()
        waits = text("SHOW GLOBAL STATUS LIKE 'wsrep_causal_reads'")
        before = plain.execute(waits).one()
        stores[1].tasks.new.insert(DelayedTask(9, "t", "{}", now, create_time=now))
        assert plain.execute(waits).one() == before, "a new row needs nothing of other nodes"
        assert stores[1].tasks.get(9) is not None
        assert plain.execute(waits).one() != before
    assert True in was_behind
    other_node.dispose()
    for store in stores:
        store.close()
