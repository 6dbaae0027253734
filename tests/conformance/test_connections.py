"""Round trips, prepared statements and kept connections."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest
from celery import Celery
from sqlalchemy import Connection, create_engine, event, exc, select, text
from sqlalchemy.orm import Session

from delaytasks import DelayTasks, StoreError
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.core.policies import Policy
from delaytasks.core.states import Status
from delaytasks.execution import policy_cache
from delaytasks.limits.admission import Waitlist
from delaytasks.runtime import runtime_of
from delaytasks.storage import engines as needless_rollbacks
from delaytasks.storage.store import Store
from delaytasks.timers import arming as background
from tests.conformance.query_plans import assert_no_scan, plans
from tests.conformance.store_rows import entry, task
from tests.conftest import open_store
from tests.proxy import Proxy, proxy_to
from tests.recording import runner_of
from tests.running import delete_keys

# The number of round trips to each database and broker per call and per chunk


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
            self.app, self.url, table_prefix=f"{NAME}_", namespace=NAME, _chunk_time_budget_s=10
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
        self.store.schema.metadata.drop_all(self.store.database.tx)
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
    runner = runner_of(counter.delays)

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


# MariaDB gets no ROLLBACK after a commit or an autocommitted statement


@pytest.fixture
def proxy(mysql_url: str) -> Iterator[Proxy]:
    with closing(proxy_to(mysql_url)) as made:
        yield made


@pytest.fixture
def store(mysql_url: str, proxy: Proxy) -> Iterator[Store]:
    made = open_store(proxy.url(mysql_url), table_prefix="trips_")
    yield made
    made.schema.metadata.drop_all(made.database.tx)
    made.close()


@pytest.mark.slow
@pytest.mark.skipif(
    not needless_rollbacks.rollback_options(autocommit=True),
    reason="SQLAlchemy has no skip_autocommit_rollback before 2.0.43",
)
def test_a_call_and_a_chunk_make_these_round_trips(store: Store, proxy: Proxy) -> None:
    def trips(work: Callable[[], object]) -> int:
        before = proxy.round_trips
        work()
        return proxy.round_trips - before

    claims = store.claims("w", None)

    def settle() -> object:
        return claims.settle([Settlement(claimed, "succeed") for claimed in running])

    for _ in range(2):  # the first ones open the connections
        tasks = [task(store) for _ in range(10)]
        inserted = trips(lambda: store.tasks.insert(tasks[0]))  # noqa: B023
        store.tasks.insert_many(tasks[1:])
        running = claims.claim_due("default", [0], 10)
        settled = trips(settle)
        store.tasks.insert_many([task(store) for _ in range(10)])
        claimed = trips(lambda: claims.claim_due("default", [0], 10))
    assert (inserted, settled) == (1, 1)
    assert claimed == 3, "SELECT FOR UPDATE, UPDATE and COMMIT"


@pytest.mark.slow
@pytest.mark.skipif(
    not needless_rollbacks.rollback_options(autocommit=True),
    reason="SQLAlchemy has no skip_autocommit_rollback before 2.0.43",
)
def test_an_abandoned_transaction_is_rolled_back(store: Store) -> None:
    row = task(store)
    store.tasks.insert(row)
    t = store.schema.tasks
    left_open = store.database.tx.connect()
    left_open.execute(select(t.c.id).where(t.c.id == row.id).with_for_update())
    claims = store.claims("w", None)
    assert not claims.claim_due("default", [0], 1)
    del left_open
    gc.collect()
    assert [claimed.id for claimed in claims.claim_due("default", [0], 1)] == [row.id]


# Statements that PostgreSQL parses and plans once for each connection


@pytest.fixture(params=["postgresql_url", "psycopg_url"])
def field(request: pytest.FixtureRequest) -> Iterator[Store]:
    url = request.getfixturevalue(request.param)
    store = open_store(url, table_prefix="plan_", pool_size=1)
    store.database.autocommitted(
        lambda c: c.exec_driver_sql(
            f"ALTER TABLE {store.schema.tasks} SET (autovacuum_enabled = off)"
        )
    )
    yield store
    store.schema.metadata.drop_all(store.database.tx)
    store.close()


def work_through(store: Store, count: int = 3) -> list[Status]:
    some = [task(store) for _ in range(count)]
    store.tasks.insert_many(some)
    claims = store.claims("w", None)
    claimed = claims.claim([entry(one) for one in some])
    assert len(claims.settle([Settlement(one, "succeed") for one in claimed])) == count
    found = [store.tasks.get(one.id) for one in some]
    return [one.status for one in found if one is not None]


def prepared(store: Store) -> dict[str, Any]:
    query = "SELECT split_part(statement, ' ', 4), generic_plans FROM pg_prepared_statements"
    return dict(store.database.autocommitted(lambda c: c.exec_driver_sql(query).all()))


@pytest.mark.slow
def test_claims_and_settlements_are_planned_once(field: Store) -> None:
    for _ in range(3):
        assert work_through(field) == [Status.DONE] * 3
    assert len(prepared(field)) == 2
    assert set(prepared(field).values()) == {3}


@pytest.mark.slow
def test_statements_work_after_a_pooler_has_dropped_prepared_statements(field: Store) -> None:
    work_through(field)
    field.database.autocommitted(lambda c: c.exec_driver_sql("DEALLOCATE ALL"))
    assert work_through(field) == [Status.DONE] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "forget", [lambda c: c.exec_driver_sql("DEALLOCATE ALL"), lambda c: c.info.clear()]
)
def test_a_transaction_that_fails_because_of_a_dropped_statement_is_tried_again(
    field: Store, forget: Callable[[Connection], Any]
) -> None:
    limited = dict.fromkeys([task(field).tag], Policy("tag", task(field).tag, concurrency=10))
    claims = field.claims("w", None, Waitlist(field, lambda: limited).hold_if_limited)
    for _ in range(2):
        waits = task(field)
        field.tasks.insert_many([waits])
        assert [one.id for one in claims.claim([entry(waits)])] == [waits.id]
        with field.database.begin() as connection:
            forget(connection)


@pytest.mark.slow
def test_statements_work_if_another_client_has_prepared_the_same_one(field: Store) -> None:
    work_through(field)
    field.database.autocommitted(lambda c: c.info.clear())
    assert work_through(field) == [Status.DONE] * 3


@pytest.mark.slow
def test_statements_work_after_a_column_has_changed_its_type(field: Store) -> None:
    work_through(field)
    change = f"ALTER TABLE {field.schema.tasks} ALTER COLUMN tag TYPE varchar(200)"
    field.database.autocommitted(lambda c: c.exec_driver_sql(change))
    assert work_through(field) == [Status.DONE] * 3


@pytest.mark.slow
def test_an_error_of_a_prepared_statement_is_a_store_error_without_values(field: Store) -> None:
    work_through(field)
    change = f"ALTER TABLE {field.schema.tasks} ADD CHECK (version < 1) NOT VALID"
    field.database.autocommitted(lambda c: c.exec_driver_sql(change))
    with pytest.raises(StoreError, match="a value cannot be stored") as caught:
        work_through(field)
    assert "mail" not in str(caught.value)


@pytest.mark.slow
def test_instants_are_utc_whatever_time_zone_the_url_asks_for(postgresql_url: str) -> None:
    store = open_store(f"{postgresql_url}?options=-c%20timezone%3DAsia/Tokyo", table_prefix="zone_")
    try:
        waits = task(store)
        store.tasks.insert_many([waits])
        [claimed] = store.claims("w", None).claim([entry(waits)])
        assert claimed.expected_time == waits.expected_time
        assert str(claimed.expected_time.tzinfo) == "UTC"
        assert claimed.create_time is not None
        assert str(claimed.create_time.tzinfo) == "UTC"
    finally:
        store.schema.metadata.drop_all(store.database.tx)
        store.close()


@pytest.mark.slow
def test_a_statement_on_a_broken_connection_is_sent_again_on_another_one(
    field: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_through(field)
    waits = task(field)
    field.tasks.insert_many([waits])
    used: list[Any] = []
    autocommitted = field.database.autocommitted

    def broken_at_first(work: Callable[[Connection], Any]) -> Any:
        def use(connection: Connection) -> Any:
            used.append(connection.connection.driver_connection)
            if len(used) > 1:
                return work(connection)
            with field.database.begin() as other:
                other.exec_driver_sql(
                    f"SELECT pg_terminate_backend({used[0].info.backend_pid}, 5000)"
                )
            with pytest.raises(exc.DBAPIError) as caught:
                work(connection)
            assert caught.value.connection_invalidated
            assert connection.invalidated
            raise caught.value

        return autocommitted(use)

    monkeypatch.setattr(field.database, "autocommitted", broken_at_first)
    assert [one.id for one in field.claims("w", None).claim([entry(waits)])] == [waits.id]
    assert len(set(used)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("versions", [1, 2], ids=["one_version", "several"])
def test_a_plan_made_for_an_empty_table_serves_a_full_one(field: Store, versions: int) -> None:
    claims = field.claims("w", None)
    none = [task(field, version=n % versions) for n in range(2)]
    claims.claim([entry(one) for one in none])
    claims.settle([Settlement(one, "succeed") for one in none])
    some = [task(field, version=n % versions) for n in range(20_000)]
    field.tasks.insert_many(some)
    shown = plans(field, lambda: claims.claim([entry(one) for one in some[:100]]))
    claimed = claims.claim([entry(one) for one in some[100:200]])
    shown += plans(field, lambda: claims.settle([Settlement(one, "succeed") for one in claimed]))
    assert shown.count("Index Cond") == 3
    assert_no_scan(shown)


# The connection that a process keeps for statements that are sent past SQLAlchemy


@pytest.fixture
def kept_field(postgresql_url: str) -> Iterator[Store]:
    store = open_store(postgresql_url, table_prefix="kept_")
    yield store
    store.schema.metadata.drop_all(store.database.tx)
    store.close()


def session(store: Store) -> int:
    """Return the server's session of the connection that is used next."""

    def pid(connection: Connection) -> int:
        found: int = connection.connection.driver_connection.info.backend_pid  # type: ignore[union-attr]
        return found

    return store.database.autocommitted(pid)


def test_a_claim_checks_no_connection_out_of_the_pool(kept_field: Store) -> None:
    waits = [task(kept_field) for _ in range(5)]
    kept_field.tasks.insert_many(waits)
    claims, checked_out = kept_field.claims("w", None), list[object]()
    claims.claim([entry(waits[0])])
    event.listen(kept_field.database.auto, "checkout", lambda *args: checked_out.append(args))
    assert all(claims.claim([entry(one)]) for one in waits[1:])
    assert checked_out == []


def test_a_connection_that_the_server_has_ended_is_replaced_before_it_is_used(
    kept_field: Store,
) -> None:
    ended = session(kept_field)
    with kept_field.database.begin() as other:
        other.exec_driver_sql(f"SELECT pg_terminate_backend({ended}, 5000)")
    found = kept_field.database.autocommitted(
        lambda c: c.exec_driver_sql("SELECT 1").scalar(), tries=1
    )
    assert found == 1
    assert session(kept_field) != ended


def test_another_thread_gets_another_connection_meanwhile(kept_field: Store) -> None:
    mine, others = session(kept_field), list[int]()
    thread = threading.Thread(target=lambda: others.append(session(kept_field)))
    kept_field.database.autocommitted(lambda _: (thread.start(), thread.join()))
    assert others
    assert mine not in others
    assert session(kept_field) in (mine, *others), "no third connection is opened"


def test_disposing_of_the_connections_closes_the_kept_one_too(kept_field: Store) -> None:
    before = session(kept_field)
    kept_field.database.dispose()
    assert session(kept_field) != before


def test_a_connection_that_is_in_use_while_all_are_disposed_of_is_not_kept(
    kept_field: Store,
) -> None:
    before = session(kept_field)
    kept_field.database.autocommitted(lambda _: kept_field.database.dispose())
    assert session(kept_field) != before


def test_a_forked_child_leaves_the_connection_to_its_parent(kept_field: Store) -> None:
    before = session(kept_field)
    kept_field.database.after_fork()
    assert session(kept_field) != before
    with kept_field.database.begin() as other:
        query = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {before}"
        assert other.exec_driver_sql(query).scalar_one() == 1, "it is still open"
