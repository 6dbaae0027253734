"""The table of failure groups: the failures of a tag with the same error pattern."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any

from sqlalchemy import and_, bindparam, delete, select, update

from delaytasks.core.body import dump_json
from delaytasks.core.run_counts import FailureCount
from delaytasks.storage.database import Database
from delaytasks.storage.inserts import insert_if_absent
from delaytasks.storage.schema import FINGERPRINT_LENGTH, Schema

#: The hours of a failure group that are kept for its sparkline.
KEPT_HOURS = 48
#: The most groups that one call writes: those with the most failures.
MAX_GROUPS_PER_WRITE = 100
#: The most groups in the table. The sweep deletes the oldest ones.
MAX_STORED_GROUPS = 1000


class FailureGroups:
    """The failure groups of one database."""

    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._f = f = schema.failures
        self._insert = insert_if_absent(database, f, f.c.tag)
        self._update = (
            update(f)
            .where(f.c.tag == bindparam("of_tag"), f.c.fingerprint == bindparam("of_fingerprint"))
            .values(
                {
                    name: bindparam(f"new_{name}", type_=f.c[name].type)
                    for name in ("task_id", "sample", "runs", "last_at", "hours")
                }
            )
        )

    def add(
        self, on: Any, failures: Mapping[tuple[int, str, str], FailureCount], now: datetime
    ) -> None:
        """Add the failures of a worker, by hour, tag and pattern, to their groups."""
        f, groups = self._f, dict[tuple[str, str], list[tuple[int, FailureCount]]]()
        most = sorted(failures.items(), key=lambda each: -each[1].runs)[:MAX_GROUPS_PER_WRITE]
        for (hour, tag, pattern), failure in most:
            groups.setdefault((tag, fingerprint_of(pattern)), []).append((hour, failure))
        keys = sorted(groups)
        on.execute(
            self._insert,
            [_new_group(key, groups[key][0][1], now) for key in keys],
        )
        for tag, fingerprint in keys:
            mine = and_(f.c.tag == tag, f.c.fingerprint == fingerprint)
            query = select(f.c.runs, f.c.hours).where(mine).with_for_update()
            runs, hours = on.execute(query).one()
            counted = hour_counts_of(hours)
            for hour, failure in groups[tag, fingerprint]:
                counted[hour] = counted.get(hour, 0) + failure.runs
                runs += failure.runs
            _, last = max(groups[tag, fingerprint], key=itemgetter(0))
            changes = {
                "new_task_id": last.task_id,
                "new_sample": last.error,
                "new_runs": runs,
                "new_last_at": now,
                "new_hours": dump_json(dict(sorted(counted.items())[-KEPT_HOURS:])),
            }
            on.execute(
                self._update,
                {"of_tag": tag, "of_fingerprint": fingerprint, **changes},
            )

    def purge(self, on: Any, before: datetime) -> int:
        """Delete the groups without a failure since `before`, and the oldest beyond a limit."""
        f = self._f
        newest = select(f.c.last_at).order_by(f.c.last_at.desc())
        bound = on.execute(newest.offset(MAX_STORED_GROUPS).limit(1)).scalar()
        groups = delete(f).where(f.c.last_at <= max(before, bound or before))
        return int(on.execute(groups).rowcount)

    def read(self, tag: str | None, since: datetime | None, limit: int) -> Sequence[Any]:
        """Return the groups, beginning with the one that failed last."""
        f = self._f
        query = select(f).order_by(f.c.last_at.desc(), f.c.tag, f.c.fingerprint).limit(limit)
        if tag is not None:
            query = query.where(f.c.tag == tag)
        if since is not None:
            query = query.where(f.c.last_at >= since)
        return self._db.rows(query)


def fingerprint_of(pattern: str) -> str:
    return hashlib.sha256(pattern.encode()).hexdigest()[:FINGERPRINT_LENGTH]


def hour_counts_of(text: str) -> dict[int, int]:
    """Return the number of failures by the hour since 1970."""
    try:
        return {int(hour): int(count) for hour, count in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _new_group(key: tuple[str, str], failure: FailureCount, now: datetime) -> dict[str, Any]:
    tag, fingerprint = key
    return {
        "tag": tag,
        "fingerprint": fingerprint,
        "pattern": failure.pattern,
        "task_id": failure.task_id,
        "sample": failure.error,
        "runs": 0,
        "first_at": now,
        "last_at": now,
        "hours": "{}",
    }
