"""The task table in partitions, on PostgreSQL: a whole partition of old tasks is dropped, not
single rows.

Ids are in the order of time, so a range of ids is a period. The default partition has all other
rows: tasks that outlived their partition, and ids that other programs made. Each step locks the
table only for a moment, and gives up soon if it cannot. Then it can be tried again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from typing import NamedTuple, TypeVar

from sqlalchemy import Connection, MetaData, Table, exc, exists, select, text

from delaytasks.core.errors import ConfigError, StoreUnavailableError
from delaytasks.core.ids import first_id, made_at
from delaytasks.partitions.periods import Period, edge_after, periods
from delaytasks.storage.database import Database
from delaytasks.storage.migrations import exclusively, wait_for_turn
from delaytasks.storage.partition_bounds import CHECK
from delaytasks.storage.schema import build_schema
from delaytasks.storage.task_table import HOT, STORAGE

T = TypeVar("T")
#: Older servers search all partitions for the rows of an UPDATE.
OLDEST_SERVER = 14
#: A bound on the differences between the producers' clocks, which make the ids.
CLOCKS_DIFFER = timedelta(hours=1)
#: Suffixes of partition names.
FIRST, DEFAULT = "_first", "_default"


class Partition(NamedTuple):
    """A table of the tasks with ids from `low` to below `high`, or the default partition."""

    name: str
    low: int | None
    high: int | None
    is_default: bool
    #: The planner's estimate; None before the first ANALYZE.
    rows: int | None
    bytes: int

    @property
    def since(self) -> datetime | None:
        return None if self.low is None else made_at(self.low)

    @property
    def until(self) -> datetime | None:
        return None if self.high is None else made_at(self.high)


class Partitions:
    def __init__(self, database: Database, prefix: str = "", schema: str | None = None) -> None:
        if not database.can.partitions:
            raise ConfigError(
                f"partitions need PostgreSQL, and this is {database.backend}: "
                "let the sweep delete old tasks instead (delaytasks_purge_after_s)"
            )
        self.database = database
        self._names = prefix, schema or None
        self.schema = build_schema(*self._names)
        self.tasks = self.schema.tasks

    # -- look -------------------------------------------------------------------------------------

    def all(self) -> list[Partition]:
        """Return the partitions in the order of their ids, the default one last."""
        self.check("p", "is not partitioned; run: delaytasks db partitions convert")
        return self.database.autocommitted(self._list)

    def live(self) -> dict[str, int]:
        """Count the tasks that wait or run, by partition."""
        query = (
            f"SELECT c.relname, count(*) FROM {self.quoted()} AS t "
            f"JOIN pg_class AS c ON c.oid = t.tableoid WHERE {HOT} GROUP BY c.relname"
        )
        return self.database.autocommitted(
            lambda c: {row[0]: row[1] for row in c.exec_driver_sql(query)}
        )

    def check(self, kind: str, otherwise: str) -> None:
        """Raise `ConfigError` unless the task table is of this kind: r (plain) or p (partitioned by
        id)."""
        query = text(
            "SELECT relkind::text, pg_get_partkeydef(oid), "
            "current_setting('server_version_num')::int / 10000 "
            "FROM pg_class WHERE oid = to_regclass(:name)"
        )
        found = self.database.autocommitted(
            lambda c: c.execute(query, {"name": self.quoted()}).first()
        )
        if found is None:
            remedy = self.database.tables_remedy
            raise ConfigError(f"table {self.tasks.fullname} does not exist; {remedy}")
        if found[0] != kind:
            raise ConfigError(f"table {self.tasks.fullname} {otherwise}")
        if found[1] not in (None, "RANGE (id)"):
            raise ConfigError(
                f"table {self.tasks.fullname} is partitioned by {found[1]}, not by RANGE (id)"
            )
        if found[2] < OLDEST_SERVER:
            raise ConfigError(
                f"partitions need PostgreSQL {OLDEST_SERVER} or newer, and this is {found[2]}"
            )

    def now(self) -> datetime:
        return self.database.now()

    def quoted(self, name: str | None = None) -> str:
        """Return the quoted name of the task table, or of one of its partitions."""
        return self.database.tx.dialect.identifier_preparer.format_table(
            self.table(name) if name else self.tasks
        )

    def table(self, name: str) -> Table:
        return self.tasks.to_metadata(MetaData(), name=name)

    def _list(self, connection: Connection) -> list[Partition]:
        query = text(
            "SELECT c.relname, pg_get_expr(c.relpartbound, c.oid), "
            "nullif(c.reltuples, -1)::bigint, pg_total_relation_size(c.oid) "
            "FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = to_regclass(:name)"
        )
        found = connection.execute(query, {"name": self.quoted()}).all()
        parts = [
            Partition(name, *_bound(bound), bound == "DEFAULT", rows, size)
            for name, bound, rows, size in found
        ]
        return sorted(parts, key=lambda part: (part.is_default, part.low or 0))

    def names(self, connection: Connection) -> list[str]:
        return [part.name for part in self._list(connection)]

    # -- make -------------------------------------------------------------------------------------

    def extend(self, every: timedelta, ahead: int) -> list[str]:
        """Make the partitions of the next periods, and return their names.

        A period that has begun, or whose tasks are in the default partition already, gets no
        partition.
        """
        with self.one_at_a_time():
            return self._extend(every, ahead)

    def _extend(self, every: timedelta, ahead: int) -> list[str]:
        parts, now = self.all(), self.now()
        start = max(part.until or made_at(0) for part in parts)
        start = max(start, edge_after(now + CLOCKS_DIFFER, every))
        default = self.tasks.name + DEFAULT
        wanted = [
            period
            for period in periods(start, edge_after(now, every) + ahead * every, every)
            if not self._holds(default, period)
        ]
        if not wanted:
            return []

        def work(connection: Connection) -> list[str]:
            made = self.make_periods(connection, wanted)
            self.forget(connection, default)
            return made

        others = " AND ".join(
            f"(id < {first_id(since)} OR id >= {first_id(until)})" for since, until in wanted
        )
        with self.known(default, others):
            return self.in_turn(work)

    def make_periods(self, connection: Connection, wanted: Sequence[Period]) -> list[str]:
        there, made = self.names(connection), list[str]()
        for since, until in wanted:
            made.append(f"{self.tasks.name}_p{since:%Y%m%d}")
            if made[-1] not in there:  # else an earlier try made it, whose answer was lost
                self.make(
                    connection,
                    made[-1],
                    f"FOR VALUES FROM ({first_id(since)}) TO ({first_id(until)})",
                )
        return made

    def make(self, connection: Connection, name: str, bound: str) -> None:
        parent, target = self.quoted(), self.quoted(name)
        options = ", ".join(f"{option} = {value}" for option, value in STORAGE.items())
        for statement in (
            f"CREATE TABLE {target} (LIKE {parent} INCLUDING ALL EXCLUDING IDENTITY) "
            f"WITH ({options})",
            # Statistics of a quiet time would estimate that no rows wait. With them claims would
            # sort all waiting rows instead of merging the partitions' indexes.
            f"ALTER TABLE {target} ALTER status SET STATISTICS 0",
            # Attached afterwards: CREATE TABLE … PARTITION OF would wait for every user of the
            # table.
            f"ALTER TABLE {parent} ATTACH PARTITION {target} {bound}",
        ):
            connection.exec_driver_sql(statement)

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Exclude other processes that make partitions.

        Making them takes several transactions, and adds a CHECK that both processes would change.
        """
        with ExitStack() as opened:

            def wait() -> None:
                connection = opened.enter_context(self.database.tx.connect())
                connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
                wait_for_turn(connection, f"{self.tasks.fullname} {CHECK}")

            try:
                self.database.run(wait)
            except StoreUnavailableError as error:
                raise StoreUnavailableError(
                    f"{error}; nothing was changed: does another process make partitions of "
                    f"{self.tasks.fullname}? Run this again"
                ) from error
            try:
                yield
            finally:
                # If the connection has ended, so has the lock. Committed steps stay.
                with suppress(exc.DBAPIError):
                    opened.close()

    @contextmanager
    def known(self, name: str, condition: str) -> Iterator[None]:
        """Give the table a CHECK, so that ATTACH knows its rows and need not read them.

        ATTACH would block all other statements while it reads. A CHECK is validated without
        blocking them. The caller drops the CHECK after attaching.
        """
        target = self.quoted(name)
        add = f"ALTER TABLE {target} ADD CONSTRAINT {CHECK} CHECK ({condition}) NOT VALID"

        def begin(connection: Connection) -> None:
            self.forget(connection, name)  # an interrupted call may have left one
            connection.exec_driver_sql(add)

        self.in_turn(begin)
        try:
            self.database.autocommitted(
                lambda c: c.exec_driver_sql(f"ALTER TABLE {target} VALIDATE CONSTRAINT {CHECK}")
            )
            yield
        except BaseException:
            left = f"the constraint {CHECK} is still on {name} and will refuse tasks of its period"
            self.in_turn(lambda c: self.forget(c, name), left)
            raise

    def forget(self, connection: Connection, name: str) -> None:
        connection.exec_driver_sql(
            f"ALTER TABLE {self.quoted(name)} DROP CONSTRAINT IF EXISTS {CHECK}"
        )

    def in_turn(self, work: Callable[[Connection], T], otherwise: str = "nothing was changed") -> T:
        """Run `work` as the tables' owner, in turns with migrations, and with short waits for
        locks."""
        role = (
            "SELECT set_config('role', pg_get_userbyid(relowner), true) "
            "FROM pg_class WHERE oid = to_regclass(:name)"
        )

        def once() -> T:
            with self.database.begin() as connection, exclusively(connection, *self._names):
                connection.execute(text(role), {"name": self.quoted()})
                return work(connection)

        with self.advising(otherwise):
            return self.database.run(once)

    @contextmanager
    def advising(self, otherwise: str) -> Iterator[None]:
        try:
            yield
        except StoreUnavailableError as error:
            sessions = "SELECT * FROM pg_stat_activity WHERE state <> 'idle' ORDER BY xact_start"
            raise StoreUnavailableError(
                f"{error}; {otherwise}. Run this again; this query shows the sessions that may "
                f"keep {self.tasks.fullname} locked: {sessions}"
            ) from error

    def _holds(self, name: str, period: Period) -> bool:
        id = self.table(name).c.id
        inside = exists().where(id >= first_id(period[0]), id < first_id(period[1]))
        return bool(self.database.autocommitted(lambda c: c.execute(select(inside)).scalar()))


def _bound(bound: str) -> tuple[int | None, int | None]:
    """Parse FOR VALUES FROM ('1') TO ('2'). MINVALUE, MAXVALUE and DEFAULT give None."""
    low, high = (re.search(rf"{word} \('(-?\d+)'\)", bound) for word in ("FROM", "TO"))
    return low and int(low[1]), high and int(high[1])
