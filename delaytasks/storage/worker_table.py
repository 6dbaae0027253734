"""The workers, one row each: which are alive, which queues and tags they serve, how far their
clocks are off."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import delete, exc, insert, or_, select, update

from delaytasks.core.inputs import ALL_QUEUES, QUEUE_LENGTH, is_queue
from delaytasks.core.registered_worker import NO_OUTAGES, RegisteredWorker, ServiceTimes
from delaytasks.storage.database import Database
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus

#: The number of workers that one sweep removes.
EXPIRED_PER_SWEEP = 100
#: The longest list of tags. A worker with a longer list publishes none.
MAX_TAG_BYTES = 16_384


class WorkerTable:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._w = schema.workers
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
    ) -> None:
        """Record that the worker is alive. `tags` are those with processors; None if they are not
        known.

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
            "broker_down_at": _ago(services.broker_down_s),
            "timer_down_at": _ago(services.timer_down_s),
            "beat_at": _ago(services.beat_s),
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

        self._db.alone(work)

    def remove(self, name: str) -> None:
        """Remove a worker that stopped in order, after it has returned its tasks."""
        w = self._w
        self._db.alone(lambda c: c.execute(delete(w).where(w.c.name == name)))

    def expire(self, silent_s: float) -> list[str]:
        """Remove some workers that were silent for `silent_s` seconds. Each is returned once.

        A worker whose `seen_at` is as far in the future counts as silent, too, because no live
        worker wrote it.
        """
        w = self._w

        def work(connection: Any) -> list[str]:
            stale = or_(w.c.seen_at < db_now_plus(-silent_s), w.c.seen_at > db_now_plus(silent_s))
            first = select(w.c.name).where(stale).order_by(w.c.name).limit(EXPIRED_PER_SWEEP)
            names = connection.execute(first).scalars().all()
            remove = delete(w).where(stale)
            return [n for n in names if connection.execute(remove.where(w.c.name == n)).rowcount]

        return self._db.alone(work)

    def all(self) -> list[dict[str, Any]]:
        """Return all rows, also those of workers that have died and are yet to be removed."""
        w = self._w
        return [
            {
                **row._mapping,
                # SQLite stores values of any type.
                "pool": str(row.pool),
                "concurrency": _number(row.concurrency),
                "clock_offset_us": _number(row.clock_offset_us),
                "queues": _queues_of(row.queues),
                "tags": _tags_of(row.tags),
            }
            for row in self._db.rows(select(w).order_by(w.c.name))
        ]

    def registered(self, now: datetime, silent_s: float) -> list[RegisteredWorker]:
        """Return all workers. Those that were silent for `silent_s` seconds are not alive."""
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
                    ServiceTimes(
                        _age_s(now, row["broker_down_at"]),
                        _age_s(now, row["timer_down_at"]),
                        _age_s(now, row["beat_at"]),
                    ),
                )
            )
        return found


def _ago(seconds: float | None) -> Any:
    return None if seconds is None else db_now_plus(-seconds)


def _age_s(now: datetime, at: datetime | None) -> float | None:
    return None if at is None else max((now - at).total_seconds(), 0.0)


def _published(tags: Collection[str] | None) -> str | None:
    """Return the tags as JSON, or None if that is too long. Then readers do not know them."""
    if tags is None:
        return None
    text = json.dumps(sorted(tags), ensure_ascii=False, separators=(",", ":"))
    return text if len(text.encode()) <= MAX_TAG_BYTES else None


def _tags_of(text: object) -> frozenset[str] | None:
    tags = _strings(text)
    return None if tags is None else frozenset(tags)


def _queues_of(text: object) -> list[str]:
    """Return the queues that a worker serves; none if another program wrote something else."""
    return [
        name
        for name in _strings(text) or ()
        if name == ALL_QUEUES or (len(name) <= QUEUE_LENGTH and is_queue(name))
    ]


def _strings(text: object) -> list[str] | None:
    """Return the strings of a JSON list, or None if the text is anything else."""
    try:
        found = json.loads(text)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError):
        return None
    is_list = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found if is_list else None


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
