"""Admits waiting rows of limited tags: capacity, fair order, and the waitlist that holds the
others."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from delaytasks.db.claims import Candidate, Claims, HoldExcess
from delaytasks.db.database import Database
from delaytasks.db.schema import Schema
from delaytasks.db.store import Store
from delaytasks.limits.limit_queries import (
    BacklogQueries,
    PolicyQueries,
    SlotTransfer,
    WaitlistQueries,
)
from delaytasks.model.clock import monotonic
from delaytasks.model.policies import WAITLIST_RECHECK_S, Policy, WaitlistsSeen, WaitlistState
from delaytasks.model.task import DelayedTask, Settlement

# -- The capacity of a limited tag: how many of its waiting tasks may start now -------------------

# Running rows are counted at each measurement, so the slot of a dead worker is free as soon as its
# row is recovered.


#: The number of slots, or of starts, of a tag without that limit.
UNLIMITED = 1_000_000_000
#: One start in `BURST_SHARE` may follow another without a distance, for late workers.
BURST_SHARE = 10
#: Distances are longer by this factor than the rate requires, since a start may come a little later
#: than it was allowed.
DISTANCE_FACTOR = 1.03
#: The number of processes that a process leaves slots for.
SHARING_PROCESSES = 8


class StartPace(NamedTuple):
    """A rate limit as a distance between starts, and the number of starts that need no distance.

    A window of `period_s` has at most `rate` starts: those of one burst, and the others at their
    distances.
    """

    interval_s: float
    burst: int

    @classmethod
    def of(cls, rate: int, period_s: float) -> StartPace:
        burst = 1 + rate // BURST_SHARE
        return cls(period_s * DISTANCE_FACTOR / (rate - burst + 1), burst)

    @property
    def max_ahead_s(self) -> float:
        """The largest value of `ahead_s` at this pace; a larger one comes from an earlier rate."""
        return self.burst * self.interval_s

    def starts(self, ahead_s: float) -> int:
        """Return how many tasks may start now, if the next start is due in `ahead_s`."""
        return max(int(self.burst - ahead_s / self.interval_s + 1e-6), 0)

    def wait_s(self, ahead_s: float) -> float:
        """Return the time until one task may start."""
        return max(ahead_s - (self.burst - 1) * self.interval_s, 0.0)


@dataclass
class Capacity:
    """What the limits of a tag leave free."""

    #: Free slots of the concurrency limit.
    slots: int = UNLIMITED
    #: The concurrency limit of each key; tasks without a key are not counted.
    key_limit: int | None = None
    #: The number of running tasks of each key.
    running: Mapping[str, int] = field(default_factory=dict)
    recheck_s: float = WAITLIST_RECHECK_S
    pace: StartPace | None = None
    #: Starts that the rate limit allows now.
    starts: int = UNLIMITED
    #: The time until the next start is due.
    ahead_s: float = 0.0

    @property
    def free(self) -> int:
        return min(self.slots, self.starts)

    def share(self, wanted: int, parallel: int = 1) -> int:
        """Return how many tasks one process may take.

        Beyond the `parallel` tasks that the process starts simultaneously, its tasks run one after
        another, so it leaves the other slots to processes that may be idle.
        """
        if self.slots <= 0:
            return 0
        return min(wanted, self.starts, self.slots, max(self.slots // SHARING_PROCESSES, parallel))

    def for_key(self, key: str) -> int:
        if self.key_limit is None or not key:
            return UNLIMITED
        return max(self.key_limit - self.running.get(key, 0), 0)

    @property
    def full_keys(self) -> list[str]:
        return [key for key in self.running if self.for_key(key) <= 0]

    def limit_rate(self, pace: StartPace, ahead_s: float) -> None:
        self.pace, self.ahead_s = pace, max(ahead_s, 0.0)
        self.starts = pace.starts(self.ahead_s)
        if not self.starts:
            self.recheck_s = min(self.recheck_s, max(pace.wait_s(self.ahead_s), 0.001))


class CapacityMeter:
    """Measures the capacity of a tag whose policy is locked."""

    def __init__(self, policies: PolicyQueries) -> None:
        self._policies = policies

    def measure(self, on: Any, policy: Any) -> Capacity:
        if policy is None:
            return Capacity()
        concurrency, key_limit = policy.concurrency, policy.concurrency_per_key
        capacity = Capacity(key_limit=key_limit)
        if concurrency is not None or key_limit is not None:
            capacity.running = self._policies.running(on, policy.name, key_limit is not None)
        if concurrency is not None:
            capacity.slots = max(concurrency - sum(capacity.running.values()), 0)
        if policy.rate is not None:
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
            values["next_start"] = capacity.ahead_s + count * capacity.pace.interval_s
        if turn != policy.turn:
            values["turn"] = turn
        if values:
            self._policies.change(on, policy.name, values)

    def _pace(self, on: Any, policy: Any) -> tuple[StartPace, float]:
        pace, ahead_s = StartPace.of(policy.rate, policy.rate_period_s), 0.0
        if policy.next_start is not None:
            ahead_s = (policy.next_start - self._policies.now(on)).total_seconds()
        if ahead_s > pace.max_ahead_s:
            ahead_s = pace.max_ahead_s
            self._policies.change(on, policy.name, {"next_start": ahead_s})
        return pace, ahead_s


# -- The fair order of a waitlist: keys take turns, and each starts by priority and due time ------


#: Entries that are read beyond those that may start, since other transactions may have locked the
#: first ones.
EXTRA_ENTRIES = 20
#: Admits those of the ids and versions of held rows that no other transaction has locked.
Admit = Callable[[Any, Sequence[tuple[int, int]]], list[DelayedTask]]


class Admitted(NamedTuple):
    tasks: list[DelayedTask]
    #: The key of the last one, after which the next turn goes on.
    turn: str | None


class _Removed(NamedTuple):
    """The result of removing entries from a waitlist."""

    tasks: list[DelayedTask]
    #: The number of entries whose row no longer waits here.
    stale: int
    #: The only task is a recovered one, which runs alone because it may kill its worker.
    is_alone: bool


class FairOrder:
    """Admits rows of a waitlist, whose column `limit_key` holds the limit key."""

    def __init__(self, queries: WaitlistQueries, admit: Admit) -> None:
        self._queries = queries
        self._admit = admit

    def admit(
        self, on: Any, queue: str, tag: str, share: int, capacity: Capacity, turn: str | None
    ) -> Admitted:
        """Take the next `share` rows off the waitlist; `turn` is the key of the last row before."""
        if share <= 0:
            return Admitted([], turn)
        where = {"queue": queue, "tag": tag, "full": capacity.full_keys}
        if share == 1:
            return self._admit_one(on, where, turn)
        return self._admit_several(on, where, share, capacity, turn)

    def _admit_one(self, on: Any, where: dict[str, Any], turn: str | None) -> Admitted:
        """Take the first row of the key after `turn`."""
        for after in (None,) if turn is None else (turn, None):
            is_new = True
            while is_new:
                rows = self._queries.first(on, where, after, 1 + EXTRA_ENTRIES)
                is_new = False
                for key, entries in groupby(rows, attrgetter("limit_key")):
                    removed = self._remove(on, where, list(entries), 1, True)
                    if removed.tasks:
                        return Admitted(removed.tasks, key)
                    is_new = is_new or removed.stale > 0
        return Admitted([], turn)

    def _admit_several(
        self, on: Any, where: dict[str, Any], share: int, capacity: Capacity, turn: str | None
    ) -> Admitted:
        """Take the same number of rows of each key, from the key after `turn` on."""
        admitted: list[DelayedTask] = []
        keys = self._keys(on, where, share, turn)
        for number, key in enumerate(keys):
            quota = -(-(share - len(admitted)) // (len(keys) - number))
            quota = min(quota, capacity.for_key(key))
            most = quota + EXTRA_ENTRIES
            while entries := self._queries.first_of_key(on, where, key, most):
                removed = self._remove(on, where, entries, quota, not admitted)
                admitted += removed.tasks
                if removed.is_alone:
                    return Admitted(admitted, key)
                if removed.tasks or not removed.stale:
                    break
            turn = key
        return Admitted(admitted, turn)

    def _keys(self, on: Any, where: dict[str, Any], most: int, turn: str | None) -> list[str]:
        """Return at most `most` keys whose turn is next."""
        keys: list[str] = []
        while len(keys) < most:
            key = self._queries.next_key(on, where, turn)
            if key is None and turn is not None:
                key = self._queries.next_key(on, where, None)
            if key is None or key in keys:
                break
            keys.append(key)
            turn = key
        return keys

    def _remove(
        self, on: Any, where: dict[str, Any], entries: Sequence[Any], quota: int, may_be_alone: bool
    ) -> _Removed:
        """Admit at most `quota` of these entries, and remove their entries and the stale ones."""
        stale = [entry for entry in entries if entry.is_gone]
        later = [entry for entry in entries if entry.is_later]
        # Rows that are no longer due are left to the sweep.
        released = self._queries.release(on, [entry.task_id for entry in later])
        stale += [entry for entry in later if entry.task_id in released]
        ready = [entry for entry in entries if not entry.is_gone and not entry.is_later]
        is_alone = bool(ready) and ready[0].lapses > 0 and may_be_alone
        ready = ready[:1] if is_alone else [entry for entry in ready if not entry.lapses]
        admitted: list[DelayedTask] = []
        while ready and len(admitted) < quota:
            wanted = quota - len(admitted)
            some, ready = ready[:wanted], ready[wanted:]
            admitted += self._admit(on, [(entry.task_id, entry.version) for entry in some])
        ids = {task.id for task in admitted}
        done = stale + [entry for entry in entries if entry.task_id in ids]
        self._queries.remove(on, where, done)
        return _Removed(admitted, len(stale), is_alone and bool(admitted))


# -- Waitlists of limited tags: rows without capacity are held, and wait until a slot is free -----

# A lock on the tag's policy keeps two workers from measuring its capacity simultaneously. The
# transaction that has this lock waits for no other one: it skips the rows that other transactions
# have locked.


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
                    of_tag.append((one.id, one.limit_key or ""))
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
            return [(row.tag, row.limit_key) for row in found]

        return self._db.transaction(work)


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
        #: The limit key of the last row of each waitlist that this process admitted.
        self._turns: dict[tuple[str, str], str | None] = {}
        #: Waitlists that were empty when this process looked last.
        self._empty: set[tuple[str, str]] = set()
        self._gates: dict[tuple[str, str], _Gate] = {}

    def admit(
        self, queue: str, tag: str, limit: int, parallel: int = 1
    ) -> tuple[Sequence[DelayedTask], WaitlistState | None]:
        """Admit waiting rows for which there is capacity.

        The state is None if the waitlist is empty.

        `parallel` is the number of the tag's tasks that this process starts simultaneously.
        """

        def work() -> tuple[Sequence[DelayedTask], WaitlistState | None]:
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
    ) -> tuple[Sequence[DelayedTask], WaitlistState | None]:
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

    def admit_to_slots(self, on: Any, queue: str, tag: str, slots: int) -> Sequence[DelayedTask]:
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
                self._turns[queue, tag] = task.limit_key or ""
                return [task]
        admitted = self._fair_order.admit(on, queue, tag, slots, Capacity(), turn)
        self._turns[queue, tag] = admitted.turn
        return admitted.tasks

    def settle_and_admit(
        self, settlements: Sequence[Settlement], queue: str, tag: str
    ) -> tuple[set[int], Sequence[DelayedTask]]:
        """Settle tasks of a limited tag, and transfer their slots to the next ones of the waitlist.

        One transaction does both. The number of running tasks stays the same for every other
        worker, so the capacity need not be measured.
        """

        def work() -> tuple[set[int], Sequence[DelayedTask]]:
            with self._db.begin() as connection:
                accepted = self._claims.settle(settlements, connection)
                return accepted, self.admit_to_slots(connection, queue, tag, len(accepted))

        return self._db.run(work)
