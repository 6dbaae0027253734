"""Round trips, prepared statements and kept connections."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from delaytasks import StoreError
from tests.conftest import new_world
from tests.world import World
from tests.world.connections import ConnectedWorld, RoundTrips, TripCounter
from tests.world.plans import assert_no_scan

# The number of round trips to each database and broker per call and per chunk


NEAR_S, FAR_S = 20, 3600


class ByServers(NamedTuple):
    """The round trips of a step."""

    postgresql_redis: RoundTrips
    mysql_rabbitmq: RoundTrips


def _only(postgresql: int, mysql: int) -> ByServers:
    """Return the round trips of a step without a broker."""
    return ByServers(RoundTrips(postgresql, 0), RoundTrips(mysql, 0))


#: The rows of the table in the docs.
ROUND_TRIPS = {
    "`schedule_delay`, due beyond the horizon": _only(1, 1),
    "`schedule_delay`, due within the horizon": _only(1, 1),
    "`schedule_delay` with a key": _only(4, 4),
    "`schedule_delay` in the caller's transaction": _only(1, 1),
    # On MariaDB, the pool of the caller's engine sends ROLLBACK after the commit.
    "commit of the caller's transaction, after a call due within the horizon": _only(1, 2),
    "`apply_async` of a [durable Celery task](move-from-eta.md)": _only(4, 4),
    # RabbitMQ sends no answer to these messages.
    "in a thread: arming up to 100 tasks of these calls together": ByServers(
        RoundTrips(0, 1), RoundTrips(0, 0)
    ),
    "claim of a chunk": _only(1, 3),
    "settlement of a chunk": _only(1, 1),
    "settlement of a chunk of tasks with keys": _only(5, 4),
}


class Counter(TripCounter):
    """Knows how many round trips a step should make."""

    def expected(self, step: str) -> RoundTrips:
        trips: RoundTrips = getattr(ROUND_TRIPS[step], self.servers)
        return trips


@pytest.fixture(params=["postgresql_redis", pytest.param("mysql_rabbitmq", marks=pytest.mark.slow)])
def counter(request: pytest.FixtureRequest) -> Iterator[Counter]:
    urls = (request.getfixturevalue(f"{name}_url") for name in request.param.split("_"))
    with closing(Counter(request.param, *urls)) as made:
        yield made


@pytest.mark.parametrize("step", [*ROUND_TRIPS][:3] + [*ROUND_TRIPS][5:6])
def test_a_call_makes_these_round_trips(counter: Counter, step: str) -> None:
    @counter.app.task(durable_eta=True, shared=False)
    def remind() -> None: ...

    keys = itertools.count()

    def call() -> object:
        if "apply_async" in step:
            return remind.apply_async(countdown=FAR_S)
        delay, key = NEAR_S if "within" in step else FAR_S, next(keys)
        options: Any = {"key": f"{key}"} if "key" in step else {}
        return counter.delays.schedule_delay("note", None, delay, **options)

    call()  # opens the connections
    counter.flush()
    assert counter.of(call) == counter.expected(step)


def test_entries_of_several_calls_are_armed_in_one_round_trip(counter: Counter) -> None:
    counter.delays.schedule_delay("note", None, NEAR_S)
    counter.flush()  # opens the connections
    for _ in range(100):
        counter.delays.schedule_delay("note", None, NEAR_S)
    name = "in a thread: arming up to 100 tasks of these calls together"
    assert counter.of(counter.flush) == counter.expected(name)


def test_a_call_in_the_callers_transaction_makes_these_round_trips(counter: Counter) -> None:
    engine = create_engine(counter.url)

    def schedule() -> tuple[RoundTrips, RoundTrips]:
        with Session(engine) as session:
            session.execute(text("SELECT 1"))
            scheduled = counter.of(
                lambda: counter.delays.schedule_delay("note", {"n": 1}, NEAR_S, session=session)
            )
            return scheduled, counter.of(session.commit)

    schedule()  # opens the connections
    counter.flush()
    scheduled, committed = schedule()
    engine.dispose()
    assert scheduled == counter.expected("`schedule_delay` in the caller's transaction")
    name = "commit of the caller's transaction, after a call due within the horizon"
    assert committed == counter.expected(name)


@pytest.mark.parametrize(("rows", "has_keys"), [(1, False), (50, False), (1, True), (50, True)])
def test_a_chunk_makes_these_round_trips(counter: Counter, rows: int, has_keys: bool) -> None:
    claims: list[RoundTrips] = []
    counter.delays.processor("note")(lambda body: claims.append(counter.since_last()))

    def run() -> RoundTrips:
        """Return the round trips after the last row has run."""
        keys = [str(n) if has_keys else None for n in range(rows)]
        tasks = [counter.delays.schedule_delay("note", None, 0, key=key) for key in keys]
        counter.flush()
        return counter.of(lambda: counter.run(tasks))

    run()  # opens the connections and prepares the statements
    claims.clear()
    settled = run()
    assert claims == [counter.expected("claim of a chunk")] + [RoundTrips(0, 0)] * (rows - 1)
    name = "settlement of a chunk of tasks with keys" if has_keys else "settlement of a chunk"
    assert settled == counter.expected(name)


# Statements that PostgreSQL parses and plans once for each connection


@pytest.fixture(params=["postgresql_url", "psycopg_url"])
def field(request: pytest.FixtureRequest) -> Iterator[ConnectedWorld]:
    url = request.getfixturevalue(request.param)
    with new_world(ConnectedWorld, url, table_prefix="plan_", pool_size=1) as world:
        world.alter("SET (autovacuum_enabled = off)")
        yield world


def work_through(world: ConnectedWorld) -> bool:
    """Run three tasks, and return whether they have succeeded."""
    tasks = world.put_many(3)
    world.worker().end(world.claim(*tasks))
    return world.statuses(tasks) == ["DONE"] * 3


@pytest.mark.slow
def test_claims_and_settlements_are_planned_once(field: ConnectedWorld) -> None:
    for _ in range(3):
        assert work_through(field)
    prepared = dict(field.ask("SELECT name, generic_plans FROM pg_prepared_statements"))
    assert len(prepared) == 2
    assert set(prepared.values()) == {3}


CHANGES: dict[str, Any] = {
    "dropped by a pooler": lambda world: world.tell("DEALLOCATE ALL"),
    "prepared by another client": lambda world: world.forget(),
    "a column has another type": lambda world: world.alter("ALTER COLUMN tag TYPE varchar(200)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_statements_work_if_their_prepared_ones_do_not(field: ConnectedWorld, change: Any) -> None:
    work_through(field)
    change(field)
    assert work_through(field)


@pytest.mark.slow
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_dropped_statement_is_prepared_again(field: ConnectedWorld, is_forgotten: bool) -> None:
    field.limit(concurrency=10)  # a claim of several statements, in a transaction
    for _ in range(2):
        waits = field.put()
        assert [one.id for one in field.claim(waits)] == [waits.id]
        field.drop_prepared_of_transactions(is_forgotten)


@pytest.mark.slow
def test_an_error_of_a_prepared_statement_is_ours_without_values(field: ConnectedWorld) -> None:
    work_through(field)
    field.alter("ADD CHECK (version < 1) NOT VALID")
    with pytest.raises(StoreError, match="a value cannot be stored") as caught:
        work_through(field)
    assert "note" not in str(caught.value)


@pytest.mark.slow
def test_instants_are_utc_whatever_time_zone_the_url_asks_for(postgresql_url: str) -> None:
    url = f"{postgresql_url}?options=-c%20timezone%3DAsia/Tokyo"
    with new_world(World, url, table_prefix="zone_") as world:
        waits = world.put()
        [claimed] = world.claim(waits)
    assert claimed.expected_time == waits.expected_time
    assert claimed.create_time is not None
    assert {str(at.tzinfo) for at in (claimed.expected_time, claimed.create_time)} == {"UTC"}


@pytest.mark.slow
def test_a_statement_on_a_broken_connection_is_sent_again_on_another(field: ConnectedWorld) -> None:
    work_through(field)
    waits, before = field.put(), field.session()
    with field.breaking_the_next_connection() as used:
        assert [one.id for one in field.claim(waits)] == [waits.id]
    assert used[0] == before
    assert len(set(used)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("versions", [1, 2], ids=["one_version", "several"])
def test_a_plan_for_an_empty_table_serves_a_full_one(field: ConnectedWorld, versions: int) -> None:
    none = [field.new_row(version=n % versions) for n in range(2)]
    field.worker().end([*field.claim(*none), *none])
    number = 20_000 // versions
    some = [one for n in range(versions) for one in field.put_many(number, -60, version=n)]
    mixed = [*some[:50], *some[-50:]]
    shown = field.plans(lambda: field.claim(*mixed))
    claimed = field.claim(*some[50:100], *some[-100:-50])
    assert len(claimed) == 100
    shown += field.plans(lambda: field.worker().end(claimed))
    assert shown.count("Index Cond") == 3
    assert_no_scan(shown)


# The connection that a process keeps for statements that are sent past SQLAlchemy


@pytest.fixture
def kept(postgresql_url: str) -> Iterator[ConnectedWorld]:
    with new_world(ConnectedWorld, postgresql_url, table_prefix="kept_") as world:
        yield world


def test_a_claim_checks_no_connection_out_of_the_pool(kept: ConnectedWorld) -> None:
    waits = kept.put_many(5)
    kept.claim(waits[0])
    with kept.checked_out() as connections:
        assert all(kept.claim(one) for one in waits[1:])
    assert connections == []


def test_a_connection_that_the_server_ended_is_replaced_before_use(kept: ConnectedWorld) -> None:
    ended = kept.session()
    kept.end_session(ended)
    assert kept.ask("SELECT 1", tries=1) == [(1,)]
    assert kept.session() != ended


def test_another_thread_gets_another_connection_meanwhile(kept: ConnectedWorld) -> None:
    mine = kept.session()
    other = kept.while_in_use(kept.session_of_another_thread)
    assert other != mine
    assert kept.session() in (mine, other), "no third connection is opened"


def test_disposing_of_the_connections_closes_the_kept_one_too(kept: ConnectedWorld) -> None:
    before = kept.session()
    kept.reconnect()
    assert kept.session() != before
    assert not kept.has_session(before)


def test_a_connection_in_use_while_all_are_disposed_of_is_not_kept(kept: ConnectedWorld) -> None:
    before = kept.session()
    kept.while_in_use(kept.reconnect)
    assert kept.session() != before


def test_a_forked_child_leaves_the_connection_to_its_parent(kept: ConnectedWorld) -> None:
    before = kept.session()
    kept.become_child()
    assert kept.session() != before
    assert kept.has_session(before), "it is still open"
