"""The connection that a process keeps for statements that are sent past SQLAlchemy."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection, event

from delaytasks.storage.store import Store
from tests.conformance.store_rows import entry, task
from tests.conftest import open_store


@pytest.fixture
def field(postgresql_url: str) -> Iterator[Store]:
    store = open_store(postgresql_url, table_prefix="kept_")
    yield store
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    store.close()


def session(store: Store) -> int:
    """Return the server's session of the connection that is used next."""

    def pid(connection: Connection) -> int:
        found: int = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
        return found

    return store.database.autocommitted(pid)


def test_a_claim_checks_no_connection_out_of_the_pool(field: Store) -> None:
    waits = [task(field) for _ in range(5)]
    field.tasks.insert_many(waits)
    claims, checked_out = field.claims("w", None), list[object]()
    claims.claim([entry(waits[0])])
    event.listen(field.database.auto, "checkout", lambda *args: checked_out.append(args))
    assert all(claims.claim([entry(one)]) for one in waits[1:])
    assert checked_out == []


def test_a_connection_that_the_server_has_ended_is_replaced_before_it_is_used(
    field: Store,
) -> None:
    ended = session(field)
    with field.database.begin() as other:
        other.exec_driver_sql(f"SELECT pg_terminate_backend({ended}, 5000)")
    found = field.database.autocommitted(lambda c: c.exec_driver_sql("SELECT 1").scalar(), tries=1)
    assert found == 1
    assert session(field) != ended


def test_another_thread_gets_another_connection_meanwhile(field: Store) -> None:
    mine, others = session(field), list[int]()
    thread = threading.Thread(target=lambda: others.append(session(field)))
    field.database.autocommitted(lambda _: (thread.start(), thread.join()))
    assert others
    assert mine not in others
    assert session(field) in (mine, *others), "no third connection is opened"


def test_disposing_of_the_connections_closes_the_kept_one_too(field: Store) -> None:
    before = session(field)
    field.database.dispose()
    assert session(field) != before


def test_a_connection_that_is_in_use_while_all_are_disposed_of_is_not_kept(field: Store) -> None:
    before = session(field)
    field.database.autocommitted(lambda _: field.database.dispose())
    assert session(field) != before


def test_a_forked_child_leaves_the_connection_to_its_parent(field: Store) -> None:
    before = session(field)
    field.database.after_fork()
    assert session(field) != before
    with field.database.begin() as other:
        query = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {before}"
        assert other.exec_driver_sql(query).scalar_one() == 1, "it is still open"
