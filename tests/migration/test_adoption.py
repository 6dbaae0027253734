"""The migrations on each database adopt an existing table."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import inspect, text

from delaytasks.core.errors import ConfigError
from delaytasks.core.filters import Filter, filter_of
from delaytasks.core.states import Status
from delaytasks.storage import migrations
from delaytasks.storage.database import Database
from tests.migration.tables import (
    FOREIGN,
    MISSION,
    PREFIX,
    ROWS,
    TASKS,
    UTC,
    claims_and_settles,
    insert_by_plain_sql,
    make_foreign,
    schema_differences,
    shape_of,
    store_of,
)


def test_an_existing_table_is_adopted_with_its_rows(database: Database) -> None:
    make_foreign(database)
    migrations.upgrade(database, PREFIX)
    with database.begin() as connection:
        assert connection.exec_driver_sql(f"SELECT DISTINCT note FROM {TASKS}").scalars().all() == [
            "mine"
        ]
        connection.exec_driver_sql(f"ALTER TABLE {TASKS} DROP COLUMN note")
    assert schema_differences(database, PREFIX, None) == []
    migrations.upgrade(database, "f_")
    assert shape_of(database, TASKS) == shape_of(database, "f_yb_delay_task_message")

    store = store_of(database)
    tasks = {task.id: task for task in store.tasks.find(Filter(), 10)}
    created = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert {id: task.create_time for id, task in tasks.items()} == dict.fromkeys(
        (1, 2, 3, 7), created
    )
    assert [(tasks[i].status, tasks[i].version, tasks[i].delay_s) for i in (1, 2, 3, 7)] == [
        (Status.NOT_COMPLETE, 0, 60),
        (Status.NOT_COMPLETE, 4, 0),
        (Status.DONE, 2, 10),
        (Status.RUNNING, 1, 10),
    ]
    assert tasks[1].expected_time == created + timedelta(seconds=60)
    assert tasks[2].expected_time == created + timedelta(seconds=1)
    assert all(task.body == {"n": 1} and task.update_time == created for task in tasks.values())
    # A row that ran before the adoption has no worker. It gets a lease, so that the sweep finds it.
    lease = tasks[7].lease_until
    assert lease is not None
    assert timedelta(seconds=50) < lease - store.tasks.now() <= timedelta(seconds=60)
    store.close()

    insert_by_plain_sql(database, "new")
    with database.begin() as connection:
        given = connection.execute(text(f"SELECT id FROM {TASKS} WHERE tag = 'new'")).scalar_one()
    assert given == (21 if database.url.get_backend_name() == "postgresql" else 8)
    assert claims_and_settles(database, "new")


@pytest.mark.parametrize("rows", [ROWS, []], ids=["with rows", "empty"])
def test_downgrade_leaves_an_adopted_table_to_its_owner(
    database: Database, rows: list[Any]
) -> None:
    make_foreign(database, rows)
    migrations.upgrade(database, PREFIX)
    migrations.downgrade(database, PREFIX, None, "base")
    with database.begin() as connection:
        assert connection.exec_driver_sql(f"SELECT count(*) FROM {TASKS}").scalar() == len(rows)
        assert {c["name"] for c in inspect(connection).get_columns(TASKS)} == {*MISSION, "note"}
    migrations.upgrade(database, PREFIX)
    with database.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {TASKS} DROP COLUMN note")
    assert schema_differences(database, PREFIX, None) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ("message_body", "body", "no column 'message_body'"),
        ("note text", "note text, must int NOT NULL", r"must is NOT NULL without a default"),
        (
            "tag (text|varchar.100.) NOT NULL",
            "tag varchar(200)",
            "1 row whose tag is NULL or longer than 128",
        ),
        (
            " PRIMARY KEY( AUTOINCREMENT)?(.*tag)",
            r" UNIQUE\2",
            r"primary key of .* is \(tag\); make it \(id\)",
        ),
    ],
)
def test_a_table_that_cannot_be_adopted_is_left_unchanged(
    database: Database, ours: str, theirs: str, message: str
) -> None:
    made = FOREIGN[database.url.get_backend_name()].format(t=TASKS, p=PREFIX)
    made = re.sub(ours, theirs, made)
    if "UNIQUE" in theirs:
        made = made.replace("note text", "note text, PRIMARY KEY (tag)")
    with database.begin() as connection:
        connection.exec_driver_sql(made)
        if "200" in theirs:
            connection.execute(text(f"INSERT INTO {TASKS} (tag) VALUES (:tag)"), {"tag": "x" * 129})
    before = shape_of(database, TASKS)
    with pytest.raises(ConfigError, match=message):
        migrations.upgrade(database, PREFIX)
    assert shape_of(database, TASKS) == before
    assert migrations.current(database, PREFIX) is None


def test_an_unknown_status_of_another_program_does_not_prevent_adoption(database: Database) -> None:
    make_foreign(database, [(1, 9, 0, 0, *["2026-01-02 03:04:05"] * 2)])
    migrations.upgrade(database, PREFIX)
    store = store_of(database)
    assert store.claims("w", None).claim_due("default", [0], 10) == []
    found = store.tasks.get(1)
    assert found is not None
    assert int(found.status) == 9
    store.close()


def test_times_that_were_written_in_iso_form_are_due_on_time_on_sqlite(
    sqlite_path: Callable[[], str],
) -> None:
    database = Database(sqlite_path())
    now = datetime.now(UTC)
    past, future = now - timedelta(minutes=1), now + timedelta(minutes=1)
    east = timezone(timedelta(hours=2))
    iso_times = [
        past.isoformat(),
        past.strftime("%Y-%m-%dT%H:%M:%SZ"),
        past.astimezone(east).isoformat(" "),
        future.isoformat(),
        future.strftime("%Y-%m-%dT%H:%M:%SZ"),
        future.astimezone(east).isoformat(" "),
    ]
    make_foreign(database, [(n, 0, 0, 0, *[time] * 2) for n, time in enumerate(iso_times, 1)])
    migrations.upgrade(database, PREFIX)
    store = store_of(database)
    assert sorted(task.id for task in store.claims("w", None).claim_due("default", [0], 10)) == [
        1,
        2,
        3,
    ]
    waiting = store.tasks.find(filter_of({"status": Status.NOT_COMPLETE}), 10).tasks
    assert {task.id for task in waiting} == {4, 5, 6}
    assert all(abs(task.expected_time - future) < timedelta(seconds=1.1) for task in waiting)
    store.close()
    database.dispose()
