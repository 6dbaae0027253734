"""The number of round trips to each database and broker per call and per chunk.

A proxy counts them. docs/how-it-works.md shows the numbers; `python -m tests.unit.test_docs` writes
them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from delaytasks import DelayTasks
from delaytasks.core.interfaces import Entry
from delaytasks.execution import policy_cache
from delaytasks.runtime import runtime_of
from delaytasks.timers import arming as background
from tests.conftest import open_store
from tests.proxy import proxy_to
from tests.running import delete_keys

NEAR_S, FAR_S = 20, 3600
#: The name of the tables and of the broker's queues.
NAME = "trips"


class RoundTrips(NamedTuple):
    database: int
    broker: int


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
    "`apply_async` of a [durable Celery task](durable-eta.md)": _only(4, 4),
    # RabbitMQ sends no answer to these messages.
    "in a thread: arming up to 100 tasks of these calls together": ByServers(
        RoundTrips(0, 1), RoundTrips(0, 0)
    ),
    "claim of a chunk": _only(1, 3),
    "settlement of a chunk": _only(1, 1),
    "settlement of a chunk of tasks with keys": _only(5, 4),
}


class TripCounter:
    """A `DelayTasks` and a runner that reach their servers through counting proxies."""

    def __init__(self, servers: str, database_url: str, broker_url: str) -> None:
        self._servers = servers
        self._database, self._broker = proxy_to(database_url), proxy_to(broker_url)
        self.url = self._database.url(database_url)
        self.app = Celery("trips", broker=self._broker.url(broker_url), set_as_current=False)
        # A slow machine does not settle a part of a chunk at the end of its time budget.
        self.delays = DelayTasks(
            self.app, self.url, table_prefix=f"{NAME}_", namespace=NAME, chunk_time_budget_s=10
        )
        self.store = open_store(self.url, table_prefix=f"{NAME}_")
        self._last = RoundTrips(0, 0)

    def expected(self, step: str) -> RoundTrips:
        trips: RoundTrips = getattr(ROUND_TRIPS[step], self._servers)
        return trips

    def since_last(self) -> RoundTrips:
        """Return the round trips since the last call of this method."""
        last, now = self._last, RoundTrips(self._database.round_trips, self._broker.round_trips)
        self._last = now
        return RoundTrips(now.database - last.database, now.broker - last.broker)

    def of(self, work: Callable[[], object]) -> RoundTrips:
        self.since_last()
        work()
        return self.since_last()

    def flush(self) -> None:
        assert runtime_of(self.delays).flush()

    def close(self) -> None:
        with self.store.database.begin() as connection:
            self.store.schema.metadata.drop_all(connection)
        self.store.close()
        publisher = runtime_of(self.delays).publisher
        with self.app.connection_for_write() as connection:
            queue = publisher.queue("default")(connection)
            queue.delete()
            queue.exchange.delete()
            delete_keys(connection, NAME)
        self.delays.close()
        self.app.close()
        self._database.close()
        self._broker.close()


@pytest.fixture(params=["postgresql_redis", pytest.param("mysql_rabbitmq", marks=pytest.mark.slow)])
def counter(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TripCounter]:
    # Once a second, a process without a worker also reads the policies.
    monkeypatch.setattr(policy_cache, "POLICY_REFRESH_S", 3600)
    # The thread arms only when the test flushes.
    for name in ("ARM_DELAY_S", "ARM_DELAY_PART"):
        monkeypatch.setattr(background, name, 3600)
    urls = (request.getfixturevalue(f"{name}_url") for name in request.param.split("_"))
    made = TripCounter(request.param, *urls)
    yield made
    made.close()


@pytest.mark.parametrize(("where", "delay"), [("beyond", FAR_S), ("within", NEAR_S)])
def test_a_call_makes_these_round_trips(counter: TripCounter, where: str, delay: float) -> None:
    def schedule() -> object:
        return counter.delays.schedule_delay("note", {"n": 1}, delay)

    schedule()  # opens the connections
    counter.flush()
    expected = counter.expected(f"`schedule_delay`, due {where} the horizon")
    assert counter.of(schedule) == expected


def test_a_call_with_a_key_makes_these_round_trips(counter: TripCounter) -> None:
    counter.delays.schedule_delay("note", None, FAR_S, key="1")  # opens the connections
    trips = counter.of(lambda: counter.delays.schedule_delay("note", None, FAR_S, key="2"))
    assert trips == counter.expected("`schedule_delay` with a key")


def test_a_call_of_a_durable_celery_task_makes_these_round_trips(counter: TripCounter) -> None:
    @counter.app.task(durable_eta=True, shared=False)
    def remind() -> None: ...

    remind.apply_async(countdown=FAR_S)  # opens the connections
    trips = counter.of(lambda: remind.apply_async(countdown=FAR_S))
    assert trips == counter.expected("`apply_async` of a [durable Celery task](durable-eta.md)")


def test_entries_of_several_calls_are_armed_in_one_round_trip(counter: TripCounter) -> None:
    counter.delays.schedule_delay("note", None, NEAR_S)
    counter.flush()  # opens the connections
    for _ in range(100):
        counter.delays.schedule_delay("note", None, NEAR_S)
    name = "in a thread: arming up to 100 tasks of these calls together"
    assert counter.of(counter.flush) == counter.expected(name)


def test_a_call_in_the_callers_transaction_makes_these_round_trips(counter: TripCounter) -> None:
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
def test_a_chunk_makes_these_round_trips(counter: TripCounter, rows: int, has_keys: bool) -> None:
    claims: list[RoundTrips] = []
    counter.delays.processor("note")(lambda body: claims.append(counter.since_last()))
    runner = counter.delays.runner()

    def run() -> RoundTrips:
        """Return the round trips after the last row has run."""
        keys = [str(n) if has_keys else None for n in range(rows)]
        tasks = [counter.delays.schedule_delay("note", None, 0, key=key) for key in keys]
        counter.flush()
        return counter.of(lambda: runner.run([Entry.of(task) for task in tasks]))

    run()  # opens the connections and prepares the statements
    claims.clear()
    settled = run()
    assert claims == [counter.expected("claim of a chunk")] + [RoundTrips(0, 0)] * (rows - 1)
    name = "settlement of a chunk of tasks with keys" if has_keys else "settlement of a chunk"
    assert settled == counter.expected(name)
