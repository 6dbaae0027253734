"""Admits rows of a waitlist as far as there is capacity, or to slots that become free."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import Settlement
from delaytasks.core.policies import WAITLIST_RECHECK_S, WaitlistState
from delaytasks.core.task import DelayTask
from delaytasks.limits.capacity import Capacity
from delaytasks.limits.fair_order import FairOrder
from delaytasks.limits.queries import SlotTransfer
from delaytasks.limits.waitlist import Waitlist
from delaytasks.storage.claims import Claims


class _Gate:
    """Lets the threads of a process ask for a waitlist one after another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: When a thread found that no more tasks may start.
        self.closed_at = 0.0


class Admission:
    """The admitted rows of a process are claimed by its `claims`."""

    def __init__(self, waitlist: Waitlist, claims: Claims) -> None:
        self._waitlist = waitlist
        self._claims = claims
        self.settle = claims.settle
        self._db, schema = waitlist.database, waitlist.schema
        self._policies, self._capacity = waitlist.policies, waitlist.capacity
        self._queries = waitlist.queries
        self._fair_order = FairOrder(self._queries, claims.admit)
        self._slot_transfer = SlotTransfer(self._db, schema, claims.admitted, claims.columns)
        #: The concurrency key of the last row of each waitlist that this process admitted.
        self._turns: dict[tuple[str, str], str | None] = {}
        #: Waitlists that were empty when this process looked last.
        self._empty: set[tuple[str, str]] = set()
        self._gates: dict[tuple[str, str], _Gate] = {}

    def admit(
        self, queue: str, tag: str, limit: int, parallel: int = 1
    ) -> tuple[Sequence[DelayTask], WaitlistState | None]:
        """Admit waiting rows for which there is capacity.

        The state is None if the waitlist is empty.

        `parallel` is the number of the tag's tasks that this process starts simultaneously.
        """

        def work() -> tuple[Sequence[DelayTask], WaitlistState | None]:
            with self._db.begin() as connection:
                return self._admit(connection, queue, tag, limit, parallel)

        if (queue, tag) in self._empty and not self._db.autocommitted(
            lambda c: self._queries.has_entries(c, queue, tag)
        ):
            return [], None  # the usual case of a tag that does not reach its limit
        gate, asked_at = self._gates.setdefault((queue, tag), _Gate()), monotonic()
        with gate.lock:
            if gate.closed_at > asked_at:  # while this thread waited, another one found no capacity
                return [], WaitlistState(queue, tag, 0)
            tasks, state = self._db.run(work)
            if state is None or not state.open:
                gate.closed_at = monotonic()
            if state is None:
                self._empty.add((queue, tag))
            else:
                self._empty.discard((queue, tag))
            return tasks, state

    def _admit(
        self, on: Any, queue: str, tag: str, limit: int, parallel: int
    ) -> tuple[Sequence[DelayTask], WaitlistState | None]:
        policy = self._policies.lock(on, tag)
        capacity = self._capacity.measure(on, policy)
        share = capacity.share(limit, parallel)
        turn = policy and policy.turn
        admitted = self._fair_order.admit(on, queue, tag, share, capacity, turn)
        count = len(admitted.tasks)
        if not count:
            if not self._queries.has_entries(on, queue, tag):
                return [], None
            return [], WaitlistState(
                queue, tag, 0, WAITLIST_RECHECK_S if share else capacity.recheck_s
            )
        self._capacity.record_starts(on, policy, capacity, count, admitted.turn)
        self._turns[queue, tag] = admitted.turn
        left = capacity.free - share if count == share else 0
        return admitted.tasks, WaitlistState(queue, tag, left)

    def admit_to_slots(self, on: Any, queue: str, tag: str, slots: int) -> Sequence[DelayTask]:
        """Admit waiting rows to slots that become free in the same transaction.

        Returns no rows if the tag has limits other than the concurrency limit, which a free slot
        does not satisfy.
        """
        policy = self._waitlist.limited().get(tag)
        if policy is None or not policy.has_slots_only or slots <= 0:
            return []
        turn = self._turns.get((queue, tag))
        if slots == 1 and self._db.can.array_parameters:
            task = self._slot_transfer.admit(on, queue, tag, turn)
            if task is not None:
                self._turns[queue, tag] = task.concurrency_key or ""
                return [task]
        admitted = self._fair_order.admit(on, queue, tag, slots, Capacity(), turn)
        self._turns[queue, tag] = admitted.turn
        return admitted.tasks

    def settle_and_admit(
        self, settlements: Sequence[Settlement], queue: str, tag: str
    ) -> tuple[set[int], Sequence[DelayTask]]:
        """Settle tasks of a limited tag, and transfer their slots to the next ones of the waitlist.

        One transaction does both. The number of running tasks stays the same for every other
        worker, so the capacity need not be measured.
        """

        def work() -> tuple[set[int], Sequence[DelayTask]]:
            with self._db.begin() as connection:
                accepted = self._claims.settle(settlements, connection)
                return accepted, self.admit_to_slots(connection, queue, tag, len(accepted))

        return self._db.run(work)
