"""The conversion of a task table to partitions: it keeps all properties, and blocks no other
program.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import MetaData, Table, event, text

from delaytasks.core.clock import wall_ms
from delaytasks.core.errors import ConfigError, StoreError, StoreUnavailableError
from delaytasks.core.ids import IdMaker, first_id
from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import Status
from delaytasks.partitions.conversion import convert
from delaytasks.partitions.table import Partitions
from delaytasks.storage import migrations
from delaytasks.storage.partition_bounds import CHECK
from delaytasks.storage.store import Store
from tests.conformance.partitions.converted_table import meet_others
from tests.conformance.store_rows import add, task
from tests.conftest import settings_for
from tests.counting import counted
from tests.migration.tables import insert_by_plain_sql, schema_differences, shape_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

WEEK = timedelta(days=7)
#: The prefix of the tests of migrations.
PREFIX = "m_"
TASKS = PREFIX + "yb_delay_task_message"


class MigratedTables:
    """Migrated tables, and operations on them."""

    def __init__(self, url: str, prefix: str = PREFIX, schema: str = "") -> None:
        self.store = Store(url, settings_for(url, table_prefix=prefix, table_schema=schema))
        self.prefix, self.schema = prefix, schema or None
        self.drop()
        migrations.upgrade(self.store.database, prefix, self.schema)
        self.partitions = Partitions(self.store.database, prefix, self.schema)

    def run(self, *statements: str) -> list[Any]:
        """Run the statements, and return the rows of the last one, if any."""
        with self.store.database.begin() as connection:
            for statement in statements:
                result = connection.execute(text(statement))
            return list(result.all()) if result.returns_rows else []

    def convert(self) -> list[str]:
        return convert(self.partitions, WEEK, 4)

    def differences(self) -> list[Any]:
        return schema_differences(self.store.database, self.prefix, self.schema)

    def drop(self) -> None:
        with self.store.database.begin() as connection:
            self.store.schema.metadata.drop_all(connection)
            version = Table(migrations.version_table(self.prefix), MetaData(), schema=self.schema)
            version.drop(connection, checkfirst=True)

    def claims_and_settles(self) -> int:
        claims = self.store.claims("w", None)
        claimed = claims.claim_due("default", [0], 100)
        assert claims.settle([Settlement(one, "succeed") for one in claimed]) == {
            one.id for one in claimed
        }
        return len(claimed)


@pytest.fixture
def tables(postgresql_url: str) -> Iterator[MigratedTables]:
    made = MigratedTables(postgresql_url)
    yield made
    made.drop()
    made.store.close()


# -- what stays -----------------------------------------------------------------------------------


def test_a_partitioned_table_has_the_schema_of_the_migrations(
    tables: MigratedTables,
) -> None:
    insert_by_plain_sql(tables.store.database, "old")
    before = shape_of(tables.store.database, TASKS)
    storage, _ = before.pop("storage"), before.pop("option postgresql_with")
    made = tables.convert()
    assert len(made) == 1 + 3 + 1
    assert tables.differences() == []
    after = shape_of(tables.store.database, TASKS)
    assert after.pop("storage") is None  # the partitioned table itself stores no rows
    assert after == before
    for name in made:
        assert shape_of(tables.store.database, name)["storage"] == storage
    assert tables.store.check() is None  # type: ignore[func-returns-value]


def test_ids_that_the_database_generates_continue(tables: MigratedTables) -> None:
    for _ in range(3):
        insert_by_plain_sql(tables.store.database, "old")
    tables.convert()
    insert_by_plain_sql(tables.store.database, "new")
    assert tables.run(f"SELECT id, tag FROM {TASKS} ORDER BY id")[-1] == (4, "new")
    assert tables.claims_and_settles() == 4


def test_a_table_without_rows_can_be_converted_and_counts_from_one(tables: MigratedTables) -> None:
    tables.convert()
    insert_by_plain_sql(tables.store.database, "new")
    assert tables.run(f"SELECT id FROM {TASKS}") == [(1,)]


def test_privileges_on_the_table_are_kept(tables: MigratedTables) -> None:
    owner, reader = f"{PREFIX}owner_of_test", f'{PREFIX}reader "of" test'
    quoted = '"' + reader.replace('"', '""') + '"'
    query = (
        "SELECT grantee, privilege_type, is_grantable, column_name FROM "
        "information_schema.column_privileges "
        f"WHERE table_name = '{TASKS}' ORDER BY 1, 2, 3, 4"
    )
    tables.run(f"CREATE ROLE {owner}", f"CREATE ROLE {quoted}")
    try:
        tables.run(
            f"GRANT CREATE, USAGE ON SCHEMA public TO {owner}",
            f"ALTER TABLE {TASKS} OWNER TO {owner}",
            f"GRANT SELECT ON {TASKS} TO PUBLIC",
            f"GRANT INSERT ON {TASKS} TO {quoted} WITH GRANT OPTION",
            f"GRANT UPDATE (status) ON {TASKS} TO {quoted}",
        )
        before = tables.run(query)
        tables.convert()
        tables.partitions.extend(WEEK, 6)
        assert tables.run(query) == before
        assert any(row[0] == reader for row in before)
        owners = tables.run(
            f"SELECT DISTINCT tableowner FROM pg_tables WHERE tablename LIKE '{TASKS}%'"
        )
        assert owners == [(owner,)]
    finally:
        tables.run(
            f"DROP TABLE {TASKS}",
            f"DROP OWNED BY {owner}, {quoted}",
            f"DROP ROLE {owner}, {quoted}",
        )


def test_a_later_migration_changes_all_partitions(tables: MigratedTables) -> None:
    add(tables.store)
    tables.convert()
    tables.run(
        f"ALTER TABLE {TASKS} ADD COLUMN more integer NOT NULL DEFAULT 7",
        f"CREATE INDEX {PREFIX}more ON {TASKS} (more)",
        f"ALTER TABLE {TASKS} ALTER more TYPE bigint",
    )
    assert tables.partitions.extend(WEEK, 6)
    now = tables.store.tasks.now()
    for days in (20, 40, 1000):  # an older partition, a new one, and the default one
        add(tables.store, id=first_id(now + timedelta(days=days)))
    assert tables.run(f"SELECT count(*), min(more), max(more) FROM {TASKS}") == [(4, 7, 7)]
    assert tables.claims_and_settles() == 4


def test_downgrade_and_upgrade_work_on_a_partitioned_table(tables: MigratedTables) -> None:
    insert_by_plain_sql(tables.store.database, "precious")
    tables.convert()
    migrations.upgrade(tables.store.database, PREFIX)
    migrations.downgrade(tables.store.database, PREFIX)
    assert tables.run(f"SELECT tag FROM {TASKS}") == [("precious",)]
    migrations.upgrade(tables.store.database, PREFIX)
    assert tables.differences() == []
    assert tables.claims_and_settles() == 1


def test_names_are_quoted_if_necessary(postgresql_url: str) -> None:
    tables = MigratedTables(postgresql_url, "Odd_", "Order")
    add(tables.store)
    assert tables.convert()[0] == "Odd_yb_delay_task_message_first"
    assert tables.partitions.extend(WEEK, 5)
    assert tables.differences() == []
    assert tables.partitions.live() == {"Odd_yb_delay_task_message_first": 1}
    assert tables.claims_and_settles() == 1
    tables.drop()
    tables.run('DROP SCHEMA "Order" CASCADE')
    tables.store.close()


# -- refused conversions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "named", "dropped"),
    [
        ("CREATE VIEW m_v AS SELECT id FROM {t}", "view m_v", "DROP VIEW m_v"),
        ("CREATE UNIQUE INDEX m_u ON {t} (task_key)", "unique index m_u", "DROP INDEX m_u"),
        (
            "CREATE TABLE m_f (id bigint REFERENCES {t})",
            "foreign key m_f_id_fkey of m_f",
            "DROP TABLE m_f",
        ),
        ("CREATE POLICY m_p ON {t}", "policy m_p", "DROP POLICY m_p ON {t}"),
        ("CREATE PUBLICATION m_pub FOR TABLE {t}", "publication m_pub", "DROP PUBLICATION m_pub"),
        ("CREATE TABLE m_c () INHERITS ({t})", "inheritance of m_c", "DROP TABLE m_c"),
        (
            "CREATE TRIGGER m_t AFTER UPDATE ON {t} EXECUTE FUNCTION tsvector_update_trigger(a, "
            "b, c)",
            "trigger m_t",
            "DROP TRIGGER m_t ON {t}",
        ),
        (
            "ALTER TABLE {t} ALTER id DROP IDENTITY",
            "id without identity",
            "ALTER TABLE {t} ALTER id ADD GENERATED BY DEFAULT AS IDENTITY",
        ),
    ],
)
def test_properties_that_a_conversion_would_lose_are_named(
    tables: MigratedTables, made: str, named: str, dropped: str
) -> None:
    tables.run(made.format(t=TASKS))
    with pytest.raises(ConfigError, match=f"cannot be partitioned because of: {named}. Drop"):
        tables.convert()
    tables.run(dropped.format(t=TASKS))
    assert tables.differences() == []
    tables.convert()


def test_ids_that_do_not_ascend_with_time_are_refused(tables: MigratedTables) -> None:
    add(tables.store, id=2**62)
    with pytest.raises(ConfigError, match=r"1 id outside of the order of time"):
        tables.convert()
    assert tables.differences() == []


def test_the_second_of_two_simultaneous_conversions_is_refused(
    tables: MigratedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet_others(tables.partitions, 1, monkeypatch)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(tables.convert) for _ in range(2)]
    [error] = filter(None, (one.exception() for one in both))
    assert isinstance(error, ConfigError)
    assert "is partitioned already" in str(error)
    assert tables.partitions.extend(WEEK, 4) == []


def test_steps_whose_replies_are_lost_are_done_once(
    tables: MigratedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turn = tables.partitions.in_turn

    def twice(work: Callable[[Any], Any], *otherwise: str) -> Any:
        first = in_turn(work, *otherwise)
        assert in_turn(work, *otherwise) == first
        return first

    monkeypatch.setattr(tables.partitions, "in_turn", twice)
    made = tables.convert()
    more = tables.partitions.extend(WEEK, 6)
    assert [part.name for part in tables.partitions.all()] == [*made[:-1], *more, made[-1]]
    assert tables.differences() == []


def test_a_finished_or_impossible_conversion_is_reported(tables: MigratedTables) -> None:
    with pytest.raises(
        ConfigError, match="is not partitioned; run: delaytasks db partitions convert"
    ):
        tables.partitions.all()
    tables.convert()
    with pytest.raises(
        ConfigError, match="is partitioned already; run: delaytasks db partitions maintain"
    ):
        tables.convert()
    tables.run(f"DROP TABLE {TASKS}")
    with pytest.raises(ConfigError, match="does not exist; run: delaytasks -A APP db upgrade"):
        tables.convert()
    tables.run(f"CREATE TABLE {TASKS} (id bigint, status int) PARTITION BY HASH (id)")
    with pytest.raises(ConfigError, match=r"partitioned by HASH \(id\)"):
        tables.partitions.extend(WEEK, 4)


# -- during other work ------------------------------------------------------------------------


def test_producers_and_workers_continue_during_a_conversion_and_while_partitions_are_created(
    tables: MigratedTables,
) -> None:
    store, stop, make_id = tables.store, threading.Event(), IdMaker(wall_ms)
    scheduled, done = Counter[str](), Counter[str]()

    def schedule(name: str) -> None:
        while not stop.is_set():
            one = task(store, id=make_id(), key=f"{name}-{scheduled[name]}")
            store.tasks.insert_keyed(one, "reject")
            scheduled[name] += 1

    def work(name: str) -> None:
        while not stop.is_set():
            done[name] += tables.claims_and_settles()

    with ThreadPoolExecutor() as pool:
        threads = [
            pool.submit(each, f"{each.__name__}-{n}") for each in (schedule, work) for n in range(2)
        ]
        try:
            steps: list[Callable[[], object]] = [tables.convert]
            steps += [partial(tables.partitions.extend, WEEK, ahead) for ahead in (5, 6, 7)]
            for step in steps:
                before = done.total()
                wait_until(lambda: done.total() > before + 20, 20, "tasks to be done")  # noqa: B023
                assert step()
        finally:
            stop.set()
    assert [thread.exception() for thread in threads] == [None] * 4
    done["afterwards"] = tables.claims_and_settles()
    assert done.total() == scheduled.total() == counted(store)[Status.DONE]
    assert tables.run(f"SELECT count(*) FROM {PREFIX}yb_delay_task_key") == [(0,)]


def test_no_rows_are_read_under_the_exclusive_lock(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """ATTACH reads no rows, since the constraint proves their range. The server logs that."""
    caplog.set_level("INFO", "sqlalchemy.dialects.postgresql")
    tables = MigratedTables(postgresql_url + "?options=-c%20client_min_messages%3Ddebug1")
    tables.convert()
    tables.partitions.extend(WEEK, 6)
    implied = "constraint for {} is implied by existing constraints"
    assert caplog.text.count(implied.format(f'table "{TASKS}_first"')) == 1
    assert caplog.text.count(implied.format(f'default partition "{TASKS}_default"')) == 2
    tables.drop()
    tables.store.close()


def test_a_conversion_does_not_wait_for_a_long_transaction(
    tables: MigratedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "TABLE_LOCK_TIMEOUT_S", 0.05)
    with tables.store.database.begin() as connection:
        connection.execute(text(f"SELECT 1 FROM {TASKS}"))
        with pytest.raises(
            StoreUnavailableError,
            match=r"lock timeout.*; nothing was changed. Run this again; .*pg_stat",
        ):
            tables.convert()
    assert tables.run(f"SELECT conname FROM pg_constraint WHERE conname = '{CHECK}'") == []
    assert tables.differences() == []
    tables.convert()
    with tables.store.database.begin() as connection:
        tables.store.tasks.insert(task(tables.store), connection)
        assert tables.partitions.extend(WEEK, 5)  # schedulers do not block it


def test_a_failed_conversion_leaves_no_changes(tables: MigratedTables) -> None:
    tables.run(f"CREATE TABLE {TASKS}_default ()")
    with pytest.raises(StoreError, match=r"_default.* already exists"):
        tables.convert()
    assert tables.run(f"SELECT conname FROM pg_constraint WHERE conname = '{CHECK}'") == []
    assert tables.differences() == []
    tables.run(f"DROP TABLE {TASKS}_default")
    tables.convert()


def test_leftovers_that_a_conversion_could_not_remove_are_named(
    tables: MigratedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "TABLE_LOCK_TIMEOUT_S", 0.05)
    database = tables.store.database
    with database.tx.connect() as reader:

        def read(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "VALIDATE" in statement:
                reader.execute(text(f"SELECT 1 FROM {TASKS}"))

        event.listen(database.auto, "after_cursor_execute", read)
        with pytest.raises(
            StoreUnavailableError,
            match=f"the constraint {CHECK} is still on {TASKS} and will refuse",
        ):
            tables.convert()
        event.remove(database.auto, "after_cursor_execute", read)
    tables.convert()


def test_an_interrupted_conversion_is_reported_and_can_be_repeated(
    tables: MigratedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tables.store.sweeps.partitions_end() is None
    left = tables.partitions.known(TASKS, f"id < {first_id(tables.store.tasks.now())}")
    left.__enter__()  # and the process is killed
    end = tables.store.sweeps.partitions_end()
    assert end is not None
    assert abs(end - tables.store.tasks.now()) < timedelta(minutes=1)
    tables.convert()
    assert tables.run(f"SELECT conname FROM pg_constraint WHERE conname = '{CHECK}'") == []
