"""Several databases for tests, and processes that see lists of different lengths of them."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import func, insert, select, update

from delaytasks import DelayTask, DelayTasks, Status
from delaytasks.core.filters import filter_of
from delaytasks.core.ids import home_of
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.storage import migrations
from delaytasks.storage.store import Store
from tests.conftest import empty, settings_for
from tests.recording import delays_on, record

TAG = "order.close"


class Several:
    """Migrated tables on each database, in the order of the list."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = list(urls)
        self.prefix = f"n{secrets.token_hex(3)}_"
        settings = settings_for(self.urls, table_prefix=self.prefix)
        self.stores = [Store(url, settings, number) for number, url in enumerate(self.urls)]
        for store in self.stores:
            migrations.upgrade(store.database, self.prefix, shard=store.shard)
        self._made: list[DelayTasks] = []

    def delays(self, shards: int | None = None, **settings: Any) -> DelayTasks:
        """Return the client of a process whose list has this number of shards."""
        made = delays_on(self.urls[:shards], table_prefix=self.prefix, **settings)
        record(made)
        self._made.append(made)
        return made

    def shard_of_row(self, id: int) -> list[int]:
        """Return the shards that have a row with this id."""
        return [store.shard for store in self.stores if store.tasks.get(id) is not None]

    def live(self, key: str) -> list[DelayTask]:
        """Return the live tasks with this key on all shards."""
        found = [
            task
            for store in self.stores
            for task in store.tasks.find(filter_of({"tag": TAG, "key": key}), 100)
        ]
        return [task for task in found if not task.is_finished]

    def insert_foreign(self, shard: int, id: int, tag: str = TAG) -> None:
        """Insert a row as another program does."""
        store = self.stores[shard]
        with store.database.begin() as connection:
            connection.execute(insert(store.schema.tasks).values(id=id, tag=tag, message_body="{}"))

    def set_status(self, task: DelayTask, status: Status) -> None:
        store = self.stores[task.shard]
        t = store.schema.tasks
        with store.database.begin() as connection:
            connection.execute(update(t).where(t.c.id == task.id).values(status=int(status)))

    def finish(self, task: DelayTask) -> None:
        """Finish the task as a worker does."""
        claims = self.stores[task.shard].claims("w", None)
        [claimed] = claims.claim([Entry.of(task)])
        assert claims.settle([Settlement(claimed, "succeed", claimed.expected_time)])

    def count(self, shard: int) -> int:
        store = self.stores[shard]
        with store.database.begin() as connection:
            return connection.execute(
                select(func.count()).select_from(store.schema.tasks)
            ).scalar_one()

    def empty(self) -> None:
        """Delete all rows, and close the connections of all clients."""
        while self._made:
            self._made.pop().close()
        for store in self.stores:
            numbers = store.schema.shards
            empty(store)
            with store.database.begin() as connection:
                connection.execute(insert(numbers).values(number=store.shard))

    def close(self) -> None:
        self.empty()
        for store in self.stores:
            migrations_table = migrations.version_table(self.prefix)
            with store.database.begin() as connection:
                store.schema.metadata.drop_all(connection)
                connection.exec_driver_sql(f"DROP TABLE {migrations_table}")
            store.close()


def keys_of(
    shard: int, shards: int, before: int | None = None, old_home: int | None = None
) -> Iterator[str]:
    """Return keys whose home is `shard` of `shards`, and was `old_home` of `before`."""
    for number in itertools.count():
        key = f"k{number}"
        if home_of(TAG, key, shards) == shard and (
            before is None or home_of(TAG, key, before) == old_home
        ):
            yield key
