"""A commit that waits for a missing standby ends with an error after a bounded time."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg2
import pytest
from psycopg2 import extras
from sqlalchemy import create_engine, text

from delaytasks import DelayTasks
from delaytasks.core.errors import OutcomeUnknownError, StoreUnavailableError
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import runtime_of
from delaytasks.storage import migrations
from delaytasks.storage.replication import replication
from delaytasks.storage.standby_watch import _POSTGRESQL_SESSIONS, COMMIT_LIMIT_S
from tests.mariadb_server import MariaDBServer
from tests.postgres_server import PostgresServer
from tests.recording import delays_on, record
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: This bound is longer than the limit, and much shorter than an unlimited wait.
BOUND_S = 3 * COMMIT_LIMIT_S
Server = PostgresServer | MariaDBServer


def without_standby(server: Server) -> None:
    """Configure the server so that each commit waits for a missing standby."""
    if isinstance(server, PostgresServer):
        server.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        server.execute("SELECT pg_reload_conf()")
        wait_until(
            partial(_commit_waits, server), 30, "the server to know that it waits for a standby"
        )
    else:
        server.execute("SET GLOBAL rpl_semi_sync_master_timeout = 4294967295")
        server.execute("SET GLOBAL rpl_semi_sync_master_wait_no_slave = ON")
        server.execute("SET GLOBAL rpl_semi_sync_master_enabled = ON")


def _commit_waits(server: PostgresServer) -> bool:
    """Return whether a commit waits.

    The processes of the server reload the configuration with a delay.
    """
    connection = psycopg2.connect(server.url.replace("+psycopg2", ""), async_=True)
    extras.wait_select(connection)
    pid = connection.info.backend_pid
    connection.cursor().execute("CREATE TABLE IF NOT EXISTS probe (); DROP TABLE probe")
    is_waiting = not select.select([connection.fileno()], [], [], 0.5)[0]
    server.execute(f"SELECT pg_terminate_backend({pid})")
    connection.close()
    return is_waiting


def alone(server: Server) -> None:
    if isinstance(server, PostgresServer):
        server.execute("ALTER SYSTEM RESET synchronous_standby_names")
        server.execute("SELECT pg_reload_conf()")
    else:
        server.execute("SET GLOBAL rpl_semi_sync_master_enabled = OFF")


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Server:
    name = {"postgresql": "own_postgresql", "mariadb": "logging_mariadb"}[request.param]
    found: Server = request.getfixturevalue(name)
    return found


@pytest.fixture
def delays(server: Server) -> Iterator[DelayTasks]:
    made = delays_on(server.url)
    record(made)
    migrations.upgrade(runtime_of(made).store.database)
    yield made
    alone(server)
    made.close()


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future[Any]]]:
    pool = ThreadPoolExecutor(8)
    yield pool.submit
    pool.shutdown(wait=False, cancel_futures=True)


def sessions(server: Server, delays: DelayTasks) -> int:
    """Return how many sessions of the server wait for a standby."""
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        if isinstance(server, PostgresServer)
        else "SELECT count(*) FROM information_schema.processlist "
        "WHERE state LIKE 'Waiting for semi-sync%'"
    )
    return int(
        runtime_of(delays).store.database.autocommitted(
            lambda c: c.execute(text(query)).scalar_one()
        )
    )


def test_a_call_that_waits_for_a_missing_standby_ends_with_an_unknown_outcome(
    server: Server, delays: DelayTasks, in_thread: Callable[..., Future[Any]]
) -> None:
    task = delays.schedule_delay("note", {}, 60)
    without_standby(server)
    calls = [
        in_thread(delays.schedule_delay, "note", {}, 60, id=task.id + 1),
        in_thread(delays.schedule_delay, "note", {}, 60, id=task.id + 2, key="k"),
        in_thread(delays.reschedule, task.id, 120),
    ]
    for call in calls:
        with pytest.raises(OutcomeUnknownError, match="no standby confirmed the commit") as caught:
            call.result(BOUND_S)
        assert caught.value.id in (task.id, task.id + 1, task.id + 2)
    assert sessions(server, delays) == 0, "what ended here does not go on waiting in the server"
    alone(server)
    # The error promises that a second call with the same id is safe.
    assert delays.schedule_delay("note", {}, 60, id=task.id + 1).id == task.id + 1


def test_a_worker_that_waits_for_a_missing_standby_claims_again_later(
    server: Server, delays: DelayTasks, in_thread: Callable[..., Future[Any]]
) -> None:
    task = delays.schedule_delay("note", {}, 0)
    without_standby(server)
    claims = runtime_of(delays).store.claims("w/1", None)
    with pytest.raises(StoreUnavailableError):
        in_thread(claims.claim, [Entry(task.id, 0, 0)]).result(BOUND_S)
    alone(server)
    assert runtime_of(delays).store.tasks.read(task.id).id == task.id


def test_a_statement_that_takes_long_for_another_reason_is_left_alone(
    own_postgresql: PostgresServer, in_thread: Callable[..., Future[Any]]
) -> None:
    delays = delays_on(own_postgresql.url)
    slow = text(f"SELECT pg_sleep({COMMIT_LIMIT_S + 3})")
    done = in_thread(
        runtime_of(delays).store.database.autocommitted, lambda c: c.execute(slow).all()
    )
    assert len(done.result(BOUND_S)) == 1
    delays.close()


def test_a_session_whose_commit_was_confirmed_meanwhile_is_not_ended(postgresql_url: str) -> None:
    engine = create_engine(postgresql_url)
    with engine.connect() as busy, engine.connect() as watch:
        number, began = busy.execute(
            text("SELECT pid, query_start FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        ).one()
        assert (
            watch.execute(text(_POSTGRESQL_SESSIONS.end), {"id": number, "statement": began}).all()
            == []
        )
        assert busy.execute(text("SELECT 1")).scalar() == 1
    engine.dispose()


def test_the_standby_watch_thread_ends_while_no_connection_is_in_use(
    own_postgresql: PostgresServer,
) -> None:
    delays = delays_on(own_postgresql.url)
    runtime_of(delays).store.database.autocommitted(lambda c: c.execute(text("SELECT 1")).all())

    def is_over() -> bool:
        return not any(thread.name == "delaytasks standbys" for thread in threading.enumerate())

    wait_until(is_over, 30, "the end of the thread")
    delays.close()


def test_stats_reports_that_commits_wait(server: Server, delays: DelayTasks) -> None:
    before = replication(runtime_of(delays).store.database)
    assert before is not None
    assert before.mode == "none"
    without_standby(server)
    found = replication(runtime_of(delays).store.database)
    assert found is not None
    assert found.mode == "stopped"
    assert "COMMIT waits" in (found.problem or "")


def test_a_logical_subscriber_is_no_standby(own_postgresql: PostgresServer) -> None:
    own_postgresql.execute("ALTER SYSTEM SET wal_level = logical")
    own_postgresql.stop()
    own_postgresql.start()
    subscriber = psycopg2.connect(
        own_postgresql.url.replace("+psycopg2", ""),
        connection_factory=extras.LogicalReplicationConnection,
    )
    cursor = subscriber.cursor()
    cursor.create_replication_slot("other", output_plugin="pgoutput")
    own_postgresql.execute("CREATE PUBLICATION p FOR ALL TABLES")
    cursor.start_replication("other", options={"proto_version": "1", "publication_names": "p"})
    delays = delays_on(own_postgresql.url)
    count = text("SELECT count(*) FROM pg_stat_replication")
    assert (
        runtime_of(delays).store.database.autocommitted(lambda c: c.execute(count).scalar_one())
        == 1
    )
    found = replication(runtime_of(delays).store.database)
    assert found is not None
    assert found.mode == "none"
    delays.close()
    subscriber.close()
