"""The task table in partitions, on PostgreSQL: what is old goes as a whole, not row by row.

Ids are in the order of time, so a range of ids is a period. What no period's partition holds is in the default one:
tasks that outlived their partition, and ids that other programs made. Each step locks the table for a moment only, and
gives up soon where it can not; then it can be tried again.
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
from delaytasks.storage.database import Database
from delaytasks.storage.driver_errors import REMEDY
from delaytasks.storage.migrations import exclusively, wait_for_turn
from delaytasks.storage.partition_bounds import CHECK
from delaytasks.storage.schema import HOT, STORAGE, build_schema
from delaytasks.storage.types import db_now

T = TypeVar("T")
#: Older servers search all partitions for the rows of an UPDATE.
OLDEST_SERVER = 14
#: Ids are made by the producers' clocks.
CLOCKS_DIFFER = timedelta(hours=1)
#: Ends of names.
FIRST, DEFAULT = "_first", "_default"
Period = tuple[datetime, datetime]


class Partition(NamedTuple):
    """A table of the tasks with ids from `low` to below `high`; or of what no other one holds."""

    name: str
    low: int | None
    high: int | None
    is_default: bool
    #: As the planner estimates; none where nothing was analysed yet.
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
                f"partitions need PostgreSQL, and this is {database.url.get_backend_name()}: let the sweep delete old "
                "tasks instead (delaytasks_purge_after_s)"
            )
        self.database = database
        self._place = prefix, schema or None
        self.schema = build_schema(*self._place)
        self.tasks = self.schema.tasks

    # -- look -------------------------------------------------------------------------------------

    def all(self) -> list[Partition]:
        """In the order of their ids, the default one last."""
        self.check("p", "is not partitioned; run: delaytasks db partitions convert")
        return self.database.alone(self._list)

    def live(self) -> dict[str, int]:
        """How many tasks wait or run in each partition that has any."""
        query = (
            f"SELECT c.relname, count(*) FROM {self.quoted()} AS t JOIN pg_class AS c ON c.oid = t.tableoid "
            f"WHERE {HOT} GROUP BY c.relname"
        )
        return self.database.alone(lambda c: {row[0]: row[1] for row in c.exec_driver_sql(query)})

    def check(self, kind: str, otherwise: str) -> None:
        """`ConfigError` unless the task table is of this kind: a plain one (r), or in partitions such as ours (p)."""
        query = text(
            "SELECT relkind::text, pg_get_partkeydef(oid), current_setting('server_version_num')::int / 10000 "
            "FROM pg_class WHERE oid = to_regclass(:name)"
        )
        found = self.database.alone(lambda c: c.execute(query, {"name": self.quoted()}).first())
        if found is None:
            raise ConfigError(f"table {self.tasks.fullname} does not exist; {REMEDY}")
        if found[0] != kind:
            raise ConfigError(f"table {self.tasks.fullname} {otherwise}")
        if found[1] not in (None, "RANGE (id)"):
            raise ConfigError(
                f"table {self.tasks.fullname} is partitioned by {found[1]}, and not by RANGE (id)"
            )
        if found[2] < OLDEST_SERVER:
            raise ConfigError(
                f"partitions need PostgreSQL {OLDEST_SERVER} or newer, and this is {found[2]}"
            )

    def now(self) -> datetime:
        instant: datetime = self.database.alone(lambda c: c.execute(select(db_now())).scalar_one())
        return instant

    def quoted(self, name: str | None = None) -> str:
        """The task table, or one of its partitions."""
        return self.database.tx.dialect.identifier_preparer.format_table(
            self.table(name) if name else self.tasks
        )

    def table(self, name: str) -> Table:
        return self.tasks.to_metadata(MetaData(), name=name)

    def _list(self, connection: Connection) -> list[Partition]:
        query = text(
            "SELECT c.relname, pg_get_expr(c.relpartbound, c.oid), nullif(c.reltuples, -1)::bigint, "
            "pg_total_relation_size(c.oid) FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = to_regclass(:name)"
        )
        found = connection.execute(query, {"name": self.quoted()}).all()
        parts = [
            Partition(name, *_bound(said), said == "DEFAULT", rows, size)
            for name, said, rows, size in found
        ]
        return sorted(parts, key=lambda part: (part.is_default, part.low or 0))

    def names(self, connection: Connection) -> list[str]:
        return [part.name for part in self._list(connection)]

    # -- make -------------------------------------------------------------------------------------

    def extend(self, every: timedelta, ahead: int) -> list[str]:
        """Makes the partitions of the periods to come, and names them. A period that has begun, or whose tasks are in
        the default partition already, is left to that one."""
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
            f"CREATE TABLE {target} (LIKE {parent} INCLUDING ALL EXCLUDING IDENTITY) WITH ({options})",
            # Statistics of a quiet time would say that nothing waits: with them claims would sort all that does wait,
            # instead of merging the hot indexes.
            f"ALTER TABLE {target} ALTER status SET STATISTICS 0",
            # Not made as a partition at once: that would wait for everybody who uses any other one.
            f"ALTER TABLE {parent} ATTACH PARTITION {target} {bound}",
        ):
            connection.exec_driver_sql(statement)

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Inside, nobody else makes partitions: it takes several transactions, and a CHECK that both would change."""
        with ExitStack() as held:

            def wait() -> None:
                connection = held.enter_context(self.database.tx.connect())
                connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
                wait_for_turn(connection, f"{self.tasks.fullname} {CHECK}")

            try:
                self.database.run(wait)
            except StoreUnavailableError as error:
                who = f"does somebody else make partitions of {self.tasks.fullname}"
                raise StoreUnavailableError(
                    f"{error}; nothing was changed: {who}? Run this again"
                ) from error
            try:
                yield
            finally:
                with suppress(
                    exc.DBAPIError
                ):  # who ended our connection ended our turn; what is done is done
                    held.close()

    @contextmanager
    def known(self, name: str, condition: str) -> Iterator[None]:
        """Inside, ATTACH knows this of the table's rows. Else it would read them all while everybody waits; a CHECK is
        validated beside everybody's work. Whoever attaches then forgets it."""
        target = self.quoted(name)
        add = f"ALTER TABLE {target} ADD CONSTRAINT {CHECK} CHECK ({condition}) NOT VALID"

        def begin(connection: Connection) -> None:
            self.forget(connection, name)  # one that was left behind
            connection.exec_driver_sql(add)

        self.in_turn(begin)
        try:
            self.database.alone(
                lambda c: c.exec_driver_sql(f"ALTER TABLE {target} VALIDATE CONSTRAINT {CHECK}")
            )
            yield
        except BaseException:
            left = f"the constraint {CHECK} is still on {name} and will refuse tasks when their time comes"
            self.in_turn(lambda c: self.forget(c, name), left)
            raise

    def forget(self, connection: Connection, name: str) -> None:
        connection.exec_driver_sql(
            f"ALTER TABLE {self.quoted(name)} DROP CONSTRAINT IF EXISTS {CHECK}"
        )

    def in_turn(self, work: Callable[[Connection], T], otherwise: str = "nothing was changed") -> T:
        """`work` as the tables' owner, one after the other with migrations, and with short waits for locks."""
        role = "SELECT set_config('role', pg_get_userbyid(relowner), true) FROM pg_class WHERE oid = to_regclass(:name)"

        def once() -> T:
            with self.database.begin() as connection, exclusively(connection, *self._place):
                connection.execute(text(role), {"name": self.quoted()})
                return work(connection)

        with self.advising(otherwise):
            return self.database.run(once)

    @contextmanager
    def advising(self, otherwise: str) -> Iterator[None]:
        try:
            yield
        except StoreUnavailableError as error:
            who = "SELECT * FROM pg_stat_activity WHERE state <> 'idle' ORDER BY xact_start"
            raise StoreUnavailableError(
                f"{error}; {otherwise}. Run this again; who keeps {self.tasks.fullname} locked is shown by: {who}"
            ) from error

    def _holds(self, name: str, period: Period) -> bool:
        id = self.table(name).c.id
        inside = exists().where(id >= first_id(period[0]), id < first_id(period[1]))
        return bool(self.database.alone(lambda c: c.execute(select(inside)).scalar()))


def edge_after(instant: datetime, every: timedelta) -> datetime:
    """Partitions meet at whole multiples of `every` since the first of all ids."""
    return made_at(0) + ((instant - made_at(0)) // every + 1) * every


def periods(start: datetime, end: datetime, every: timedelta) -> list[Period]:
    """From edge to edge; the first one begins where it is told to."""
    found = []
    while start < end:
        found.append((start, edge_after(start, every)))
        start = found[-1][1]
    return found


def _bound(said: str) -> tuple[int | None, int | None]:
    """Of FOR VALUES FROM ('1') TO ('2'), where MINVALUE or MAXVALUE may stand; of DEFAULT neither."""
    low, high = (re.search(rf"{word} \('(-?\d+)'\)", said) for word in ("FROM", "TO"))
    return low and int(low[1]), high and int(high[1])
