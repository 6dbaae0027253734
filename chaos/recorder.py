"""Record every change of a task's row with a database trigger.

The trigger shares no code with delaytasks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, delete, select

from chaos.history import RowChange
from delaytasks.db.store import Store
from delaytasks.db.types import UTCDateTime
from delaytasks.model.clock import to_us
from delaytasks.model.moves import Status

_NOW = {
    "postgresql": "clock_timestamp()",
    "mysql": "UTC_TIMESTAMP(6)",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now')",
}
#: The recorded columns of the row.
_SEEN = (
    *("status", "version", "runs", "lapses", "expected_time", "lease_until"),
    *("worker", "tag", "task_key"),
)


class Recorder:
    """The recorder of one database. Each write costs a second one."""

    def __init__(self, store: Store) -> None:
        self._database = store.database
        backend = store.database.backend
        self._dialect = "mysql" if backend == "mariadb" else backend
        tasks = store.schema.tasks
        self._tasks, self._name = tasks.name, f"{tasks.name}_seen"
        number = BigInteger().with_variant(Integer(), "sqlite")
        self._table = Table(
            self._name,
            MetaData(),
            Column("seq", number, primary_key=True, autoincrement=True),
            Column("id", BigInteger, nullable=False),
            Column("at", UTCDateTime, nullable=False),
            Column("was", Integer),
            Column("version_was", BigInteger),
            *(Column(name, tasks.c[name].type) for name in _SEEN),
        )

    def start(self) -> None:
        def work(connection: Any) -> None:
            self._table.drop(connection, checkfirst=True)
            self._table.create(connection)
            for statement in self._triggers():
                # The statement is not a format string, and SQLite's contain percent signs.
                connection.exec_driver_sql(statement)

        self._database.autocommitted(work)

    def stop(self) -> None:
        def work(connection: Any) -> None:
            for event in ("insert", "update"):
                on = f" ON {self._tasks}" if self._dialect == "postgresql" else ""
                connection.exec_driver_sql(f"DROP TRIGGER IF EXISTS {self._name}_{event}{on}")
            if self._dialect == "postgresql":
                connection.exec_driver_sql(f"DROP FUNCTION IF EXISTS {self._name}_note")
            self._table.drop(connection, checkfirst=True)

        self._database.autocommitted(work)

    def forget(self) -> None:
        """Delete the records."""
        self._database.autocommitted(lambda c: c.execute(delete(self._table)))

    def changes(self) -> Iterator[RowChange]:
        """Iterate over the changes in the order of their writes, in batches: a long run has
        millions.
        """
        for rows in self._database.stream(select(self._table).order_by(self._table.c.seq), 5000):
            for row in rows:
                yield RowChange(
                    row.id,
                    to_us(row.at),
                    None if row.was is None else Status(row.was),
                    Status(row.status),
                    row.version_was,
                    row.version,
                    row.runs,
                    row.lapses,
                    to_us(row.expected_time),
                    None if row.lease_until is None else to_us(row.lease_until),
                    row.worker and sys.intern(row.worker),
                    sys.intern(row.tag),
                    row.task_key,
                )

    def _triggers(self) -> list[str]:
        names = ", ".join(("id", "at", "was", "version_was", *_SEEN))

        def note(event: str) -> str:
            before = "OLD.status, OLD.version" if event == "update" else "NULL, NULL"
            values = ["NEW.id", _NOW[self._dialect], before, *(f"NEW.{name}" for name in _SEEN)]
            return f"INSERT INTO {self._name} ({names}) VALUES ({', '.join(values)});"

        heads = {
            event: f"CREATE TRIGGER {self._name}_{event} AFTER {event.upper()} "
            f"ON {self._tasks} FOR EACH ROW"
            for event in ("insert", "update")
        }
        if self._dialect != "postgresql":
            return [f"{head} BEGIN {note(event)} END" for event, head in heads.items()]
        function = (
            f"CREATE OR REPLACE FUNCTION {self._name}_note() RETURNS trigger "
            "LANGUAGE plpgsql AS $$ BEGIN "
            f"IF TG_OP = 'INSERT' THEN {note('insert')} ELSE {note('update')} END IF; "
            "RETURN NULL; END $$"
        )
        execute = f"EXECUTE FUNCTION {self._name}_note()"
        return [function, *(f"{head} {execute}" for head in heads.values())]
