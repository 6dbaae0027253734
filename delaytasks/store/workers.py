"""One row for each worker: who is alive, what it serves, and how far its clock is off."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, exc, insert, select, update

from delaytasks.store.database import Database
from delaytasks.store.schema import Schema
from delaytasks.store.types import db_now, db_now_plus

#: Workers that one sweep declares lost; the next one goes on.
BURIED = 100


class Workers:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._w = schema.workers

    def seen(self, name: str, queues: Sequence[str], pool: str, concurrency: int, offset_us: int) -> None:
        w = self._w
        values = {
            "seen_at": db_now(),
            "queues": json.dumps(sorted(queues)),
            "pool": pool,
            "concurrency": concurrency,
            "clock_offset_us": offset_us,
        }

        def work(connection: Any) -> None:
            known = update(w).where(w.c.name == name).values(values)
            if connection.execute(known).rowcount:
                return
            try:
                connection.execute(insert(w).values(name=name, started_at=db_now(), **values))
            except exc.IntegrityError:  # another thread of the same worker was faster
                connection.execute(known)

        self._db.alone(work)

    def gone(self, name: str) -> None:
        """It stopped in order, and has sent back what it held."""
        w = self._w
        self._db.alone(lambda c: c.execute(delete(w).where(w.c.name == name)))

    def bury(self, silent_s: float) -> list[str]:
        """Some of the workers that were not seen for so long; each is reported once."""
        w = self._w

        def work(connection: Any) -> list[str]:
            stale = w.c.seen_at < db_now_plus(-silent_s)
            names = connection.execute(select(w.c.name).where(stale).order_by(w.c.name).limit(BURIED)).scalars().all()
            return [n for n in names if connection.execute(delete(w).where(w.c.name == n, stale)).rowcount]

        return self._db.alone(work)

    def alive(self) -> list[dict[str, Any]]:
        w = self._w
        rows = self._db.alone(lambda c: c.execute(select(w).order_by(w.c.name)).mappings().all())
        return [{**row, "queues": json.loads(row["queues"])} for row in rows]
