"""The rows of delaytasks, read and made by the run. This is the only SQL of the benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, create_engine, exists, func, insert, select, text
from sqlalchemy.orm import Session, registry

from benchmarks.ours import TAG
from delaytasks import DelayTasks
from delaytasks.db import migrations
from delaytasks.db.statements import NEW_COLUMNS
from delaytasks.db.store import Store
from delaytasks.db.types import db_now
from delaytasks.model.moves import Status
from delaytasks.runtime import runtime_of
from delaytasks.settings import load_settings

T = TypeVar("T")
#: Rows per statement: many, but few enough that an interrupt takes effect soon.
FILL_STEP = 500_000
LIVE = [int(Status.NOT_COMPLETE), int(Status.RUNNING), int(Status.HELD)]


class Own:
    """A mapped class for the caller's rows; the ORM adds its constructor."""


class Rows:
    """The tables of one DelayTasks."""

    def __init__(self, delays: DelayTasks) -> None:
        self._delays = delays
        self._runtime = runtime_of(delays)
        self._database = self._runtime.store.database
        self.schema = self._runtime.store.schema
        self._t = self.schema.tasks

    def make(self) -> None:
        migrations.upgrade(self._database)

    def read(self, query: Any) -> Any:
        """Return the result of a query that may take minutes."""
        return self._run(lambda connection: connection.execute(query).all())

    def execute(self, statement: Any) -> None:
        self._run(lambda connection: connection.execute(statement))

    def _run(self, work: Callable[[Connection], T]) -> T:
        return self._database.repeat(work, self._database.auto.connect)

    def _scalar(self, query: Any) -> Any:
        return self._run(lambda connection: connection.execute(query).scalar_one())

    def count(self, status: Status | None = None) -> int:
        query = select(func.count()).select_from(self._t)
        if status is not None:
            query = query.where(self._t.c.status == int(status))
        return int(self._scalar(query))

    def has_unfinished_due(self) -> bool:
        """Return whether a due task is unfinished, by one index lookup."""
        is_due = self._t.c.expected_time <= db_now()
        return bool(self._scalar(select(exists().where(self._t.c.status.in_(LIVE), is_due))))

    def last_settled_at(self) -> float:
        is_done = self._t.c.status == int(Status.DONE)
        query = select(func.max(self._t.c.update_time)).where(is_done)
        return float(self._scalar(query).timestamp())

    def lateness_ms(self) -> list[float]:
        """Return how late each finished task was claimed, by the database's clock."""
        query = select(self._t.c.execution_time, self._t.c.expected_time)
        found = self.read(query.where(self._t.c.status == int(Status.DONE)))
        return [(began - due).total_seconds() * 1000 for began, due in found]

    def clear(self) -> None:
        """Delete all rows and reset the statistics, the hardest case for the planner."""
        tables = (self._t, self.schema.keys, self.schema.waitlists, self.schema.recurring)
        if self._database.can.copy:
            self.execute(text(f"TRUNCATE {', '.join(table.name for table in tables)}"))
        else:
            for table in tables:
                self.execute(table.delete())
        self.execute(self.schema.sweeps.delete())

    def fill(
        self,
        rows: int,
        status: Status,
        soonest_s: float,
        latest_s: float,
        is_keyed: bool = False,
        in_order: bool = False,
    ) -> None:
        """Add `rows` rows that are due between two times, in seconds from now; PostgreSQL only.

        The due times are random, or ascend with the ids, as if each task had the same delay. The
        ids are those of a producer that creates one per millisecond, and leases last longer than
        any benchmark. If requested, one row in ten has a key.
        """
        key = "CASE WHEN n % 10 = 0 THEN 'order-' || last || '-' || n END" if is_keyed else "NULL"
        began = "NULL" if status is Status.NOT_COMPLETE else "due"
        lease = "due + interval '30 days'" if status is Status.RUNNING else "NULL"
        place = "(:start + n)::float / :all" if in_order else "random()"
        statement = text(f"""
            INSERT INTO {self._t.name}
                (id, tag, message_body, status, version, delay_time, expected_time,
                 execution_time, create_time, update_time, lease_until, worker, task_key)
            SELECT (last >> 22) + n << 22 | n % 131072, '{TAG}',
                   '{{"due": 0.5, "order": ' || n || '}}', {status:d}, 1, 3600, due, {began},
                   due - interval '1 hour', coalesce({began}, now()), {lease}, 'w', {key}
            FROM (SELECT coalesce(max(id), 0) AS last FROM {self._t.name}) before,
                 (SELECT n, now() + (:soonest + {place} * :spread) * interval '1 second' AS due
                  FROM generate_series(1, :rows) n) made""").bindparams(
            soonest=soonest_s, spread=latest_s - soonest_s
        )
        for start in range(0, rows, FILL_STEP):
            where = {"start": start, "all": rows} if in_order else {}
            self.execute(statement.bindparams(rows=min(FILL_STEP, rows - start), **where))

    @contextmanager
    def indexed_at_the_end(self) -> Iterator[None]:
        """Create the indexes after the rows.

        If an index is larger than the cache, random due times are inserted at a few thousand rows
        per second. Sorting them once takes minutes instead of hours.
        """

        def drop(connection: Connection) -> None:
            for index in self._t.indexes:
                index.drop(connection)

        def create(connection: Connection) -> None:
            connection.execute(text("SET maintenance_work_mem = '1GB'"))
            for index in self._t.indexes:
                index.create(connection)
            connection.execute(text("RESET maintenance_work_mem"))

        self._run(drop)
        yield
        self._run(create)

    def take_keys(self) -> str:
        """Give each waiting task its key as owner, and return one of the keys."""
        keys, t = self.schema.keys, self._t
        waits = (t.c.status == int(Status.NOT_COMPLETE)) & t.c.task_key.is_not(None)
        chosen = select(t.c.tag, t.c.task_key, t.c.id).where(waits)
        self.execute(keys.insert().from_select(["tag", "task_key", "task_id"], chosen))
        self.execute(text(f"VACUUM (ANALYZE) {keys.name}"))
        return str(self._scalar(select(keys.c.task_key).limit(1)))

    def settle_down(self) -> None:
        """Do the work of autovacuum and the checkpointer now; PostgreSQL only.

        Otherwise it would begin in the middle of a measurement.
        """
        self.execute(text(f"VACUUM (ANALYZE) {self._t.name}"))
        self.execute(text("CHECKPOINT"))

    def sizes(self) -> list[tuple[str, int]]:
        """Return the sizes of the table and of each index in bytes; PostgreSQL only."""
        query = text(f"""
            SELECT relname, pg_relation_size(oid) FROM pg_class
            WHERE oid = to_regclass('{self._t.name}')
               OR oid IN (SELECT indexrelid FROM pg_index
                          WHERE indrelid = to_regclass('{self._t.name}'))
            ORDER BY relkind DESC, relname""")
        return [tuple(row) for row in self.read(query)]

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Yield a session of the caller on the caller's own engine."""
        engine = create_engine(self._database.url)
        try:
            with Session(engine) as caller:
                yield caller
        finally:
            engine.dispose()

    @contextmanager
    def own_inserts(self) -> Iterator[tuple[Session, dict[str, Callable[[], object]]]]:
        """Yield a caller's session and its own INSERTs into a table that equals ours."""
        columns = [self._t.c[name] for name in NEW_COLUMNS if name != "id"]
        row = dict(self.read(select(*columns).limit(1))[0]._mapping)
        ids = itertools.count(1)
        url = self._database.url.render_as_string(hide_password=False)
        store = Store(url, load_settings({}, {}, database_url=url, table_prefix="own_"))
        self._run(store.schema.metadata.create_all)
        statement, mapped = insert(store.schema.tasks), registry()
        make: Any = mapped.map_imperatively(Own, store.schema.tasks).class_
        with self.session() as caller:

            def by_orm() -> None:
                caller.add(make(**row, id=next(ids)))
                caller.flush()

            yield (
                caller,
                {
                    "Core": lambda: caller.execute(statement, {**row, "id": next(ids)}),
                    "the ORM": by_orm,
                },
            )
        mapped.dispose()
        store.close()
