"""During a rolling deployment, the previous release works on the tables of this one.

The statements of the previous release on each database were recorded (`previous_release/`). They
are repeated here on the newest tables and must have the same results. `python -m
tests.migration.test_previous_release` records them anew, as a part of making a release: see
CONTRIBUTING.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from sqlalchemy import event, text

from delaytasks.core.clock import to_us
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.storage import capabilities, migrations
from delaytasks.storage.database import Database
from delaytasks.storage.store import Store
from tests.conftest import settings_for

PREFIX = "previous_"
RECORDS = Path(__file__).parent / "previous_release"
DUE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
TASK = DelayTask(1, "mail", '{"n":1}', DUE, delay_s=1, create_time=DUE)
#: Statements whose row count is compared; other counts depend on the driver.
COUNTED = ("INSERT", "UPDATE", "DELETE", "SELECT", "WITH")


def work(store: Store) -> None:
    """The operations of producers, workers and sweeps, each at least once."""
    tasks, claims, sweeps = store.tasks, store.claims("w1/1", None), store.sweeps
    for id in range(1, 8):
        assert tasks.insert(replace(TASK, id=id))
    tasks.insert_keyed(replace(TASK, id=8, key="k"), "reject")
    tasks.insert_keyed(replace(TASK, id=9, key="k"), "replace")
    tasks.insert(replace(TASK, id=10, expected_time=DUE + timedelta(days=9000)))
    tasks.reschedule(10, DUE + timedelta(days=9001))
    tasks.cancel(10)
    store.touches.touch(7, DUE + timedelta(seconds=1))
    store.workers.report("w1", ["default"], "prefork", 2, 0)
    store.workers.all()
    sweeps.begin_sweep(0, 1, 4.0)
    sweeps.first_due_between(DUE - timedelta(1), DUE + timedelta(1), 100)
    assert sweeps.levels(1)
    named = claims.claim([Entry(id, 0, to_us(DUE)) for id in (1, 2, 3)])
    assert len(named) == 3
    claims.unclaimed([1, 99])
    due = claims.claim_due("default", [0], 4)
    assert len(due) == 4
    store.leases.renew(["w1/1"], DUE)
    done, failed, climbed = named
    ends = [
        Settlement(done, "succeed", DUE, result="1"),
        Settlement(failed, "fail", DUE, "no"),
        Settlement(due[0], "give_back"),
    ]
    ends.append(Settlement(climbed, "schedule_retry", DUE, "again", DUE + timedelta(seconds=5)))
    assert len(claims.settle(ends)) == 4
    store.database.autocommitted(
        lambda c: c.execute(
            text(
                f"UPDATE {store.schema.tasks.name} SET lease_until = '2026-01-02 03:04:05' WHERE "
                "status = 3"
            )
        )
    )
    assert sweeps.recover(5, 100).total == 3
    assert claims.claim_recovered("default", [0])
    tasks.rerun(2, DUE)
    tasks.read(1)
    store.policies.read()
    store.workers.remove("w1")


@contextmanager
def tables(url: str) -> Iterator[Store]:
    """Tables of the newest migration."""
    database = Database(url)
    migrations.upgrade(database, PREFIX)
    # A prepared statement has the same text, but cannot be recorded.
    unprepared = replace(capabilities.POSTGRESQL, prepare=False)
    with patch.object(capabilities, "POSTGRESQL", unprepared):
        store = Store(url, settings_for(url, table_prefix=PREFIX))
    try:
        yield store
    finally:
        with database.begin() as connection:
            store.schema.metadata.drop_all(connection)
            connection.execute(text(f"DROP TABLE {migrations.version_table(PREFIX)}"))
        store.close()
        database.dispose()


def record(store: Store) -> list[dict[str, Any]]:
    statements: list[dict[str, Any]] = []

    def note(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> None:
        if statement.startswith("BEGIN"):
            return  # each statement is its own transaction when it is repeated
        counts = statement.lstrip().upper().startswith(COUNTED)
        statements.append(
            {
                "sql": statement,
                "with": _plain(parameters),
                "many": many,
                "met": cursor.rowcount if counts else None,
            }
        )

    engines = (store.database.auto, store.database.tx)
    for engine in engines:
        event.listen(engine, "after_cursor_execute", note)
    work(store)
    for engine in engines:
        event.remove(engine, "after_cursor_execute", note)
    return statements


def repeat(store: Store, statements: list[dict[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Repeat the statements. Yield each one with the recorded and the new row count."""
    raw = store.database.auto.raw_connection()
    try:
        for each in statements:
            cursor = raw.cursor()
            (cursor.executemany if each["many"] else cursor.execute)(
                each["sql"], _rich(each["with"])
            )
            yield each["sql"], each["met"], None if each["met"] is None else cursor.rowcount
            cursor.close()
    finally:
        raw.close()


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return {"instant": value.isoformat()}
    if isinstance(value, dict):
        return {"named": {name: _plain(each) for name, each in value.items()}}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        if "instant" in value:
            return datetime.fromisoformat(value["instant"])
        return {name: _rich(each) for name, each in value["named"].items()}
    return [_rich(each) for each in value] if isinstance(value, list) else value


def file_of(store: Store) -> Path:
    return RECORDS / f"{store.database.url.get_backend_name().replace('mysql', 'mariadb')}.json"


def test_statements_of_the_previous_release_work_on_the_newest_tables(database_url: str) -> None:
    with tables(database_url) as store:
        for sql, before, now in repeat(store, json.loads(file_of(store).read_text())):
            assert now == before, sql
        t = store.schema.tasks
        # This release continues with the rows that the previous one left.
        claimed = store.claims("new", None).claim_due("default", [0], 100)
        assert claimed
        assert store.claims("new", None).settle(
            [Settlement(task, "succeed", DUE) for task in claimed]
        )
        done = store.database.autocommitted(
            lambda c: c.execute(t.select().where(t.c.status == int(Status.DONE))).all()
        )
        assert len(done) == len(claimed) + 1


def test_each_insert_of_a_task_or_key_is_recorded(database_url: str) -> None:
    with tables(database_url) as store:
        recorded = [each["sql"].split()[:3] for each in record(store)]
        # Two tasks have the same key, and the second one replaces the first one in its row.
        assert recorded.count(["INSERT", "INTO", store.schema.tasks.name]) == 9
        assert ["INSERT", "INTO", store.schema.keys.name] in recorded


def test_a_column_that_the_previous_release_does_not_fill_is_noticed(database_url: str) -> None:
    """Prove that the test above can fail: it refuses a column that is removed too early."""
    with tables(database_url) as store:
        rename = f"ALTER TABLE {store.schema.tasks.name} RENAME COLUMN lapses TO failures"
        store.database.autocommitted(lambda c: c.execute(text(rename)))
        with pytest.raises(Exception, match="lapses"):
            list(repeat(store, json.loads(file_of(store).read_text())))


if __name__ == "__main__":
    import tempfile

    from tests.services import Services, own_database

    services = Services()
    with tempfile.TemporaryDirectory() as folder:
        urls = [f"sqlite:///{folder}/previous.sqlite3"]
        drops = []
        for name in ("postgresql", "mysql"):
            url, drop = own_database(services.url(name))
            urls.append(url)
            drops.append(drop)
        for url in urls:
            with tables(url) as store:
                file_of(store).write_text(json.dumps(record(store), indent=1) + "\n")
        for drop in drops:
            drop()
    services.close()
