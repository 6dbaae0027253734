"""The audit rows of bulk operations: which were started, and how far they came."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import Select, delete, insert, select, update

from delaytasks.core.body import dump_json
from delaytasks.core.filters import AuditEntry
from delaytasks.core.ids import MAX_ID
from delaytasks.storage.database import Database
from delaytasks.storage.rows import MAX_INTEGER
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus


class Audit:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._a = schema.audit
        self._steps = schema.audit_steps

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

    def record(self, on: Any, id: int, step: int, moved: Sequence[tuple[int, int]]) -> None:
        """Write the ids and the new versions of the tasks that a step has moved."""
        values = {"audit_id": id, "step": step, "moved": dump_json(moved)}
        on.execute(insert(self._steps).values(values))

    def recorded(self, id: int) -> Iterator[dict[int, int]]:
        """Yield the ids and new versions that each step has recorded, the last step first."""
        s, last = self._steps.c, MAX_INTEGER
        while True:
            query = select(s.step, s.moved).where(s.audit_id == id, s.step < last)
            rows = self._db.rows(query.order_by(s.step.desc()).limit(1))
            if not rows:
                return
            last = rows[0][0]
            yield dict(json.loads(rows[0][1]))

    def get(self, id: int) -> AuditEntry | None:
        return next(iter(self._entries(select(self._a).where(self._a.c.id == id))), None)

    def end(self, id: int, state: str, done: tuple[int, int] | None) -> None:
        ended: dict[str, Any] = {"state": state, "seen_at": db_now(), "finished_at": db_now()}
        if done is not None:
            ended |= {"changed": done[0], "refused": done[1]}
        self._db.autocommitted(
            lambda c: c.execute(update(self._a).where(self._a.c.id == id).values(ended))
        )

    def all(self, limit: int, before: int | None = None) -> list[AuditEntry]:
        """Return the newest rows first, by their ids; only those with ids below `before`."""
        last = MAX_ID if before is None else min(before, MAX_ID)
        rows = select(self._a).where(self._a.c.id < last)
        return self._entries(rows.order_by(self._a.c.id.desc()).limit(limit))

    def _entries(self, query: Select[Any]) -> list[AuditEntry]:
        return [
            AuditEntry(**{**row._mapping, "filter": json.loads(row._mapping["filter"])})
            for row in self._db.rows(query)
        ]

    def purge(self, older_than_s: float) -> None:
        is_old = self._a.c.seen_at < db_now_plus(-older_than_s)
        steps = delete(self._steps).where(
            self._steps.c.audit_id.in_(select(self._a.c.id).where(is_old))
        )
        self._db.autocommitted(
            lambda c: (c.execute(steps), c.execute(delete(self._a).where(is_old)))
        )
