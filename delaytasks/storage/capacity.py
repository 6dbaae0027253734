"""How much room a tag's limits leave. What runs is counted, not kept: a place that a dead worker had is free as soon as
its row lapses."""

from __future__ import annotations

from typing import Any

from sqlalchemy import and_, bindparam, func, literal_column, select, update

from delaytasks.core.capacity import Room, StartPace
from delaytasks.core.policies import is_limit, is_rate
from delaytasks.core.states import Status
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus


class CapacityQueries:
    def __init__(self, schema: Schema) -> None:
        t, p = schema.tasks, schema.policies
        mine = and_(p.c.kind == "tag", p.c.name == bindparam("tag"))
        self._lock = select(p).where(mine).with_for_update()
        self._change = update(p).where(mine)
        runs = and_(
            t.c.status == literal_column(f"{Status.RUNNING:d}"), t.c.tag == bindparam("tag")
        )
        self._running: Any = select(literal_column("''"), func.count()).where(runs)
        key = func.coalesce(t.c.concurrency_key, "")
        self._running_by_key = select(key, func.count()).where(runs).group_by(key)
        self._now = select(db_now())

    def lock(self, on: Any, tag: str) -> Any:
        """The tag's policy, which is locked: nobody else counts until we are done."""
        return on.execute(self._lock, {"tag": tag}).first()

    def of(self, on: Any, policy: Any) -> Room:
        """Asked for with the policy locked."""
        if policy is None:
            return Room()
        # Another program may have stored limits that cannot be kept: they are none.
        concurrency = policy.concurrency if is_limit(policy.concurrency) else None
        per_key = policy.key_concurrency if is_limit(policy.key_concurrency) else None
        room = Room(per_key=per_key)
        if concurrency is not None or per_key is not None:
            query = self._running if per_key is None else self._running_by_key
            room.running = dict(on.execute(query, {"tag": policy.name}).all())
        if concurrency is not None:
            room.places = max(concurrency - sum(room.running.values()), 0)
        if policy.rate is not None and is_rate(policy.rate, policy.rate_period_s):
            room.keep_pace(*self._pace(on, policy))
        if policy.is_paused:
            room.places = 0
        return room

    def started(self, on: Any, policy: Any, room: Room, count: int, turn: str | None) -> None:
        if policy is None:
            return
        values: dict[str, Any] = {}
        if room.pace is not None and count:
            values["next_start"] = db_now_plus(room.ahead_s + count * room.pace.interval_s)
        if turn != policy.turn:
            values["turn"] = turn
        if values:
            on.execute(self._change.values(values), {"tag": policy.name})

    def _pace(self, on: Any, policy: Any) -> tuple[StartPace, float]:
        # Asked for by itself: a statement that waited for the lock knows the time at which it began.
        pace, now = (
            StartPace.of(policy.rate, policy.rate_period_s),
            on.execute(self._now).scalar_one(),
        )
        ahead_s = (
            (policy.next_start - now).total_seconds() if policy.next_start is not None else 0.0
        )
        if ahead_s > pace.most_ahead_s:
            ahead_s = pace.most_ahead_s
            on.execute(self._change.values(next_start=db_now_plus(ahead_s)), {"tag": policy.name})
        return pace, ahead_s
