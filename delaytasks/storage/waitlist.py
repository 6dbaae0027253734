"""Tasks of limited tags: those for which there is no room are held, and wait in line until there is.

The lock on the tag's policy keeps two workers from counting at once. Who has it waits for nobody: rows that somebody
else has locked are passed over.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import and_, bindparam, func, insert, literal, select, update

from delaytasks.core.capacity import LOOK_S, Room, WaitlistState
from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import WaitlistsSeen
from delaytasks.core.policies import Policy
from delaytasks.core.states import MOVES
from delaytasks.core.task import DelayTask
from delaytasks.storage.capacity import CapacityQueries
from delaytasks.storage.database import Database
from delaytasks.storage.fair_order import FairOrder, Take
from delaytasks.storage.limited_backlogs import LimitedBacklogs
from delaytasks.storage.queue_levels import steps
from delaytasks.storage.rows import listed, next_version
from delaytasks.storage.schema import Schema
from delaytasks.storage.slot_transfer import SlotTransfer
from delaytasks.storage.types import db_now

#: The tags that have limits, as far as this process knows.
Limited = Callable[[], Mapping[str, Policy]]


#: Lines of a queue that one look returns: each of them costs a statement.
LINES = 100


class Candidate(NamedTuple):
    """A row that is due, as a claim found and locked it; its columns' names."""

    id: int
    tag: str
    queue: str
    priority: int
    expected_time: datetime
    concurrency_key: str | None


class _Gate:
    """The threads of a process ask one after another."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shut_at = 0.0


class Waitlist:
    def __init__(
        self,
        database: Database,
        schema: Schema,
        take: Take,
        slot_transfer: SlotTransfer,
        limited: Limited,
    ) -> None:
        self._db = database
        self._slot_transfer = slot_transfer
        self.limited = limited
        self._t = t = schema.tasks
        self._l = line = schema.lines
        self._capacity, self._turns = CapacityQueries(schema), FairOrder(database, schema, take)
        self._met = threading.local()
        #: The lane of the last one that was admitted here.
        self._last: dict[tuple[str, str], str | None] = {}
        #: By queue, the tag behind which the next look at its lines goes on.
        self._of_after: dict[str, str] = {}
        #: Lines in which nobody waited when this process looked last.
        self._empty: set[tuple[str, str]] = set()
        self._gates: dict[tuple[str, str], _Gate] = {}
        self._limited_backlogs = LimitedBacklogs(database, schema, self._line_up)
        named, key = listed(database, t.c.id, "ids"), func.coalesce(t.c.concurrency_key, "")
        place = (line.c.lane, line.c.place, line.c.due, line.c.task_id, line.c.version)
        values = select(
            t.c.queue, t.c.tag, key, -t.c.priority, t.c.expected_time, t.c.id, t.c.version
        ).where(named)
        self._get_in_line = insert(line).from_select([line.c.queue, line.c.tag, *place], values)
        self._hold = self._moved("hold").where(named)
        self._in_line = and_(line.c.queue == bindparam("queue"), line.c.tag == bindparam("tag"))
        self._any = select(literal(1)).select_from(line).where(self._in_line).limit(1)

    # -- what a process knows ---------------------------------------------------------------------

    def met(self) -> WaitlistsSeen:
        met: WaitlistsSeen = self._met.__dict__.pop("met", None) or WaitlistsSeen()
        return met

    def of(self, queue: str) -> set[tuple[str, str]]:
        """Some of the lines of a queue, however long they are; the next call returns the next ones."""
        line, after = self._l, self._of_after.get(queue)
        here = line.c.queue == queue
        later = here if after is None else and_(here, line.c.tag > after)
        tags = self._db.alone(lambda c: list(islice(steps(c, line.c.tag, later), LINES)))
        if len(tags) == LINES:
            self._of_after[queue] = tags[-1]
        elif self._of_after.pop(queue, None) is not None and not tags:
            return self.of(queue)  # that was the end
        return {(queue, tag) for tag in tags}

    # -- rows that fell due -----------------------------------------------------------------------

    def let_in(self, on: Any, candidates: Sequence[Candidate]) -> list[int]:
        """Those of these locked rows that may start; the others get in line, behind those who wait there already."""
        limited, lines = self.limited(), dict[tuple[str, str], list[tuple[int, str]]]()
        if limited:
            for one in sorted(
                candidates, key=lambda one: (-one.priority, one.expected_time, one.id)
            ):
                if one.tag in limited:
                    lines.setdefault((one.tag, one.queue), []).append(
                        (one.id, one.concurrency_key or "")
                    )
        held: set[int] = set()
        for tag, queue in sorted(lines):  # the locks in one order
            some = lines[tag, queue]
            free = self._free(on, queue, tag, some)
            held.update(id for id, _ in some if id not in free)
        self._line_up(on, held)
        if lines:
            before = self.met()
            self._met.met = WaitlistsSeen(
                before.lines | {(queue, tag) for tag, queue in lines}, before.held + len(held)
            )
        return [one.id for one in candidates if one.id not in held]

    def gather(self, queue: str, priority: int, tags: Collection[str]) -> bool:
        """Many of those that are due get in line at once, before somebody claims them in vain; with those behind a
        crowd, who would come late else. True if there may be more of them."""
        return self._limited_backlogs.gather(queue, priority, tags)

    def _line_up(self, on: Any, ids: Collection[int]) -> None:
        if ids:
            on.execute(self._hold, {"ids": sorted(ids)})
            on.execute(self._get_in_line, {"ids": sorted(ids)})

    def _free(self, on: Any, queue: str, tag: str, some: Sequence[tuple[int, str]]) -> set[int]:
        policy, free = self._capacity.lock(on, tag), set[int]()
        if policy is not None and self._is_waited_for(on, queue, tag):
            return free
        room, taken = self._capacity.of(on, policy), Counter[str]()
        share = room.share(len(some))
        for id, key in some:
            if len(free) < share and taken[key] < room.for_key(key):
                free.add(id)
                taken[key] += 1
        self._capacity.started(on, policy, room, len(free), policy and policy.turn)
        return free

    def _is_waited_for(self, on: Any, queue: str, tag: str) -> bool:
        return on.execute(self._any, {"queue": queue, "tag": tag}).first() is not None

    # -- the line ---------------------------------------------------------------------------------

    def admit(
        self, queue: str, tag: str, limit: int, at_once: int = 1
    ) -> tuple[Sequence[DelayTask], WaitlistState | None]:
        """The next ones in line for which there is room, which run now; no opening once nobody waits."""

        def work() -> tuple[Sequence[DelayTask], WaitlistState | None]:
            with self._db.begin() as connection:
                return self._admit(connection, queue, tag, limit, at_once)

        if (queue, tag) in self._empty and not self._db.alone(
            lambda c: self._is_waited_for(c, queue, tag)
        ):
            return [], None  # as mostly, where nobody reaches the limit
        gate, asked_at = self._gates.setdefault((queue, tag), _Gate()), monotonic()
        with gate.lock:
            if gate.shut_at > asked_at:  # a thread that asked before found no more
                return [], WaitlistState(queue, tag, 0)
            tasks, opening = self._db.run(work)
            if opening is None or not opening.open:
                gate.shut_at = monotonic()
            if opening is None:
                self._empty.add((queue, tag))
            else:
                self._empty.discard((queue, tag))
            return tasks, opening

    def _admit(
        self, on: Any, queue: str, tag: str, limit: int, at_once: int
    ) -> tuple[Sequence[DelayTask], WaitlistState | None]:
        policy = self._capacity.lock(on, tag)
        room = self._capacity.of(on, policy)
        share = room.share(limit, at_once)
        next = self._turns.next(on, queue, tag, share, room, policy and policy.turn)
        count = len(next.tasks)
        if not count:
            look_s = LOOK_S if share else room.look_s
            return [], WaitlistState(queue, tag, 0, look_s) if self._is_waited_for(
                on, queue, tag
            ) else None
        self._capacity.started(on, policy, room, count, next.turn)
        self._last[queue, tag] = next.turn
        return next.tasks, WaitlistState(queue, tag, room.left - share if count == share else 0)

    def next(self, on: Any, queue: str, tag: str, places: int) -> Sequence[DelayTask]:
        """The next ones in line, for places that others leave in the same transaction. None where a place is not all
        that they need."""
        policy = self.limited().get(tag)
        if policy is None or not policy.has_places_only or places <= 0:
            return []
        turn = self._last.get((queue, tag))
        if places == 1 and self._db.can.array_parameters:
            task = self._slot_transfer.next(on, queue, tag, turn)
            if task is not None:
                self._last[queue, tag] = task.concurrency_key or ""
                return [task]
        next = self._turns.next(on, queue, tag, places, Room(), turn)
        self._last[queue, tag] = next.turn
        return next.tasks

    def _moved(self, move: str) -> Any:
        t = self._t
        return update(t).values(
            status=int(MOVES[move].target), version=next_version(t.c.version), update_time=db_now()
        )
