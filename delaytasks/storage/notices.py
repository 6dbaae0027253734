"""What a transaction tells those who listen, at its commit; where the database can do that."""

from __future__ import annotations

import select as io
from collections.abc import Iterable, Sequence
from typing import Any
from zlib import crc32

from sqlalchemy import bindparam, func, select

from delaytasks.core.interfaces import Executor
from delaytasks.storage.database import Database
from delaytasks.storage.engines import make_engine
from delaytasks.storage.schema import Schema

#: A channel's name has fewer bytes.
MOST_NAME = 63


class Notices:
    """Of one database's tasks."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        name = f"delaytasks.{schema.tasks.fullname}"
        self.channel = name if len(name) <= MOST_NAME else f"delaytasks.{crc32(name.encode()):08x}"
        self._tell = select(func.pg_notify(self.channel, bindparam("payload")))

    @property
    def is_possible(self) -> bool:
        return self._db.can.notify

    def tell(self, payloads: Iterable[str], on: Executor | None = None) -> None:
        """In the transaction of `on`; without one, at once."""

        def work(connection: Any) -> None:
            for payload in payloads:
                connection.execute(self._tell, {"payload": payload})

        if self.is_possible:
            work(on) if on is not None else self._db.alone(work)

    def listen(self) -> Listener | None:
        """None where the driver can not."""
        if not self.is_possible or self._db.url.get_driver_name() != "psycopg2":
            return None
        return Listener(self._db, self.channel)


class Listener:
    """A connection of its own, which hears what was told since it was made. What fails raises whatever the driver
    raises; then a new one is needed."""

    def __init__(self, database: Database, channel: str) -> None:
        self._engine = make_engine(database.url, 1, "AUTOCOMMIT")
        try:
            self._connection = self._engine.connect()
            name = self._connection.dialect.identifier_preparer.quote_identifier(channel)
            self._connection.exec_driver_sql(f"LISTEN {name}")
            self._driver: Any = self._connection.connection.driver_connection
        except BaseException:
            self._engine.dispose()
            raise

    def wait(self, timeout_s: float) -> Sequence[str]:
        """What was told, as soon as there is something."""
        if not self._driver.notifies:
            poll = io.poll()
            poll.register(self._driver.fileno(), io.POLLIN)
            if not poll.poll(timeout_s * 1000):
                return ()
            self._driver.poll()
        payloads = [notice.payload for notice in self._driver.notifies]
        self._driver.notifies.clear()
        return payloads

    def close(self) -> None:
        self._connection.invalidate()  # it must not go back to a pool, where it would go on listening
        self._connection.close()
        self._engine.dispose()
