"""A task table becomes a partitioned one: nothing is lost of what it was, and nobody is stopped."""

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
from tests.conformance.test_partitions import meet_others
from tests.conformance.test_store import add, task
from tests.conftest import settings_for
from tests.counting import counted
from tests.migration.test_migrations import _differences, _insert_by_plain_sql, _shape
from tests.waiting import wait_until

WEEK = timedelta(days=7)
#: The tests of the migrations have this one.
PREFIX = "m_"
TASKS = PREFIX + "yb_delay_task_message"


class DatabaseAddress:
    """Migrated tables, and what is done to them."""

    def __init__(self, url: str, prefix: str = PREFIX, schema: str = "") -> None:
        self.store = Store(url, settings_for(url, table_prefix=prefix, table_schema=schema))
        self.prefix, self.schema = prefix, schema or None
        self.drop()
        migrations.upgrade(self.store.database, prefix, self.schema)
        self.partitions = Partitions(self.store.database, prefix, self.schema)

    def run(self, *statements: str) -> list[Any]:
        """The rows of the last one, if it has any."""
        with self.store.database.begin() as connection:
            for statement in statements:
                result = connection.execute(text(statement))
            return list(result.all()) if result.returns_rows else []

    def convert(self) -> list[str]:
        return convert(self.partitions, WEEK, 4)

    def differences(self) -> list[Any]:
        return _differences(self.store.database, self.prefix, self.schema)

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
def place(postgresql_url: str) -> Iterator[DatabaseAddress]:
    made = DatabaseAddress(postgresql_url)
    yield made
    made.drop()
    made.store.close()


# -- what stays -----------------------------------------------------------------------------------


def test_a_table_in_partitions_is_still_the_one_that_the_migrations_make(
    place: DatabaseAddress,
) -> None:
    _insert_by_plain_sql(place.store.database, "old")
    before = _shape(place.store.database, TASKS)
    storage, _ = before.pop("storage"), before.pop("option postgresql_with")
    made = place.convert()
    assert len(made) == 1 + 3 + 1
    assert place.differences() == []
    after = _shape(place.store.database, TASKS)
    assert after.pop("storage") is None  # it holds nothing itself
    assert after == before
    for name in made:
        assert _shape(place.store.database, name)["storage"] == storage
    assert place.store.check() is None  # type: ignore[func-returns-value]


def test_ids_that_the_database_makes_count_on(place: DatabaseAddress) -> None:
    for _ in range(3):
        _insert_by_plain_sql(place.store.database, "old")
    place.convert()
    _insert_by_plain_sql(place.store.database, "new")
    assert place.run(f"SELECT id, tag FROM {TASKS} ORDER BY id")[-1] == (4, "new")
    assert place.claims_and_settles() == 4


def test_a_table_without_rows_can_be_converted_and_counts_from_one(place: DatabaseAddress) -> None:
    place.convert()
    _insert_by_plain_sql(place.store.database, "new")
    assert place.run(f"SELECT id FROM {TASKS}") == [(1,)]


def test_whoever_may_use_the_table_still_may(place: DatabaseAddress) -> None:
    owner, reader = f"{PREFIX}owner_of_test", f'{PREFIX}reader "of" test'
    quoted = '"' + reader.replace('"', '""') + '"'
    query = (
        "SELECT grantee, privilege_type, is_grantable, column_name FROM information_schema.column_privileges "
        f"WHERE table_name = '{TASKS}' ORDER BY 1, 2, 3, 4"
    )
    place.run(f"CREATE ROLE {owner}", f"CREATE ROLE {quoted}")
    try:
        place.run(
            f"GRANT CREATE, USAGE ON SCHEMA public TO {owner}",
            f"ALTER TABLE {TASKS} OWNER TO {owner}",
            f"GRANT SELECT ON {TASKS} TO PUBLIC",
            f"GRANT INSERT ON {TASKS} TO {quoted} WITH GRANT OPTION",
            f"GRANT UPDATE (status) ON {TASKS} TO {quoted}",
        )
        before = place.run(query)
        place.convert()
        place.partitions.extend(WEEK, 6)
        assert place.run(query) == before
        assert any(row[0] == reader for row in before)
        owners = place.run(
            f"SELECT DISTINCT tableowner FROM pg_tables WHERE tablename LIKE '{TASKS}%'"
        )
        assert owners == [(owner,)]
    finally:
        place.run(
            f"DROP TABLE {TASKS}",
            f"DROP OWNED BY {owner}, {quoted}",
            f"DROP ROLE {owner}, {quoted}",
        )


def test_a_later_migration_reaches_all_partitions(place: DatabaseAddress) -> None:
    add(place.store)
    place.convert()
    place.run(
        f"ALTER TABLE {TASKS} ADD COLUMN more integer NOT NULL DEFAULT 7",
        f"CREATE INDEX {PREFIX}more ON {TASKS} (more)",
        f"ALTER TABLE {TASKS} ALTER more TYPE bigint",
    )
    assert place.partitions.extend(WEEK, 6)
    now = place.store.tasks.now()
    for days in (20, 40, 1000):  # a partition from before, one from after, and the default one
        add(place.store, id=first_id(now + timedelta(days=days)))
    assert place.run(f"SELECT count(*), min(more), max(more) FROM {TASKS}") == [(4, 7, 7)]
    assert place.claims_and_settles() == 4


def test_migrations_go_down_and_up_again_on_a_table_in_partitions(place: DatabaseAddress) -> None:
    _insert_by_plain_sql(place.store.database, "precious")
    place.convert()
    migrations.upgrade(place.store.database, PREFIX)
    migrations.downgrade(place.store.database, PREFIX)
    assert place.run(f"SELECT tag FROM {TASKS}") == [("precious",)]
    migrations.upgrade(place.store.database, PREFIX)
    assert place.differences() == []
    assert place.claims_and_settles() == 1


def test_names_that_must_be_quoted_are(postgresql_url: str) -> None:
    place = DatabaseAddress(postgresql_url, "Odd_", "Order")
    add(place.store)
    assert place.convert()[0] == "Odd_yb_delay_task_message_first"
    assert place.partitions.extend(WEEK, 5)
    assert place.differences() == []
    assert place.partitions.live() == {"Odd_yb_delay_task_message_first": 1}
    assert place.claims_and_settles() == 1
    place.drop()
    place.run('DROP SCHEMA "Order" CASCADE')
    place.store.close()


# -- what keeps it from being done ----------------------------------------------------------------


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
            "CREATE TRIGGER m_t AFTER UPDATE ON {t} EXECUTE FUNCTION tsvector_update_trigger(a, b, c)",
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
def test_what_would_stay_behind_with_the_old_table_is_named(
    place: DatabaseAddress, made: str, named: str, dropped: str
) -> None:
    place.run(made.format(t=TASKS))
    with pytest.raises(ConfigError, match=f"cannot be partitioned because of: {named}. Drop"):
        place.convert()
    place.run(dropped.format(t=TASKS))
    assert place.differences() == []
    place.convert()


def test_ids_that_are_not_in_the_order_of_time_are_refused(place: DatabaseAddress) -> None:
    add(place.store, id=2**62)
    with pytest.raises(ConfigError, match=r"1 ids that are not in the order of time"):
        place.convert()
    assert place.differences() == []


def test_of_two_who_convert_at_once_the_second_is_told(
    place: DatabaseAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet_others(place.partitions, 1, monkeypatch)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(place.convert) for _ in range(2)]
    [error] = filter(None, (one.exception() for one in both))
    assert isinstance(error, ConfigError)
    assert "is partitioned already" in str(error)
    assert place.partitions.extend(WEEK, 4) == []


def test_steps_whose_answers_are_lost_are_done_once(
    place: DatabaseAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turn = place.partitions.in_turn

    def twice(work: Callable[[Any], Any], *otherwise: str) -> Any:
        first = in_turn(work, *otherwise)
        assert in_turn(work, *otherwise) == first
        return first

    monkeypatch.setattr(place.partitions, "in_turn", twice)
    made = place.convert()
    more = place.partitions.extend(WEEK, 6)
    assert [part.name for part in place.partitions.all()] == [*made[:-1], *more, made[-1]]
    assert place.differences() == []


def test_what_is_done_already_or_can_not_be_is_said(place: DatabaseAddress) -> None:
    with pytest.raises(
        ConfigError, match="is not partitioned; run: delaytasks db partitions convert"
    ):
        place.partitions.all()
    place.convert()
    with pytest.raises(
        ConfigError, match="is partitioned already; run: delaytasks db partitions maintain"
    ):
        place.convert()
    place.run(f"DROP TABLE {TASKS}")
    with pytest.raises(ConfigError, match="does not exist; run: delaytasks db upgrade"):
        place.convert()
    place.run(f"CREATE TABLE {TASKS} (id bigint, status int) PARTITION BY HASH (id)")
    with pytest.raises(ConfigError, match=r"partitioned by HASH \(id\)"):
        place.partitions.extend(WEEK, 4)


# -- beside everybody's work ----------------------------------------------------------------------


def test_producers_and_workers_go_on_while_a_table_is_converted_and_partitions_are_made(
    place: DatabaseAddress,
) -> None:
    store, stop, make_id = place.store, threading.Event(), IdMaker(wall_ms)
    scheduled, done = Counter[str](), Counter[str]()

    def schedule(name: str) -> None:
        while not stop.is_set():
            one = task(store, id=make_id(), key=f"{name}-{scheduled[name]}")
            store.tasks.insert_keyed(one, "reject")
            scheduled[name] += 1

    def work(name: str) -> None:
        while not stop.is_set():
            done[name] += place.claims_and_settles()

    with ThreadPoolExecutor() as pool:
        threads = [
            pool.submit(each, f"{each.__name__}-{n}") for each in (schedule, work) for n in range(2)
        ]
        try:
            for step in (
                place.convert,
                *(partial(place.partitions.extend, WEEK, ahead) for ahead in (5, 6, 7)),
            ):
                before = done.total()
                wait_until(lambda: done.total() > before + 20, 20, "tasks to be done")  # noqa: B023
                assert step()
        finally:
            stop.set()
    assert [thread.exception() for thread in threads] == [None] * 4
    done["afterwards"] = place.claims_and_settles()
    assert done.total() == scheduled.total() == counted(store)[Status.DONE]
    assert place.run(f"SELECT count(*) FROM {PREFIX}yb_delay_task_key") == [(0,)]


def test_nothing_is_read_while_everybody_waits(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What ATTACH would read a table for is known from the constraint; the server says so."""
    caplog.set_level("INFO", "sqlalchemy.dialects.postgresql")
    place = DatabaseAddress(postgresql_url + "?options=-c%20client_min_messages%3Ddebug1")
    place.convert()
    place.partitions.extend(WEEK, 6)
    implied = "constraint for {} is implied by existing constraints"
    assert caplog.text.count(implied.format(f'table "{TASKS}_first"')) == 1
    assert caplog.text.count(implied.format(f'default partition "{TASKS}_default"')) == 2
    place.drop()
    place.store.close()


def test_a_long_transaction_is_not_waited_for(
    place: DatabaseAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "TABLE_LOCK_TIMEOUT_S", 0.05)
    with place.store.database.begin() as connection:
        connection.execute(text(f"SELECT 1 FROM {TASKS}"))
        with pytest.raises(
            StoreUnavailableError,
            match=r"lock timeout.*; nothing was changed. Run this again; .*pg_stat",
        ):
            place.convert()
    assert place.run(f"SELECT conname FROM pg_constraint WHERE conname = '{CHECK}'") == []
    assert place.differences() == []
    place.convert()
    with place.store.database.begin() as connection:
        place.store.tasks.insert(task(place.store), connection)
        assert place.partitions.extend(WEEK, 5)  # waits for nobody who only schedules


def test_a_conversion_that_fails_leaves_nothing_behind(place: DatabaseAddress) -> None:
    place.run(f"CREATE TABLE {TASKS}_default ()")
    with pytest.raises(StoreError, match=r"_default.* already exists"):
        place.convert()
    assert place.run(f"SELECT conname FROM pg_constraint WHERE conname = '{CHECK}'") == []
    assert place.differences() == []
    place.run(f"DROP TABLE {TASKS}_default")
    place.convert()


def test_what_a_conversion_could_not_take_away_is_named(
    place: DatabaseAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "TABLE_LOCK_TIMEOUT_S", 0.05)
    database = place.store.database
    with database.tx.connect() as reader:

        def read(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if "VALIDATE" in statement:
                reader.execute(text(f"SELECT 1 FROM {TASKS}"))

        event.listen(database.auto, "after_cursor_execute", read)
        with pytest.raises(
            StoreUnavailableError,
            match=f"the constraint {CHECK} is still on {TASKS} and will refuse",
        ):
            place.convert()
        event.remove(database.auto, "after_cursor_execute", read)
    place.convert()


def test_a_conversion_that_was_broken_off_is_told_of_and_can_be_done_again(
    place: DatabaseAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.store.sweeps.partitions_end() is None
    left = place.partitions.known(TASKS, f"id < {first_id(place.store.tasks.now())}")
    left.__enter__()  # and is killed
    end = place.store.sweeps.partitions_end()
    assert end is not None
    assert abs(end - place.store.tasks.now()) < timedelta(minutes=1)
    place.convert()
    assert place.run(f"SELECT conname FROM pg_constraint WHERE conname = '{CHECK}'") == []
