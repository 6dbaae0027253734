"""The audit rows of bulk operations: which were started, and how far they came."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import delete, insert, select, update

from delaytasks.core.bulk import AuditEntry
from delaytasks.storage.database import Database
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus


class Audit:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._a = schema.audit
        self._shard = schema.shard

    def begin(self, entry: AuditEntry) -> None:
        """Write the row before any task is moved, so that an operation that dies is visible."""
        values = {column.name: getattr(entry, column.name) for column in self._a.c}
        values["filter"] = json.dumps(entry.filter, ensure_ascii=False, separators=(",", ":"))
        exists = select(self._a.c.id).where(self._a.c.id == entry.id)

        def work(connection: Any) -> None:
            if connection.execute(exists).first() is None:  # else an earlier try has written it
                connection.execute(insert(self._a).values(values))

        self._db.transaction(work)

    def counts(self, on: Any, id: int) -> tuple[int, int] | None:
        """Return how many tasks an operation has changed and refused; None if its row is gone."""
        row = on.execute(
            select(self._a.c.changed, self._a.c.refused).where(self._a.c.id == id)
        ).first()
        return None if row is None else (row[0], row[1])

    def note(self, on: Any, id: int, done: tuple[int, int]) -> None:
        noted = {"changed": done[0], "refused": done[1], "seen_at": db_now()}
        on.execute(update(self._a).where(self._a.c.id == id).values(noted))

    def end(self, id: int, state: str, done: tuple[int, int] | None) -> None:
        ended: dict[str, Any] = {"state": state, "seen_at": db_now(), "finished_at": db_now()}
        if done is not None:
            ended |= {"changed": done[0], "refused": done[1]}
        self._db.alone(lambda c: c.execute(update(self._a).where(self._a.c.id == id).values(ended)))

    def all(self, limit: int) -> list[AuditEntry]:
        """Return the newest rows first, by their ids."""
        a = self._a
        rows = self._db.rows(select(a).order_by(a.c.id.desc()).limit(limit))
        return [
            AuditEntry(
                **{**row._mapping, "filter": json.loads(row._mapping["filter"])}, shard=self._shard
            )
            for row in rows
        ]

    def purge(self, older_than_s: float) -> None:
        old = delete(self._a).where(self._a.c.seen_at < db_now_plus(-older_than_s))
        self._db.alone(lambda c: c.execute(old))
