"""Round trips, prepared statements and kept connections."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import Session

from delaytasks import StoreError
from delaytasks.runtime import runtime_of
from tests.conftest import new_world
from tests.waiting import wait_until
from tests.world import World
from tests.world.connections import ConnectedWorld, RoundTrips, TripCounter

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


def test_a_call_makes_these_round_trips(counter: Counter) -> None:
    @counter.app.task(durable_eta=True, shared=False)
    def remind() -> None: ...

    delays, keys = counter.delays, map(str, itertools.count())
    calls: list[Callable[[], object]] = [
        lambda: delays.schedule_delay("note", None, FAR_S),
        lambda: delays.schedule_delay("note", None, NEAR_S),
        lambda: delays.schedule_delay("note", None, FAR_S, key=next(keys)),
        lambda: remind.apply_async(countdown=FAR_S),
    ]
    for step, call in zip([*ROUND_TRIPS][:3] + [*ROUND_TRIPS][5:6], calls, strict=True):
        call()  # opens the connections
        counter.flush()
        assert counter.of(call) == counter.expected(step), step
    for _ in range(100):
        calls[1]()
    name = "in a thread: arming up to 100 tasks of these calls together"
    assert counter.of(counter.flush) == counter.expected(name)


def test_a_call_in_the_callers_transaction_makes_these_round_trips(counter: Counter) -> None:
    engine = create_engine(counter.url)

    def schedule() -> list[RoundTrips]:
        with Session(engine) as session:
            session.execute(text("SELECT 1"))
            call = partial(counter.delays.schedule_delay, "note", None, NEAR_S, session=session)
            return [counter.of(call), counter.of(session.commit)]

    schedule()  # opens the connections
    counter.flush()
    steps = [*ROUND_TRIPS][3:5]
    assert schedule() == [counter.expected(step) for step in steps]
    engine.dispose()


def test_a_chunk_makes_these_round_trips(counter: Counter) -> None:
    claims: list[RoundTrips] = []
    counter.delays.processor("note")(lambda body: claims.append(counter.since_last()))

    def run(keys: list[Any]) -> RoundTrips:
        """Return the round trips after the last row has run."""
        tasks = [counter.delays.schedule_delay("note", None, 0, key=key) for key in keys]
        counter.flush()
        # By the clock of the database the last one may be due in a moment, and is claimed alone.
        now = runtime_of(counter.delays).store.tasks.now
        wait_until(lambda: now() >= tasks[-1].due, 10, "all tasks to be due")
        return counter.of(lambda: counter.run(tasks))

    for rows, end in itertools.product((1, 50), ("", " of tasks with keys")):
        keys = [str(n) if end else None for n in range(rows)]
        run(keys)  # opens the connections and prepares the statements
        claims.clear()
        assert run(keys) == counter.expected(f"settlement of a chunk{end}")
        assert claims == [counter.expected("claim of a chunk")] + [RoundTrips(0, 0)] * (rows - 1)


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


CHANGES: dict[str, Any] = {
    "dropped by a pooler": lambda world: world.tell("DEALLOCATE ALL"),
    "prepared by another client": lambda world: world.forget(),
    "a column has another type": lambda world: world.alter("ALTER COLUMN tag TYPE varchar(200)"),
}


@pytest.mark.slow
def test_statements_are_planned_once_and_work_if_their_plans_do_not(field: ConnectedWorld) -> None:
    for _ in range(3):
        assert work_through(field)
    prepared = dict(field.ask("SELECT name, generic_plans FROM pg_prepared_statements"))
    assert (len(prepared), set(prepared.values())) == (2, {3})
    for name, change in CHANGES.items():
        change(field)
        assert work_through(field), name
    field.limit(concurrency=10)  # a claim of several statements, in a transaction
    for is_forgotten in (False, True, False):
        waits = field.put()
        assert [one.id for one in field.claim(waits)] == [waits.id]
        with field.begin() as connection:
            if is_forgotten:
                connection.info.clear()
            else:
                connection.exec_driver_sql("DEALLOCATE ALL")


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
    with new_world(World, url, table_prefix="Zone_") as world:  # a name that must be quoted
        waits = world.put()
        [claimed] = world.claim(waits)
    assert claimed.expected_time == waits.expected_time
    assert claimed.create_time is not None
    assert {str(at.tzinfo) for at in (claimed.expected_time, claimed.create_time)} == {"UTC"}


# The connection that a process keeps for statements that are sent past SQLAlchemy


@pytest.fixture
def kept(postgresql_url: str) -> Iterator[ConnectedWorld]:
    with new_world(ConnectedWorld, postgresql_url, table_prefix="kept_") as world:
        yield world


def test_the_kept_connection_is_used_replaced_and_left_to_the_parent(kept: ConnectedWorld) -> None:
    waits, first = kept.put_many(5), kept.session()
    connections: list[object] = []
    event.listen(kept.store.database.auto, "checkout", lambda *args: connections.append(args))
    assert all(kept.claim(one) for one in waits)
    assert (connections, kept.session()) == ([], first)
    kept.end_session(first)
    assert kept.ask("SELECT 1", tries=1) == [(1,)], "one that the server has ended is not used"
    second = kept.session()
    with ThreadPoolExecutor(1) as pool:
        other = kept.while_in_use(lambda: pool.submit(kept.session).result(10))
    assert len({first, second, other}) == 3
    assert kept.session() in (second, other), "no third connection is opened"
    third = kept.session()
    kept.store.database.after_fork()
    assert kept.session() != third
    assert kept.has_session(third), "the parent's is still open"
