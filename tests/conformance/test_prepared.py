"""Statements that PostgreSQL parses and plans once for each connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, exc

from delaytasks.core.errors import StoreError
from delaytasks.core.interfaces import Settlement
from delaytasks.core.policies import Policy
from delaytasks.core.states import Status
from delaytasks.limits.admission import Waitlist
from delaytasks.storage.store import Store
from tests.conformance.query_plans import assert_no_scan, plans
from tests.conformance.store_rows import entry, task
from tests.conftest import open_store

pytestmark = pytest.mark.slow


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
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
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


def test_claims_and_settlements_are_planned_once(field: Store) -> None:
    for _ in range(3):
        assert work_through(field) == [Status.DONE] * 3
    assert len(prepared(field)) == 2
    assert set(prepared(field).values()) == {3}


def test_statements_work_after_a_pooler_has_dropped_prepared_statements(field: Store) -> None:
    work_through(field)
    field.database.autocommitted(lambda c: c.exec_driver_sql("DEALLOCATE ALL"))
    assert work_through(field) == [Status.DONE] * 3


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


def test_statements_work_if_another_client_has_prepared_the_same_one(field: Store) -> None:
    work_through(field)
    field.database.autocommitted(lambda c: c.info.clear())
    assert work_through(field) == [Status.DONE] * 3


def test_statements_work_after_a_column_has_changed_its_type(field: Store) -> None:
    work_through(field)
    change = f"ALTER TABLE {field.schema.tasks} ALTER COLUMN tag TYPE varchar(200)"
    field.database.autocommitted(lambda c: c.exec_driver_sql(change))
    assert work_through(field) == [Status.DONE] * 3


def test_an_error_of_a_prepared_statement_is_a_store_error_without_values(field: Store) -> None:
    work_through(field)
    change = f"ALTER TABLE {field.schema.tasks} ADD CHECK (version < 1) NOT VALID"
    field.database.autocommitted(lambda c: c.exec_driver_sql(change))
    with pytest.raises(StoreError, match="a value cannot be stored") as caught:
        work_through(field)
    assert "mail" not in str(caught.value)


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
        with store.database.begin() as connection:
            store.schema.metadata.drop_all(connection)
        store.close()


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
