"""The number of round trips to PostgreSQL and Redis per call and per chunk.

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
from delaytasks.timers import background
from delaytasks.wiring import wiring_of
from tests.conftest import open_store
from tests.proxy import proxy_to
from tests.running import delete_keys

NEAR_S, FAR_S = 20, 3600
#: The name of the tables and of the broker's queues.
NAME = "trips"


class RoundTrips(NamedTuple):
    database: int
    broker: int


#: The rows of the table in the docs.
ROUND_TRIPS = {
    "`schedule_delay`, due beyond the horizon": RoundTrips(1, 0),
    "`schedule_delay`, due within the horizon": RoundTrips(1, 0),
    "`schedule_delay` in the caller's transaction": RoundTrips(1, 0),
    "commit of the caller's transaction, after a call due within the horizon": RoundTrips(1, 0),
    "in a thread: arming up to 100 tasks of these calls together": RoundTrips(0, 1),
    "claim of a chunk": RoundTrips(1, 0),
    "settlement of a chunk": RoundTrips(1, 0),
}


class TripCounter:
    """A `DelayTasks` and a runner that reach their servers through counting proxies."""

    def __init__(self, database_url: str, broker_url: str) -> None:
        self._database, self._broker = proxy_to(database_url), proxy_to(broker_url)
        self.url = self._database.url(database_url)
        app = Celery("trips", broker=self._broker.url(broker_url), set_as_current=False)
        # A slow machine does not settle a part of a chunk at the end of its time budget.
        self.delays = DelayTasks(
            app, self.url, table_prefix=f"{NAME}_", namespace=NAME, chunk_time_budget_s=10
        )
        self.store = open_store(self.url, table_prefix=f"{NAME}_")
        self._last = RoundTrips(0, 0)

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
        assert wiring_of(self.delays).flush()

    def close(self) -> None:
        with self.store.database.begin() as connection:
            self.store.schema.metadata.drop_all(connection)
        self.store.close()
        self.delays.close()
        self._database.close()
        self._broker.close()


@pytest.fixture
def counter(
    postgresql_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TripCounter]:
    # Once a second, a process that no worker leads reads the policies besides.
    monkeypatch.setattr(policy_cache, "POLICY_REFRESH_S", 3600)
    # The thread arms only when the test flushes.
    for name in ("ARM_DELAY_S", "ARM_DELAY_PART"):
        monkeypatch.setattr(background, name, 3600)
    made = TripCounter(postgresql_url, redis_url)
    yield made
    made.close()
    app = Celery("trips", broker=redis_url, set_as_current=False)
    with app.connection_for_write() as connection:
        delete_keys(connection, NAME)


@pytest.mark.parametrize(("where", "delay"), [("beyond", FAR_S), ("within", NEAR_S)])
def test_a_call_makes_these_round_trips(counter: TripCounter, where: str, delay: float) -> None:
    def schedule() -> object:
        return counter.delays.schedule_delay("note", {"n": 1}, delay)

    schedule()  # opens the connections
    counter.flush()
    assert counter.of(schedule) == ROUND_TRIPS[f"`schedule_delay`, due {where} the horizon"]


def test_entries_of_several_calls_are_armed_in_one_round_trip(counter: TripCounter) -> None:
    counter.delays.schedule_delay("note", None, NEAR_S)
    counter.flush()  # opens the connections
    for _ in range(100):
        counter.delays.schedule_delay("note", None, NEAR_S)
    name = "in a thread: arming up to 100 tasks of these calls together"
    assert counter.of(counter.flush) == ROUND_TRIPS[name]


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
    assert scheduled == ROUND_TRIPS["`schedule_delay` in the caller's transaction"]
    name = "commit of the caller's transaction, after a call due within the horizon"
    assert committed == ROUND_TRIPS[name]


@pytest.mark.parametrize("rows", [1, 50])
def test_a_chunk_makes_these_round_trips(counter: TripCounter, rows: int) -> None:
    claims: list[RoundTrips] = []
    counter.delays.processor("note")(lambda body: claims.append(counter.since_last()))
    runner = counter.delays.runner()

    def run() -> RoundTrips:
        """Return the round trips after the last row has run."""
        tasks = [counter.delays.schedule_delay("note", None, 0) for _ in range(rows)]
        counter.flush()
        return counter.of(lambda: runner.run([Entry.of(task) for task in tasks]))

    run()  # opens the connections and prepares the statements
    claims.clear()
    settled = run()
    assert claims == [ROUND_TRIPS["claim of a chunk"]] + [RoundTrips(0, 0)] * (rows - 1)
    assert settled == ROUND_TRIPS["settlement of a chunk"]
