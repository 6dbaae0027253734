"""The workers, one row each: which are alive, which queues and tags they serve, how far their
clocks are off, and which were lost within the last hour."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Delete, Update, and_, delete, exc, insert, or_, select, update

from delaytasks.db.database import Database
from delaytasks.db.schema import VERSION_LENGTH, Schema
from delaytasks.db.types import db_now, db_now_plus
from delaytasks.model.text import installed_version
from delaytasks.model.workers import NO_OUTAGES, LostWorker, RegisteredWorker, ServiceTimes

#: The number of workers that one sweep marks as lost, and the number of lost ones that it removes.
EXPIRED_PER_SWEEP = 100
#: A lost worker is shown for this time.
LOST_FOR_S = 3600.0
#: The longest list of tags. A worker with a longer list publishes none.
MAX_TAG_BYTES = 16_384
#: The columns of the fields of `ServiceTimes`.
_SERVICES = ("broker_down_at", "timer_down_at", "beat_at")


class WorkerTable:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._w = w = schema.workers
        self._is_lost, self._is_present = w.c.lost_at.is_not(None), w.c.lost_at.is_(None)
        #: The tags that this process has published, by the worker's name.
        self._published: dict[str, str | None] = {}

    def report(
        self,
        name: str,
        queues: Sequence[str],
        pool: str,
        concurrency: int,
        offset_us: int,
        tags: Collection[str] | None = None,
        services: ServiceTimes = NO_OUTAGES,
        busy: int | None = None,
    ) -> None:
        """Record that the worker is alive. `tags` are those with processors; None if they are not
        known. `busy` is the number of processes that run delayed tasks.

        The first report of a process is the start of its worker. The row may be that of a worker of
        this name that has died.
        """
        w, published = self._w, _published(tags)
        values = {
            "seen_at": db_now(),
            "queues": json.dumps(sorted(queues)),
            "pool": pool,
            "concurrency": concurrency,
            "clock_offset_us": offset_us,
            **{
                name: None if age_s is None else db_now_plus(-age_s)
                for name, age_s in zip(_SERVICES, services, strict=True)
            },
            "lost_at": None,
            "busy": busy,
            "version": (installed_version() or "")[:VERSION_LENGTH] or None,
        }

        def work(connection: Any) -> None:
            # An unchanged text is not written again every few seconds.
            changed: dict[str, Any] = {}
            if self._published.get(name, "") != published:
                changed["tags"] = published
            if name not in self._published:
                changed["started_at"] = db_now()
            known = update(w).where(w.c.name == name).values({**values, **changed})
            if connection.execute(known).rowcount:
                self._published[name] = published
                return
            try:
                connection.execute(
                    insert(w).values(name=name, started_at=db_now(), tags=published, **values)
                )
                self._published[name] = published
            except exc.IntegrityError:  # another thread of the worker has inserted it
                connection.execute(known)

        self._db.autocommitted(work)

    def remove(self, name: str) -> None:
        """Remove a worker that stopped in order, after it has returned its tasks."""
        w = self._w
        self._db.autocommitted(lambda c: c.execute(delete(w).where(w.c.name == name)))

    def expire(self, silent_s: float) -> list[str]:
        """Mark some workers as lost that were silent for `silent_s` seconds. Return each name once.

        The row of a lost worker is removed after `LOST_FOR_S`. A row whose `seen_at` is
        `silent_s` in the future is returned and removed immediately, because no live worker wrote
        it.
        """
        w = self._w
        silent = and_(self._is_present, w.c.seen_at < db_now_plus(-silent_s))
        wrong = and_(self._is_present, w.c.seen_at > db_now_plus(silent_s))
        mark, remove = update(w).where(silent).values(lost_at=db_now()), delete(w).where(wrong)
        # The clock of the database may have been set back since the worker was lost.
        over = and_(
            self._is_lost,
            or_(w.c.lost_at < db_now_plus(-LOST_FOR_S), w.c.lost_at > db_now_plus(silent_s)),
        )

        def work(connection: Any) -> list[str]:
            def first(condition: ColumnElement[bool]) -> list[str]:
                names = select(w.c.name).where(condition).order_by(w.c.name)
                return list(connection.execute(names.limit(EXPIRED_PER_SWEEP)).scalars())

            def changes(statement: Update | Delete, name: str) -> bool:
                return bool(connection.execute(statement.where(w.c.name == name)).rowcount)

            for name in first(over):
                changes(delete(w).where(over), name)
            silent_names = first(or_(silent, wrong))
            return [name for name in silent_names if changes(mark, name) or changes(remove, name)]

        return self._db.autocommitted(work)

    def lost(self) -> list[LostWorker]:
        """Return the workers that were lost within the last hour, the latest loss first. No other
        method returns them."""
        w = self._w
        query = select(w.c.name, w.c.lost_at, w.c.seen_at, w.c.pool, w.c.concurrency, w.c.queues)
        rows = self._db.rows(query.where(self._is_lost).order_by(w.c.lost_at.desc()))
        return [LostWorker._make((*row[:5], json.loads(row.queues))) for row in rows]

    def all(self) -> list[dict[str, Any]]:
        """Return the rows of all workers that are not lost, also of those that are silent."""
        w = self._w
        return [
            {
                **row._mapping,
                "queues": json.loads(row.queues),
                "tags": None if row.tags is None else frozenset(json.loads(row.tags)),
            }
            for row in self._db.rows(select(w).where(self._is_present).order_by(w.c.name))
        ]

    def registered(self, now: datetime, silent_s: float) -> list[RegisteredWorker]:
        """Return all workers that are not lost. Those that were silent for `silent_s` seconds are
        not alive."""
        found = []
        for row in self.all():
            age_s = (now - row["seen_at"]).total_seconds()
            found.append(
                RegisteredWorker(
                    row["name"],
                    abs(age_s) <= silent_s,
                    max(age_s, 0.0),
                    row["queues"],
                    row["tags"],
                    row["pool"],
                    row["concurrency"],
                    row["started_at"],
                    row["seen_at"],
                    row["clock_offset_us"] / 1e6,
                    ServiceTimes(*(_age_s(now, row[name]) for name in _SERVICES)),
                    row["busy"],
                    row["version"],
                )
            )
        return found


def _age_s(now: datetime, at: datetime | None) -> float | None:
    return None if at is None else max((now - at).total_seconds(), 0.0)


def _published(tags: Collection[str] | None) -> str | None:
    """Return the tags as JSON, or None if that is too long. Then readers do not know them."""
    if tags is None:
        return None
    text = json.dumps(sorted(tags), ensure_ascii=False, separators=(",", ":"))
    return text if len(text.encode()) <= MAX_TAG_BYTES else None
