"""A table with weekly partitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, insert, text

from delaytasks.core.ids import first_id
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.partitions import pruning
from delaytasks.partitions.conversion import convert
from delaytasks.partitions.pruning import Pruned
from delaytasks.partitions.table import Partitions
from delaytasks.storage.partition_bounds import CHECK
from delaytasks.storage.rows import values_of
from tests.conformance.store_rows import task
from tests.conftest import open_store
from tests.waiting import wait_until

WEEK, DAY = timedelta(days=7), timedelta(days=1)
PREFIX = "q_"
TASKS = PREFIX + "yb_delay_task_message"


def turns(partitions: Partitions, what: str, is_granted: bool) -> list[Any]:
    """Return `what` of each session that holds the partition lock, or waits for it."""
    query = f"""SELECT {what} FROM pg_locks WHERE locktype = 'advisory' AND granted = :is_granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND objid::bigint = hashtext(:name)::bigint & 4294967295"""
    with partitions.database.auto.connect() as connection:
        name = f"{partitions.tasks.fullname} {CHECK}"
        return list(
            connection.execute(text(query), {"name": name, "is_granted": is_granted}).scalars()
        )


def meet_others(partitions: Partitions, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the first change until `count` other sessions wait for the lock."""
    in_turn, calls = partitions.in_turn, itertools.count()

    def after_others_came(work: Callable[[Any], list[str]], *otherwise: str) -> list[str]:
        if next(calls) == 0:
            wait_until(
                lambda: len(turns(partitions, "pid", is_granted=False)) == count, 30, "the others"
            )
        return in_turn(work, *otherwise)

    monkeypatch.setattr(partitions, "in_turn", after_others_came)


class ConvertedTable:
    """A table that was converted ten weeks ago, with weekly partitions from the following week
    on."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url, table_prefix=PREFIX)
        self.partitions = Partitions(self.store.database, PREFIX)
        self.now = self.store.tasks.now()
        self.at(-10 * WEEK, lambda partitions: convert(partitions, WEEK, 14))
        self._count = 0

    def at(self, when: timedelta, work: Callable[[Partitions], Any]) -> Any:
        """Call `work` with a clock that is moved by `when`."""
        partitions = Partitions(self.store.database, PREFIX)
        partitions.now = lambda: self.now + when  # type: ignore[method-assign]
        return work(partitions)

    def put(
        self,
        age: timedelta,
        status: Status = Status.DONE,
        ended: timedelta | None = None,
        **row: Any,
    ) -> DelayTask:
        """Insert a row of the given age. It was due and last changed at that age, or at `ended`."""
        self._count += 1
        made = task(self.store, id=first_id(self.now - age) + self._count)
        touched = self.now - (age if ended is None else ended)
        values = {
            **values_of(made, self.store.schema),
            "status": int(status),
            "expected_time": touched,
            "update_time": touched,
            **row,
        }
        with self.store.database.begin() as connection:
            connection.execute(insert(self.store.schema.tasks).values(values))
        return replace(made, status=status, version=values["version"])

    def fill(self, count: int, when: datetime, status: Status) -> None:
        """Insert `count` rows that are due at `when`."""
        self.run(
            f"INSERT INTO {TASKS} (id, tag, message_body, status, expected_time, update_time) "
            f"SELECT {first_id(when) + 1000} + n, 'mail', '{{}}', {status:d}, '{when}', '{when}' "
            f"FROM generate_series(1, {count}) AS n"
        )

    def run(self, statement: str) -> list[Any]:
        with self.store.database.begin() as connection:
            result = connection.exec_driver_sql(statement)
            return list(result.all()) if result.returns_rows else []

    def rows(self) -> dict[int, tuple[str, Any]]:
        """Return the partition and all columns of each row."""
        found = self.run(f"SELECT tableoid::regclass::text AS place, * FROM {TASKS} ORDER BY id")
        return {row.id: (row.place.removeprefix(TASKS), row[1:]) for row in found}

    def places(self) -> list[str]:
        return [place for place, _ in self.rows().values()]

    def names(self) -> list[str]:
        return [part.name.removeprefix(TASKS) for part in self.partitions.all()]

    def drop(self, older_than: timedelta = 4 * WEEK, **options: Any) -> list[Pruned]:
        return list(pruning.prune(self.partitions, older_than, **options))

    @contextmanager
    def upon(self, words: str, one: DelayTask, work: Callable[[], object]) -> Iterator[None]:
        """Call `work` once, after the first statement that contains `words` and the partition of
        `one`."""
        place = self.rows()[one.id][0]

        def look(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if words in statement and TASKS + place in statement and not done:
                done.append(True)
                work()

        done: list[bool] = []
        engines = (self.store.database.auto, self.store.database.tx)
        for engine in engines:
            event.listen(engine, "after_cursor_execute", look)
        yield
        for engine in engines:
            event.remove(engine, "after_cursor_execute", look)
        assert done

    def close(self) -> None:
        for name in self.run(f"SELECT tablename FROM pg_tables WHERE tablename ~ '^{TASKS}_'"):
            self.run(f"DROP TABLE {name[0]}")
        with self.store.database.begin() as connection:
            self.store.schema.metadata.drop_all(connection)
        self.store.close()
