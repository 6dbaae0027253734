"""Messages that a commit sends to the connections that listen (LISTEN and NOTIFY of PostgreSQL)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from sqlalchemy import bindparam, func, select

from delaytasks.core.interfaces import CallerConnection
from delaytasks.storage.database import Database
from delaytasks.storage.engines import make_engine
from delaytasks.storage.postgresql_drivers import own_driver
from delaytasks.storage.schema import Schema

#: PostgreSQL's limit for the name of a channel.
MAX_CHANNEL_BYTES = 63


class Notices:
    """The channel of one database's tasks."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        name = f"delaytasks.{schema.tasks.fullname}"
        self.channel = (
            name if len(name) <= MAX_CHANNEL_BYTES else f"delaytasks.{crc32(name.encode()):08x}"
        )
        self._tell = select(func.pg_notify(self.channel, bindparam("payload")))

    @property
    def is_possible(self) -> bool:
        return self._db.can.notify

    def send(self, payloads: Iterable[str], on: CallerConnection | None = None) -> None:
        """Send the payloads at the commit of `on`, or immediately without `on`."""

        def work(connection: Any) -> None:
            for payload in payloads:
                connection.execute(self._tell, {"payload": payload})

        if self.is_possible:
            self._db.autocommitted(work, on)

    def listen(self) -> Listener | None:
        """Return a listener; None if the database has no notices."""
        return Listener(self._db, self.channel) if self.is_possible else None


class Listener:
    """A connection that receives the payloads sent since it was made.

    After an exception, which is the driver's own, a new listener is needed.
    """

    def __init__(self, database: Database, channel: str) -> None:
        self._engine = make_engine(database.url, 1, "AUTOCOMMIT")
        self._driver = own_driver(database.url)
        try:
            self._connection = self._engine.connect()
            name = self._connection.dialect.identifier_preparer.quote_identifier(channel)
            self._connection.exec_driver_sql(f"LISTEN {name}")
        except BaseException:
            self._engine.dispose()
            raise

    def wait(self, timeout_s: float) -> Sequence[str]:
        """Return the payloads that have arrived, as soon as there is one."""
        return self._driver.notices(self._connection.connection.driver_connection, timeout_s)

    def close(self) -> None:
        self._connection.invalidate()  # in a pool it would continue to listen
        self._connection.close()
        self._engine.dispose()
