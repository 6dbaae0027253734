"""Migrations during other work: programs of the previous release continue without errors, on each
database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text

from delaytasks.storage import migrations
from delaytasks.storage.database import Database
from tests.migration.tables import PREFIX, TASKS, drop_tables
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

FIRST = "0001"
ROWS = 20_000


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url)
    drop_tables(database, None)
    migrations.upgrade(database, PREFIX, revision=FIRST)
    batch = ", ".join(f"({n}, 'mail', '{{}}')" for n in range(1, ROWS + 1))
    database.autocommitted(
        lambda c: c.execute(text(f"INSERT INTO {TASKS} (id, tag, message_body) VALUES {batch}"))
    )
    yield database
    drop_tables(database, None)
    database.dispose()


class Load:
    """A producer and a worker of the first release, as the database sees them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_over = threading.Event()
        self.errors: list[Exception] = []
        self.longest_s = 0.0
        self.done = {"schedule": 0, "work": 0}
        self._ids = iter(range(10**9, 2 * 10**9))

    def schedule(self) -> None:
        values = {"id": next(self._ids)}
        self._say(
            "INSERT INTO {t} (id, tag, message_body, delay_time) VALUES (:id, 'mail', '{{}}', 60)",
            values,
        )

    def work(self) -> None:
        """The moves of one row, each fenced by its version."""
        id = self.done["work"] + 1
        for version, status, target in ((0, 0, 3), (1, 3, 1)):
            fence = {"id": id, "version": version, "status": status, "target": target}
            self._say(
                "UPDATE {t} SET status = :target, version = version + 1, update_time = "
                "CURRENT_TIMESTAMP "
                "WHERE id = :id AND version = :version AND status = :status",
                fence,
            )

    def _say(self, statement: str, values: dict[str, int]) -> None:
        began = time.monotonic()
        with self._database.begin() as connection:
            assert connection.execute(text(statement.format(t=TASKS)), values).rowcount == 1
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def repeat(self, what: Callable[[], None]) -> None:
        try:
            while not self._is_over.wait(0.002):
                what()
                self.done[what.__name__] += 1
        except Exception as error:
            self.errors.append(error)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self.repeat, args=(what,))
            for what in (self.schedule, self.work)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join(30)


def test_programs_that_work_during_a_migration_see_no_errors_and_no_long_locks(
    database: Database,
) -> None:
    load = Load(database)
    with load.going_on():
        wait_until(lambda: min(load.done.values()) > 10, 10, "the load to begin")
        migrations.upgrade(database, PREFIX)
        after = dict(load.done)
        wait_until(
            lambda: all(load.done[what] > after[what] + 10 for what in after) or load.errors,
            10,
            "it to go on",
        )
    assert load.errors == []
    # They wait behind a migration that waits for a lock and then holds it for a moment.
    assert load.longest_s < migrations.TABLE_LOCK_TIMEOUT_S
    assert migrations.current(database, PREFIX) == migrations.head()
    done = database.autocommitted(
        lambda c: c.execute(text(f"SELECT count(*) FROM {TASKS} WHERE status = 1")).scalar_one()
    )
    assert done == load.done["work"]
