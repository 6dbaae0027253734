"""Waitlists of limited tags: rows without capacity are held, and wait until a slot is free.

A lock on the tag's policy keeps two workers from measuring its capacity simultaneously. The
transaction that has this lock waits for no other one: it skips the rows that other transactions
have locked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from delaytasks.core.policies import Policy, WaitlistsSeen
from delaytasks.limits.backlogs import LimitedBacklogs
from delaytasks.limits.capacity import CapacityMeter
from delaytasks.limits.queries import PolicyQueries, WaitlistQueries
from delaytasks.storage.claim_queries import Candidate
from delaytasks.storage.claims import HoldExcess
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
