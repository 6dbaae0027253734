"""Measures the free capacity of a limited tag.

Running rows are counted at each measurement, so the slot of a dead worker is free as soon as its
row is recovered.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import and_, bindparam, func, literal_column, select, update

from delaytasks.core.capacity import Capacity, StartPace
from delaytasks.core.policies import is_limit, is_rate
from delaytasks.core.states import Status
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.schema import Schema
from delaytasks.storage.types import db_now, db_now_plus


class CapacityQueries:
    def __init__(self, schema: Schema) -> None:
        t, p = schema.tasks, schema.policies
        of_tag = and_(p.c.kind == "tag", p.c.name == bindparam("tag"))
        self._lock = select(p).where(of_tag).with_for_update()
        self._change = update(p).where(of_tag)
        runs = and_(
            t.c.status == literal_column(f"{Status.RUNNING:d}"), t.c.tag == bindparam("tag")
        )
        self._running: Any = select(literal_column("''"), func.count()).where(runs)
        key = func.coalesce(t.c.concurrency_key, "")
        self._running_by_key = select(key, func.count()).where(runs).group_by(key)
        self._now = select(db_now())

    def lock_policy(self, on: Any, tag: str) -> Any:
        """Return the tag's policy, locked: meanwhile no other worker measures its capacity."""
        return on.execute(self._lock, {"tag": tag}).first()

    def measure(self, on: Any, policy: Any) -> Capacity:
        """Return the free capacity of the tag whose policy is locked."""
        if policy is None:
            return Capacity()
        # Another program may have stored limits that cannot be kept. They count as no limits.
        concurrency = policy.concurrency if is_limit(policy.concurrency) else None
        key_limit = policy.key_concurrency if is_limit(policy.key_concurrency) else None
        capacity = Capacity(key_limit=key_limit)
        if concurrency is not None or key_limit is not None:
            query = self._running if key_limit is None else self._running_by_key
            capacity.running = dict(on.execute(query, {"tag": policy.name}).all())
        if concurrency is not None:
            capacity.slots = max(concurrency - sum(capacity.running.values()), 0)
        if policy.rate is not None and is_rate(policy.rate, policy.rate_period_s):
            capacity.limit_rate(*self._pace(on, policy))
        if policy.is_paused:
            capacity.slots = 0
        return capacity

    def record_starts(
        self, on: Any, policy: Any, capacity: Capacity, count: int, turn: str | None
    ) -> None:
        """Write the time of the next start and the last key of the fair order into the policy."""
        if policy is None:
            return
        values: dict[str, Any] = {}
        if capacity.pace is not None and count:
            values["next_start"] = db_now_plus(capacity.ahead_s + count * capacity.pace.interval_s)
        if turn != policy.turn:
            values["turn"] = turn
        if values:
            self._change_policy(on, policy, values)

    def _pace(self, on: Any, policy: Any) -> tuple[StartPace, float]:
        pace = StartPace.of(policy.rate, policy.rate_period_s)
        # The statement that waited for the lock would return the time before its wait.
        now = on.execute(self._now).scalar_one()
        ahead_s = 0.0
        if policy.next_start is not None:
            ahead_s = (policy.next_start - now).total_seconds()
        if ahead_s > pace.max_ahead_s:
            ahead_s = pace.max_ahead_s
            self._change_policy(on, policy, {"next_start": db_now_plus(ahead_s)})
        return pace, ahead_s

    def _change_policy(self, on: Any, policy: Any, values: dict[str, Any]) -> None:
        changed = on.execute(self._change.values(values), {"tag": policy.name})
        check_row_count(changed.rowcount, 1, f"the policy of the tag {policy.name!r}")
