"""Waitlists of limited tags: rows without capacity are held, and wait until a slot is free.

A lock on the tag's policy keeps two workers from measuring its capacity simultaneously. The
transaction that has this lock waits for no other one: it skips the rows that other transactions
have locked.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import and_, bindparam, func, insert, literal, select, update

from delaytasks.core.capacity import LOOK_S, Capacity, WaitlistState
from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import WaitlistsSeen
from delaytasks.core.policies import Policy
from delaytasks.core.states import MOVES
from delaytasks.core.task import DelayTask
from delaytasks.storage.capacity import CapacityQueries
from delaytasks.storage.database import Database
from delaytasks.storage.fair_order import Admit, FairOrder
from delaytasks.storage.limited_backlogs import LimitedBacklogs
from delaytasks.storage.queue_levels import steps
from delaytasks.storage.row_counts import check_row_count
from delaytasks.storage.rows import listed, next_version
from delaytasks.storage.schema import Schema
from delaytasks.storage.slot_transfer import SlotTransfer
from delaytasks.storage.types import db_now

#: The tags that have limits, as far as this process knows.
Limited = Callable[[], Mapping[str, Policy]]
#: Waitlists of a queue that one call of `in_queue` returns: each of them costs a statement.
MAX_WAITLISTS = 100


class Candidate(NamedTuple):
    """A due row that a claim has locked; the fields are named as the columns."""

    id: int
    tag: str
    queue: str
    priority: int
    expected_time: datetime
    concurrency_key: str | None


class _Gate:
    """Lets the threads of a process ask for a waitlist one after another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: When a thread found that no more tasks may start.
        self.closed_at = 0.0


class Waitlist:
    def __init__(
        self,
        database: Database,
        schema: Schema,
        admit: Admit,
        slot_transfer: SlotTransfer,
        limited: Limited,
    ) -> None:
        self._db = database
        self._slot_transfer = slot_transfer
        self.limited = limited
        t, self._entry = schema.tasks, schema.lines
        entry = self._entry
        self._capacity = CapacityQueries(schema)
        self._fair_order = FairOrder(database, schema, admit)
        #: The concurrency key of the last row of each waitlist that this process admitted.
        self._turns: dict[tuple[str, str], str | None] = {}
        #: The tag of each queue after which the next call of `in_queue` goes on.
        self._after: dict[str, str] = {}
        #: Waitlists that were empty when this process looked last.
        self._empty: set[tuple[str, str]] = set()
        self._gates: dict[tuple[str, str], _Gate] = {}
        self._limited_backlogs = LimitedBacklogs(database, schema, self._hold)
        named, key = listed(database, t.c.id, "ids"), func.coalesce(t.c.concurrency_key, "")
        position = (entry.c.lane, entry.c.place, entry.c.due, entry.c.task_id, entry.c.version)
        values = select(
            t.c.queue, t.c.tag, key, -t.c.priority, t.c.expected_time, t.c.id, t.c.version
        ).where(named)
        self._insert = insert(entry).from_select([entry.c.queue, entry.c.tag, *position], values)
        held = {
            "status": int(MOVES["hold"].target),
            "version": next_version(t.c.version),
            "update_time": db_now(),
        }
        self._to_held = update(t).values(held).where(named)
        of_waitlist = and_(entry.c.queue == bindparam("queue"), entry.c.tag == bindparam("tag"))
        self._any = select(literal(1)).select_from(entry).where(of_waitlist).limit(1)

    def in_queue(self, queue: str) -> set[tuple[str, str]]:
        """Return `MAX_WAITLISTS` waitlists of a queue; the next call returns the next ones."""
        entry, after = self._entry, self._after.get(queue)
        here = entry.c.queue == queue
        later = here if after is None else and_(here, entry.c.tag > after)
        tags = self._db.alone(lambda c: list(islice(steps(c, entry.c.tag, later), MAX_WAITLISTS)))
        if len(tags) == MAX_WAITLISTS:
            self._after[queue] = tags[-1]
        elif self._after.pop(queue, None) is not None and not tags:
            return self.in_queue(queue)  # the last call returned the last ones
        return {(queue, tag) for tag in tags}

    # -- due rows ---------------------------------------------------------------------------------

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
        self._hold(on, held)
        seen = WaitlistsSeen(frozenset((queue, tag) for tag, queue in due), len(held))
        return [one.id for one in candidates if one.id not in held], seen

    def hold_overdue(self, queue: str, priority: int, tags: Collection[str]) -> bool:
        """Hold one step of the overdue rows of these tags; return True if there may be more."""
        return self._limited_backlogs.hold_overdue(queue, priority, tags)

    def _hold(self, on: Any, ids: Collection[int]) -> None:
        """Hold rows that this transaction has locked, and enter them into their waitlists."""
        if not ids:
            return
        named = {"ids": sorted(ids)}
        for statement in (self._to_held, self._insert):
            check_row_count(on.execute(statement, named).rowcount, len(ids), "rows to hold")

    def _starting(self, on: Any, queue: str, tag: str, rows: Sequence[tuple[int, str]]) -> set[int]:
        """Return the ids of the rows (id and key) that may start now."""
        policy, starting = self._capacity.lock_policy(on, tag), set[int]()
        if policy is not None and self._is_waited_for(on, queue, tag):
            return starting
        capacity, taken = self._capacity.measure(on, policy), Counter[str]()
        share = capacity.share(len(rows))
        for id, key in rows:
            if len(starting) < share and taken[key] < capacity.for_key(key):
                starting.add(id)
                taken[key] += 1
        turn = policy and policy.turn
        self._capacity.record_starts(on, policy, capacity, len(starting), turn)
        return starting

    def _is_waited_for(self, on: Any, queue: str, tag: str) -> bool:
        return on.execute(self._any, {"queue": queue, "tag": tag}).first() is not None

    # -- waiting rows -----------------------------------------------------------------------------

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

        if (queue, tag) in self._empty and not self._db.alone(
            lambda c: self._is_waited_for(c, queue, tag)
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
        policy = self._capacity.lock_policy(on, tag)
        capacity = self._capacity.measure(on, policy)
        share = capacity.share(limit, parallel)
        turn = policy and policy.turn
        admitted = self._fair_order.admit(on, queue, tag, share, capacity, turn)
        count = len(admitted.tasks)
        if not count:
            if not self._is_waited_for(on, queue, tag):
                return [], None
            return [], WaitlistState(queue, tag, 0, LOOK_S if share else capacity.look_s)
        self._capacity.record_starts(on, policy, capacity, count, admitted.turn)
        self._turns[queue, tag] = admitted.turn
        left = capacity.free - share if count == share else 0
        return admitted.tasks, WaitlistState(queue, tag, left)

    def admit_to_slots(self, on: Any, queue: str, tag: str, slots: int) -> Sequence[DelayTask]:
        """Admit waiting rows to slots that become free in the same transaction.

        Returns no rows if the tag has limits other than the concurrency limit, which a free slot
        does not satisfy.
        """
        policy = self.limited().get(tag)
        if policy is None or not policy.has_places_only or slots <= 0:
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
