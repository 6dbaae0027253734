"""Claims that a crash of PostgreSQL has lost, because they do not wait for the disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks import Status
from delaytasks.db import migrations
from delaytasks.db.store import Store
from tests.conformance.test_waitlists import waitlist_rows
from tests.conftest import settings_for
from tests.services import PostgresServer
from tests.world import World


@pytest.fixture
def world(own_postgresql: PostgresServer) -> Iterator[World]:
    """A world on a server that brings asynchronous commits to the disk after ten seconds."""
    own_postgresql.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
    own_postgresql.execute("SELECT pg_reload_conf()")
    store = Store(own_postgresql.url, settings_for(own_postgresql.url))
    migrations.upgrade(store.database)
    world = World(store)
    yield world
    world.close()
    store.close()


def test_a_settlement_is_on_the_disk_and_the_run_of_a_lost_claim_cannot_settle_the_next(
    own_postgresql: PostgresServer, world: World
) -> None:
    settled, made = world.put(), world.put()
    [ended] = world.claim(settled)
    assert world.settle(ended, "fail", error="refused")
    [lost] = world.claim(made)
    own_postgresql.restart()
    failed, found = world.read(settled), world.read(made)
    assert (failed.status, failed.runs, failed.error) == (Status.FAILED, 1, "refused")
    assert (found.status, found.version) == (Status.NOT_COMPLETE, made.version)
    [again] = world.claim(made, by="worker-2")
    assert not world.settle(lost)
    assert world.settle(again, by="worker-2")


def test_a_claim_with_a_limit_is_on_the_disk(own_postgresql: PostgresServer, world: World) -> None:
    world.limit(concurrency=1)
    tasks = [world.schedule(body=number) for number in range(2)]
    assert len(world.claim(*tasks)) == 1
    own_postgresql.restart()
    assert sorted(world.statuses(tasks)) == ["HELD", "RUNNING"]
    assert waitlist_rows(world) == 1
