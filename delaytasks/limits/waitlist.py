"""Waitlists of limited tags: rows without capacity are held, and wait until a slot is free.

A lock on the tag's policy keeps two workers from measuring its capacity simultaneously. The
transaction that has this lock waits for no other one: it skips the rows that other transactions
have locked.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.policies import Policy, WaitlistsSeen
from delaytasks.limits.capacity import CapacityMeter
from delaytasks.limits.queries import BacklogQueries, PolicyQueries, WaitlistQueries
from delaytasks.storage.claim_queries import Candidate
from delaytasks.storage.claims import HoldExcess
from delaytasks.storage.database import Database
from delaytasks.storage.schema import Schema
from delaytasks.storage.store import Store

#: The tags that have limits, as far as this process knows.
Limited = Callable[[], Mapping[str, Policy]]


class Waitlist:
    def __init__(self, store: Store, limited: Limited) -> None:
        self.database = database = store.database
        self.schema = schema = store.schema
        self.limited = limited
        self.in_queue = store.waitlist_names.in_queue
        self.policies = PolicyQueries(schema)
        self.capacity = CapacityMeter(self.policies)
        self.queries = WaitlistQueries(database, schema)
        self._backlogs = LimitedBacklogs(database, schema, self.queries.hold)
        self.hold_overdue = self._backlogs.hold_overdue

    def hold_if_limited(self) -> HoldExcess | None:
        """Return what holds the rows beyond the limits; None while no tag has limits."""
        return self.hold_excess if self.limited() else None

    def hold_excess(
        self, on: Any, candidates: Sequence[Candidate]
    ) -> tuple[list[int], WaitlistsSeen]:
        """Return the ids of those of these locked rows that may start, and hold the other ones.

        A row of a tag whose waitlist is not empty is held as well, so that it starts after the
        waiting rows.
        """
        limited, due = self.limited(), dict[tuple[str, str], list[tuple[int, str]]]()
        if limited:
            for one in sorted(
                candidates, key=lambda one: (-one.priority, one.expected_time, one.id)
            ):
                if one.tag in limited:
                    of_tag = due.setdefault((one.tag, one.queue), [])
                    of_tag.append((one.id, one.concurrency_key or ""))
        held: set[int] = set()
        for tag, queue in sorted(due):  # all workers lock policies in this order
            rows = due[tag, queue]
            starting = self._starting(on, queue, tag, rows)
            held.update(id for id, _ in rows if id not in starting)
        self.queries.hold(on, held)
        seen = WaitlistsSeen(frozenset((queue, tag) for tag, queue in due), len(held))
        return [one.id for one in candidates if one.id not in held], seen

    def _starting(self, on: Any, queue: str, tag: str, rows: Sequence[tuple[int, str]]) -> set[int]:
        """Return the ids of the rows (id and key) that may start now."""
        policy, starting = self.policies.lock(on, tag), set[int]()
        if policy is not None and self.queries.has_entries(on, queue, tag):
            return starting
        capacity, taken = self.capacity.measure(on, policy), Counter[str]()
        share = capacity.share(len(rows))
        for id, key in rows:
            if len(starting) < share and taken[key] < capacity.for_key(key):
                starting.add(id)
                taken[key] += 1
        turn = policy and policy.turn
        self.capacity.record_starts(on, policy, capacity, len(starting), turn)
        return starting


#: Rows that one step holds.
HOLD_ROWS = 1000
#: A key with more than this share of a step has a backlog.
BACKLOG_SHARE = 0.1
#: Rows of other keys are looked for at most once in `OTHER_KEYS_REST_S`, and at most for a 20th of
#: the time, among the oldest rows.
OTHER_KEYS_REST_S, OTHER_KEYS_SHARE = 1.0, 20


class LimitedBacklogs:
    """`hold` holds the rows with these ids, which its transaction has locked."""

    def __init__(
        self, database: Database, schema: Schema, hold: Callable[[Any, Collection[int]], None]
    ) -> None:
        self._db = database
        self._hold = hold
        self._lock = threading.Lock()
        #: For each queue and priority: tags and keys with a backlog, and when to look for others.
        self._backlogs: dict[tuple[str, int], set[tuple[str, str]]] = {}
        self._looks_at: dict[tuple[str, int], float] = {}
        self._queries = BacklogQueries(database, schema)

    def hold_overdue(self, queue: str, priority: int, tags: Collection[str]) -> bool:
        """Hold one step of the overdue rows of these tags; return True if there may be more."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread does it
        try:
            level = queue, priority
            where = {"queue": queue, "priority": priority, "tags": sorted(tags), "most": HOLD_ROWS}
            known = self._backlogs.setdefault(level, set())
            backlogs = {of for of in known if of[0] in tags}
            is_look = bool(backlogs) and monotonic() >= self._looks_at.get(level, 0)
            if is_look:
                held = self._hold_others(level, backlogs, where)
            else:
                held = self._hold_step(partial(self._queries.due, where=where))
            known |= {
                of for of, count in Counter(held).items() if count > BACKLOG_SHARE * HOLD_ROWS
            }
            return is_look or len(held) == HOLD_ROWS
        finally:
            self._lock.release()

    def _hold_others(
        self, level: tuple[str, int], backlogs: set[tuple[str, str]], where: dict[str, Any]
    ) -> list[tuple[str, str]]:
        """Hold rows of the keys that have no backlog."""
        began = monotonic()
        ids = self._db.autocommitted(lambda c: self._queries.others(c, where, backlogs))
        held = self._hold_step(partial(self._queries.named, where=where, ids=ids)) if ids else []
        if len(held) < HOLD_ROWS:  # all others are held, or other transactions have locked them
            self._backlogs[level] -= backlogs
            self._looks_at[level] = monotonic() + max(
                OTHER_KEYS_REST_S, OTHER_KEYS_SHARE * (monotonic() - began)
            )
        return held

    def _hold_step(self, lock: Callable[[Any], Sequence[Any]]) -> list[tuple[str, str]]:
        """Return the tag and the key of each row that was held."""

        def work(connection: Any) -> list[tuple[str, str]]:
            found = lock(connection)
            self._hold(connection, [row.id for row in found])
            return [(row.tag, row.concurrency_key) for row in found]

        return self._db.transaction(work)
