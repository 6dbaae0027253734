"""Admits waiting rows of limited tags: capacity, fair order, and the waitlists of all others.

A claim asks `Admission.hold_excess` which of the rows that it has locked may start. The others are
HELD, and each has an entry in the waitlist of its queue and tag. Free slots go to the waitlist
(`admit`): the tag's capacity is measured, and its keys take turns, each by priority and due time.
When a row of the waitlist ends, the next one gets its slot in the same transaction
(`settle_and_admit`).

A lock on the tag's policy keeps two workers from measuring its capacity simultaneously. The
transaction that has this lock waits for no other one: it skips the rows that other transactions
have locked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    and_,
    bindparam,
    delete,
    func,
    insert,
    literal,
    literal_column,
    select,
    tuple_,
    update,
)

from delaytasks.db.claims import Claims
from delaytasks.db.database import Database
from delaytasks.db.schema import Schema, check_row_count, listed, listing, moved
from delaytasks.db.store import Store
from delaytasks.db.types import db_now, db_now_plus, unindexed
from delaytasks.events import Events
from delaytasks.model.errors import StoreError, StoreUnavailableError
from delaytasks.model.moves import MOVES, Status
from delaytasks.model.policies import WAITLIST_RECHECK_S, PolicyCache, WaitlistsSeen, WaitlistState
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


# -- The SQL: policies of limited tags, and the entries of waitlists -------------------------------


_HELD = int(MOVES["admit"].source)


class LimitQueries:
    def __init__(self, database: Database, schema: Schema) -> None:
        t, p, entry = schema.tasks, schema.policies, schema.waitlists
        named, task_key = listed(database, t.c.id, "ids"), func.coalesce(t.c.limit_key, "")
        # The policy of a limited tag, and the tasks of the tag that run.
        of_tag = and_(p.c.kind == "tag", p.c.name == bindparam("tag"))
        self._lock_policy = select(p).where(of_tag).with_for_update()
        self._change_policy = update(p).where(of_tag)
        runs = and_(
            t.c.status == literal_column(f"{Status.RUNNING:d}"), t.c.tag == bindparam("tag")
        )
        self._running: Any = select(literal_column("''"), func.count()).where(runs)
        by_key = select(task_key, func.count())
        self._running_by_key = by_key.where(runs).group_by(task_key)
        self._now = select(db_now())
        # The entries of waitlists, and their rows.
        key = entry.c.limit_key
        position = (key, entry.c.place, entry.c.due, entry.c.task_id, entry.c.version)
        values = select(
            t.c.queue, t.c.tag, task_key, -t.c.priority, t.c.expected_time, t.c.id, t.c.version
        ).where(named)
        self._insert = insert(entry).from_select([entry.c.queue, entry.c.tag, *position], values)
        self._hold, self._release = (
            update(t).values(moved(t, name)).where(named) for name in ("hold", "release")
        )
        # A locked row is skipped: its transaction may postpone it further.
        held = select(t.c.id).where(named, unindexed(t.c.status) == _HELD)
        self._lock_held = held.with_for_update(skip_locked=True)
        in_waitlist = and_(entry.c.queue == bindparam("queue"), entry.c.tag == bindparam("tag"))
        self._any = select(literal(1)).select_from(entry).where(in_waitlist).limit(1)
        self._delete = delete(entry).where(in_waitlist, tuple_(*position).in_(listing("positions")))
        is_gone = t.c.id.is_(None).label("is_gone")
        is_later = (t.c.expected_time > db_now()).label("is_later")
        first = (
            select(*position, is_gone, is_later, t.c.lapses)
            .select_from(entry.outerjoin(t, _waits(schema)))
            .where(in_waitlist)
            .order_by(key, entry.c.place, entry.c.due, entry.c.task_id)
            .limit(bindparam("most"))
        )
        self._first_of_key = first.where(key == bindparam("limit_key"))
        keys = select(key).where(in_waitlist).order_by(key).limit(1)
        not_full = key.not_in(listing("full"))
        after = not_full, key > bindparam("after")
        # Whether there was a turn before.
        self._next_key = {False: keys.where(not_full), True: keys.where(*after)}
        self._first = {False: first.where(not_full), True: first.where(*after)}

    def lock_policy(self, on: Connection, tag: str) -> Any:
        """Return the tag's policy, locked: meanwhile no other worker measures its capacity."""
        return on.execute(self._lock_policy, {"tag": tag}).first()

    def running(self, on: Connection, tag: str, by_key: bool) -> dict[str, int]:
        """Count the running tasks of each limit key, or all of them under the key ''."""
        query = self._running_by_key if by_key else self._running
        return dict(on.execute(query, {"tag": tag}).all())

    def now(self, on: Connection) -> datetime:
        """Return the time of the database; a statement that waited for a lock began earlier."""
        now: datetime = on.execute(self._now).scalar_one()
        return now

    def change_policy(self, on: Connection, tag: str, values: Mapping[str, Any]) -> None:
        """Change columns of the policy; `next_start` is given in seconds from now."""
        if "next_start" in values:
            values = {**values, "next_start": db_now_plus(values["next_start"])}
        changed = on.execute(self._change_policy.values(values), {"tag": tag})
        check_row_count(changed.rowcount, 1, f"the policy of the tag {tag!r}")

    def hold(self, on: Connection, ids: Collection[int]) -> None:
        """Hold rows that this transaction has locked, and enter them into their waitlists."""
        if not ids:
            return
        named = {"ids": sorted(ids)}
        for statement in (self._hold, self._insert):
            check_row_count(on.execute(statement, named).rowcount, len(ids), "rows to hold")

    def release(self, on: Connection, ids: Sequence[int]) -> set[int]:
        """Release those of these held rows that no other transaction has locked."""
        if not ids:
            return set()
        locked = set(on.execute(self._lock_held, {"ids": ids}).scalars())
        if locked:
            released = on.execute(self._release, {"ids": sorted(locked)})
            check_row_count(released.rowcount, len(locked), "rows to release from a waitlist")
        return locked

    def has_entries(self, on: Connection, queue: str, tag: str) -> bool:
        return on.execute(self._any, {"queue": queue, "tag": tag}).first() is not None

    def next_key(self, on: Connection, where: Mapping[str, Any], after: str | None) -> str | None:
        """Return the first key after `after`, except those in `where["full"]`."""
        query = self._next_key[after is not None]
        key: str | None = on.execute(query, {**where, "after": after}).scalar()
        return key

    def first(
        self, on: Connection, where: Mapping[str, Any], after: str | None, most: int
    ) -> Sequence[Any]:
        """Return the first entries of the keys after `after`, except those in `where["full"]`."""
        query = self._first[after is not None]
        return on.execute(query, {**where, "after": after, "most": most}).all()

    def first_of_key(
        self, on: Connection, where: Mapping[str, Any], key: str, most: int
    ) -> Sequence[Any]:
        return on.execute(self._first_of_key, {**where, "limit_key": key, "most": most}).all()

    def remove(self, on: Connection, where: Mapping[str, Any], entries: Sequence[Any]) -> None:
        """Remove entries that one of the queries above has returned."""
        # No check of the row count: another transaction may have removed a stale entry.
        if entries:
            on.execute(
                self._delete, {**where, "positions": [tuple(entry[:5]) for entry in entries]}
            )


def _waits(schema: Schema) -> Any:
    """Return the condition that the row of an entry is held, in the version of the entry."""
    t, entry = schema.tasks, schema.waitlists
    is_held = unindexed(t.c.status) == _HELD
    return and_(t.c.id == entry.c.task_id, t.c.version == entry.c.version, is_held)


# -- Admission: which rows start now, and which one is the next of a waitlist ---------------------


#: Entries that are read beyond those that may start, since other transactions may have locked the
#: first ones.
EXTRA_ENTRIES = 20


class Admission:
    """Admits rows, and holds those that the claims of its process have locked."""

    def __init__(self, store: Store, claims: Claims, policies: PolicyCache, events: Events) -> None:
        self._db = store.database
        self.claims, self._policies, self._events = claims, policies, events
        claims.hold_excess = self.hold_excess
        self._hold_claimed = store.paused_rows.hold_claimed
        self._queries = LimitQueries(store.database, store.schema)
        #: Returns the waitlists of a queue.
        self.in_queue = store.paused_rows.waitlists_in
        #: The limit key of the last row of each waitlist that this process admitted.
        self._turns: dict[tuple[str, str], str | None] = {}
        #: Waitlists that were empty when this process looked last.
        self._empty: set[tuple[str, str]] = set()

    # -- rows that a claim has locked -------------------------------------------------------------

    def hold_excess(
        self, on: Any, candidates: Sequence[DelayedTask]
    ) -> tuple[list[int], WaitlistsSeen]:
        """Return the ids of those of these locked rows that may start, and hold the other ones.

        A row of a tag whose waitlist is not empty is held as well, so that it starts after the
        waiting rows.
        """
        limited, due = self._policies.known.limited, dict[tuple[str, str], list[tuple[int, str]]]()
        if limited:
            for one in sorted(
                candidates, key=lambda one: (-one.priority, one.expected_time, one.id)
            ):
                if one.tag in limited:
                    of_tag = due.setdefault((one.tag, one.queue), [])
                    of_tag.append((one.id, one.limit_key or ""))
        held: set[int] = set()
        # A tag may have rows in several queues. Those that start are not RUNNING before all of them
        # are chosen.
        begun = defaultdict[str, Counter[str]](Counter)
        for tag, queue in sorted(due):  # all workers lock policies in this order
            rows = due[tag, queue]
            starting = self._starting(on, queue, tag, rows, begun[tag])
            held.update(id for id, _ in rows if id not in starting)
        self._queries.hold(on, held)
        seen = WaitlistsSeen(frozenset((queue, tag) for tag, queue in due), len(held))
        return [one.id for one in candidates if one.id not in held], seen

    def _starting(
        self, on: Any, queue: str, tag: str, rows: Sequence[tuple[int, str]], begun: Counter[str]
    ) -> set[int]:
        """Return the ids of the rows (id and key) that may start now, and add them to `begun`, the
        rows of the tag that start in this transaction, by key."""
        policy, starting = self._queries.lock_policy(on, tag), set[int]()
        if policy is not None and self._queries.has_entries(on, queue, tag):
            return starting
        capacity, taken = self._measure(on, policy, begun), Counter[str]()
        share = capacity.share(len(rows))
        for id, key in rows:
            if len(starting) < share and taken[key] < capacity.for_key(key):
                starting.add(id)
                taken[key] += 1
        begun.update(taken)
        turn = policy and policy.turn
        self._record_starts(on, policy, capacity, len(starting), turn)
        return starting

    def _measure(self, on: Any, policy: Any, begun: Mapping[str, int] = {}) -> Capacity:
        """Measure the capacity of a tag whose policy is locked, without what `begun` takes."""
        if policy is None:
            return Capacity()
        concurrency, key_limit = policy.concurrency, policy.concurrency_per_key
        capacity = Capacity(key_limit=key_limit)
        if concurrency is not None or key_limit is not None:
            running = self._queries.running(on, policy.name, key_limit is not None)
            capacity.running = Counter(running) + Counter(begun)
        if concurrency is not None:
            capacity.slots = max(concurrency - sum(capacity.running.values()), 0)
        if policy.rate is not None:
            pace, ahead_s = StartPace.of(policy.rate, policy.rate_period_s), 0.0
            if policy.next_start is not None:
                ahead_s = (policy.next_start - self._queries.now(on)).total_seconds()
            if ahead_s > pace.max_ahead_s:
                ahead_s = pace.max_ahead_s
                self._queries.change_policy(on, policy.name, {"next_start": ahead_s})
            capacity.limit_rate(pace, ahead_s)
        if policy.is_paused:
            capacity.slots = 0
        return capacity

    def _record_starts(
        self, on: Any, policy: Any, capacity: Capacity, count: int, turn: str | None
    ) -> None:
        """Write the time of the next start and the last key of the fair order into the policy."""
        if policy is None:
            return
        values: dict[str, Any] = {}
        if capacity.pace is not None and count:
            capacity.limit_rate(capacity.pace, capacity.ahead_s + count * capacity.pace.interval_s)
            values["next_start"] = capacity.ahead_s
        if turn != policy.turn:
            values["turn"] = turn
        if values:
            self._queries.change_policy(on, policy.name, values)

    # -- rows that a claim got --------------------------------------------------------------------

    def hold_paused(
        self, tasks: Sequence[DelayedTask]
    ) -> tuple[Sequence[DelayedTask], Sequence[Settlement]]:
        """Hold the paused tasks.

        Return the tasks to run, and settlements of paused tasks that could not be held.
        """
        policies = self._policies.known
        paused = [task for task in tasks if policies.pauses(task.tag, task.queue)]
        if not paused:
            return tasks, ()
        try:
            held = self._hold_claimed(paused)
        except StoreError as error:
            self._events.emit("chunk.failed", error=str(error), cause=error)
            allowed = [task for task in tasks if not policies.pauses(task.tag, task.queue)]
            return allowed, [Settlement(task, "give_back") for task in paused]
        if held:
            self._events.emit("task.held", count=len(held))
        # A paused task that was not held has been resumed since the policies were read, so it runs.
        return [task for task in tasks if task.id not in held], ()

    # -- free slots -------------------------------------------------------------------------------

    def admit(
        self, queue: str, tag: str, limit: int, parallel: int = 1
    ) -> tuple[Sequence[DelayedTask], WaitlistState | None]:
        """Admit waiting rows for which there is capacity.

        The state is None if the waitlist is empty.

        `parallel` is the number of the tag's tasks that this process starts simultaneously. If
        another transaction has locked the tag's policy for seconds, no row is admitted now.
        """

        if (queue, tag) in self._empty and not self._db.autocommitted(
            lambda c: self._queries.has_entries(c, queue, tag)
        ):
            return [], None  # the usual case of a tag that does not reach its limit
        try:
            tasks, state = self._db.transaction(
                lambda c: self._admit(c, queue, tag, limit, parallel)
            )
        except StoreUnavailableError as error:
            if not error.is_locked:
                raise
            self._events.emit("chunk.failed", error=str(error), cause=error)
            return [], WaitlistState(queue, tag, 0, WAITLIST_RECHECK_S)
        if state is None:
            self._empty.add((queue, tag))
        else:
            self._empty.discard((queue, tag))
        return tasks, state

    def _admit(
        self, on: Any, queue: str, tag: str, limit: int, parallel: int
    ) -> tuple[Sequence[DelayedTask], WaitlistState | None]:
        policy = self._queries.lock_policy(on, tag)
        capacity = self._measure(on, policy)
        share = capacity.share(limit, parallel)
        turn = policy and policy.turn
        admitted, turn = self._take(on, queue, tag, share, capacity, turn)
        count = len(admitted)
        if not count:
            if not self._queries.has_entries(on, queue, tag):
                return [], None
            return [], WaitlistState(
                queue, tag, 0, WAITLIST_RECHECK_S if share else capacity.recheck_s
            )
        left = capacity.free - share if count == share else 0
        self._record_starts(on, policy, capacity, count, turn)
        self._turns[queue, tag] = turn
        return admitted, WaitlistState(queue, tag, left, capacity.recheck_s)

    def settle_and_admit(
        self, settlements: Sequence[Settlement], queue: str, tag: str
    ) -> tuple[set[int], Sequence[DelayedTask]]:
        """Settle tasks of a limited tag, and transfer their slots to the next ones of the waitlist.

        One transaction does both. The number of running tasks stays the same for every other
        worker, so the capacity need not be measured.
        """

        def work(connection: Any) -> tuple[set[int], Sequence[DelayedTask]]:
            accepted = self.claims.settle(settlements, connection)
            return accepted, self.admit_to_slots(connection, queue, tag, len(accepted))

        return self._db.transaction(work)

    def admit_to_slots(self, on: Any, queue: str, tag: str, slots: int) -> Sequence[DelayedTask]:
        """Admit waiting rows to slots that become free in the same transaction.

        Returns no rows if the tag has limits other than the concurrency limit, which a free slot
        does not satisfy.
        """
        policy = self._policies.known.limited.get(tag)
        if policy is None or not policy.has_slots_only or slots <= 0:
            return []
        turn = self._turns.get((queue, tag))
        admitted, self._turns[queue, tag] = self._take(on, queue, tag, slots, Capacity(), turn)
        return admitted

    # -- the fair order of a waitlist: keys take turns, and each starts by priority and due time --

    def _take(
        self, on: Any, queue: str, tag: str, share: int, capacity: Capacity, turn: str | None
    ) -> tuple[list[DelayedTask], str | None]:
        """Take the next `share` rows off the waitlist; `turn` is the key of the last row before.

        Return the rows, and the key of the last one, after which the next turn goes on.
        """
        if share <= 0:
            return [], turn
        where = {"queue": queue, "tag": tag, "full": capacity.full_keys}
        if share == 1:
            return self._take_one(on, where, turn)
        return self._take_several(on, where, share, capacity, turn)

    def _take_one(
        self, on: Any, where: dict[str, Any], turn: str | None
    ) -> tuple[list[DelayedTask], str | None]:
        """Take the first row of the key after `turn`."""
        for after in (None,) if turn is None else (turn, None):
            is_new = True
            while is_new:
                rows = self._queries.first(on, where, after, 1 + EXTRA_ENTRIES)
                is_new = False
                for key, entries in groupby(rows, attrgetter("limit_key")):
                    admitted, stale = self._remove(on, where, list(entries), 1, True)
                    if admitted:
                        return admitted, key
                    is_new = is_new or stale > 0
        return [], turn

    def _take_several(
        self, on: Any, where: dict[str, Any], share: int, capacity: Capacity, turn: str | None
    ) -> tuple[list[DelayedTask], str | None]:
        """Take the same number of rows of each key, from the key after `turn` on."""
        all_admitted: list[DelayedTask] = []
        keys = self._keys(on, where, share, turn)
        for number, key in enumerate(keys):
            quota = -(-(share - len(all_admitted)) // (len(keys) - number))
            quota = min(quota, capacity.for_key(key))
            most = quota + EXTRA_ENTRIES
            while entries := self._queries.first_of_key(on, where, key, most):
                admitted, stale = self._remove(on, where, entries, quota, not all_admitted)
                all_admitted += admitted
                if admitted and admitted[0].lapses:
                    return all_admitted, key
                if admitted or not stale:
                    break
            turn = key
        return all_admitted, turn

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
    ) -> tuple[list[DelayedTask], int]:
        """Admit at most `quota` of these entries, and remove their entries and the stale ones.

        Return the admitted tasks, and the number of entries whose row no longer waits here. A
        recovered task is admitted alone, because it may kill its worker.
        """
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
            admitted += self.claims.admit(on, [(entry.task_id, entry.version) for entry in some])
        ids = {task.id for task in admitted}
        done = stale + [entry for entry in entries if entry.task_id in ids]
        self._queries.remove(on, where, done)
        return admitted, len(stale)
