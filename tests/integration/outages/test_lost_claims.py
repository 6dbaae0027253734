"""Claims that a crash of PostgreSQL has lost, because they do not wait for the disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import Status
from delaytasks.storage import migrations
from delaytasks.storage.store import Store
from tests.conformance.store_rows import add, entry, read
from tests.conformance.test_waitlists import waitlist_rows
from tests.conftest import settings_for
from tests.services import PostgresServer
from tests.world import World


@pytest.fixture
def store(own_postgresql: PostgresServer) -> Iterator[Store]:
    """A store on a server that brings asynchronous commits to the disk after ten seconds."""
    own_postgresql.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
    own_postgresql.execute("SELECT pg_reload_conf()")
    made = Store(own_postgresql.url, settings_for(own_postgresql.url))
    migrations.upgrade(made.database)
    yield made
    made.close()


def test_the_run_of_a_lost_claim_cannot_settle_the_run_of_the_next_claim(
    own_postgresql: PostgresServer, store: Store
) -> None:
    made = add(store)
    first, second = store.claims("worker-1", None), store.claims("worker-2", None)
    [lost] = first.claim([entry(made)])
    own_postgresql.restart()
    found = read(store, made.id)
    assert (found.status, found.version) == (Status.NOT_COMPLETE, made.version)
    [again] = second.claim([entry(made)])
    assert first.settle([Settlement(lost, "succeed")]) == set()
    assert second.settle([Settlement(again, "succeed")]) == {made.id}


def test_a_settlement_is_on_the_disk_with_its_claim(
    own_postgresql: PostgresServer, store: Store
) -> None:
    made = add(store)
    claims = store.claims("worker-1", None)
    [claimed] = claims.claim([entry(made)])
    assert claims.settle([Settlement(claimed, "fail", error="refused")]) == {made.id}
    own_postgresql.restart()
    found = read(store, made.id)
    assert (found.status, found.runs, found.error) == (Status.FAILED, 1, "refused")


def test_a_claim_with_a_limit_is_on_the_disk_with_the_waitlist(
    own_postgresql: PostgresServer, store: Store
) -> None:
    world = World(store)
    world.limit(concurrency=1)
    tasks = [world.schedule(body=number) for number in range(2)]
    assert len(world.claim(*tasks)) == 1
    own_postgresql.restart()
    assert sorted(world.statuses(tasks)) == ["HELD", "RUNNING"]
    assert waitlist_rows(world) == 1
    world.close()
