"""Random verbs on a real store, against the table of moves.

The model knows of each task its status, version, attempts and lapses, and who may settle it. Whatever is called in
whatever order, the row must be where MOVES allows it to be, and a refused call must leave it alone.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from delaytasks.core.clock import to_us
from delaytasks.core.errors import CancelTooLateError, DuplicateTaskError, InvalidStatusError
from delaytasks.core.ports import Entry, OnConflict, Settlement
from delaytasks.core.states import FINISHED, MOVES, Status
from delaytasks.core.task import DelayTask
from delaytasks.store.store import Store
from tests.conftest import empty, open_store

MAX_LAPSES = 3
ENDS = ["succeed", "fail", "give_back", "give_back"]
POLICIES: list[OnConflict] = ["reject", "keep", "replace"]
#: Mostly due: what waits for its time takes part in few moves.
DUE = st.sampled_from([True, True, True, False])
_ids = itertools.count(1)


@dataclass
class Known:
    """What the row of a task must say."""

    task: DelayTask
    status: Status = Status.NOT_COMPLETE
    version: int = 0
    attempts: int = 0
    lapses: int = 0
    is_due: bool = True
    #: The claim that may settle it, and all claims that may not any more.
    claim: DelayTask | None = None
    stale: list[DelayTask] = field(default_factory=list)

    def move(self, name: str) -> None:
        assert self.status in MOVES[name].sources
        self.status = MOVES[name].target
        self.version += 1
        if self.claim is not None:
            self.stale.append(self.claim)
            self.claim = None


class Moves(RuleBasedStateMachine):
    store: Store  # set by the test: made once, emptied for each run
    tasks = Bundle("tasks")

    @initialize(target=tasks)
    def begin(self) -> Any:
        empty(self.store)
        self.claims = self.store.claims("w", None)
        self.known: dict[int, Known] = {}
        self.keys: dict[str, int] = {}
        self.now = self.store.tasks.now()
        return multiple(*(self.schedule_keyed(True, key, "reject") for key in "ab"), self.schedule(True))

    def due(self, is_due: bool) -> Any:
        return self.now + timedelta(seconds=-60 if is_due else 3600)

    def entry(self, known: Known) -> Entry:
        return Entry(known.task.id, known.version, to_us(known.task.expected_time))

    def leave_key(self, known: Known) -> None:
        key = known.task.key
        if key is not None and self.keys.get(key) == known.task.id:
            del self.keys[key]

    # -- producers --------------------------------------------------------------------------------

    @rule(target=tasks, is_due=DUE)
    def schedule(self, is_due: bool) -> int:
        made = DelayTask(next(_ids), "t", "{}", self.due(is_due), create_time=self.now)
        assert self.store.tasks.insert(made)
        self.known[made.id] = Known(made, is_due=is_due)
        return made.id

    @rule(target=tasks, is_due=DUE, key=st.sampled_from("ab"), policy=st.sampled_from(POLICIES))
    def schedule_keyed(self, is_due: bool, key: str, policy: OnConflict) -> int:
        made = DelayTask(next(_ids), "t", "{}", self.due(is_due), key=key, create_time=self.now)
        # The key of a task that gave up stays in the table, and is free all the same.
        holder = self.known.get(self.keys.get(key, 0))
        if holder is None or holder.status in FINISHED:
            found, is_new = self.store.tasks.insert_keyed(made, policy)
            assert (found.id, is_new) == (made.id, True)
        elif policy == "reject":
            with pytest.raises(DuplicateTaskError) as caught:
                self.store.tasks.insert_keyed(made, policy)
            assert caught.value.id == holder.task.id
            return holder.task.id
        elif policy == "keep":
            found, is_new = self.store.tasks.insert_keyed(made, policy)
            assert (found.id, found.version, is_new) == (holder.task.id, holder.version, False)
            return holder.task.id
        elif holder.status in MOVES["replace"].sources:
            found, is_new = self.store.tasks.insert_keyed(made, policy)
            holder.move("replace")
            holder.attempts = holder.lapses = 0
            holder.is_due = is_due
            assert (found.id, found.version, is_new) == (holder.task.id, holder.version, True)
            return holder.task.id
        else:
            found, is_new = self.store.tasks.insert_keyed(made, policy)
            assert (found.id, is_new) == (made.id, True)
        self.known[made.id] = Known(made, is_due=is_due)
        self.keys[key] = made.id
        return made.id

    # -- operators --------------------------------------------------------------------------------

    @rule(id=tasks)
    def cancel(self, id: int) -> None:
        known = self.known[id]
        if known.status is Status.CANCELLED:
            assert self.store.tasks.cancel(id) is None
        elif known.status in MOVES["cancel"].sources:
            assert self.store.tasks.cancel(id) is not None
            known.move("cancel")
            self.leave_key(known)
        else:
            too_late = CancelTooLateError if known.status is Status.RUNNING else InvalidStatusError
            with pytest.raises(too_late):
                self.store.tasks.cancel(id)

    @rule(id=tasks, is_due=DUE)
    def reschedule(self, id: int, is_due: bool) -> None:
        known = self.known[id]
        if known.status in MOVES["reschedule"].sources:
            self.store.tasks.reschedule(id, self.due(is_due), version=known.version)
            known.move("reschedule")
            known.is_due = is_due
        else:
            with pytest.raises(InvalidStatusError):
                self.store.tasks.reschedule(id, self.due(is_due))

    @rule(id=tasks, is_due=DUE)
    def retry(self, id: int, is_due: bool) -> None:
        known = self.known[id]
        holder = self.keys.get(known.task.key or "", id)
        if known.status not in MOVES["retry"].sources:
            with pytest.raises(InvalidStatusError):
                self.store.tasks.retry(id, self.due(is_due))
        elif holder != id:
            with pytest.raises(DuplicateTaskError):
                self.store.tasks.retry(id, self.due(is_due))
        else:
            self.store.tasks.retry(id, self.due(is_due))
            known.move("retry")
            known.attempts = known.lapses = 0
            known.is_due = is_due
            if known.task.key is not None:
                self.keys[known.task.key] = id

    @rule(id=tasks, is_due=DUE)
    def touch(self, id: int, is_due: bool) -> None:
        """Later only: what waits for its time is not made due."""
        assert self.store.touches.touch(id, self.due(is_due)) is bool(self.touched([id], is_due))

    @rule(ids=st.lists(tasks, max_size=4), is_due=DUE)
    def touch_many(self, ids: list[int], is_due: bool) -> None:
        assert self.store.touches.touch_many(ids, self.due(is_due)) == self.touched(ids, is_due)

    def touched(self, ids: list[int], is_due: bool) -> set[int]:
        waiting = {id for id in ids if self.known[id].status in MOVES["reschedule"].sources}
        for id in waiting:
            self.known[id].is_due = self.known[id].is_due and is_due
        return waiting

    # -- workers ----------------------------------------------------------------------------------

    def took(self, claimed: list[DelayTask]) -> None:
        for task in claimed:
            known = self.known[task.id]
            assert known.is_due
            known.move("claim")
            known.attempts += 1
            known.claim = task
            assert (task.version, task.attempts, task.lapses) == (known.version, known.attempts, known.lapses)

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True), is_stale=st.booleans())
    def claim(self, ids: list[int], is_stale: bool) -> None:
        named = [self.known[id] for id in ids]
        entries = [self.entry(known) for known in named]
        if is_stale:
            entries = [replace_version(entry, entry.version - 1) for entry in entries]
        claimed = self.claims.claim(entries)
        wanted = {k.task.id for k in named if can_run(k) and k.lapses == 0 and not is_stale}
        assert {task.id for task in claimed} == wanted
        self.took(claimed)

    @rule(id=tasks)
    def claim_alone(self, id: int) -> None:
        known = self.known[id]
        task = self.claims.claim_alone(id, known.version)
        assert (task is not None) == can_run(known)
        self.took([task] if task is not None else [])

    @precondition(lambda self: any(map(can_run, self.known.values())))
    @rule(limit=st.integers(1, 3))
    def claim_due(self, limit: int) -> None:
        claimed = self.claims.claim_due("default", [0], limit)
        due = [known for known in self.known.values() if can_run(known) and known.lapses == 0]
        assert len(claimed) == min(limit, len(due))
        self.took(claimed)

    @precondition(lambda self: any(known.lapses for known in self.known.values()))
    @rule()
    def claim_suspect(self) -> None:
        task = self.claims.claim_suspect("default")
        suspects = [known for known in self.known.values() if can_run(known) and known.lapses > 0]
        assert (task is not None) == bool(suspects)
        self.took([task] if task is not None else [])

    def running(self) -> list[int]:
        return sorted(id for id, known in self.known.items() if known.status is Status.RUNNING)

    @precondition(running)
    @rule(pick=st.integers(0, 99), move=st.sampled_from(ENDS), is_later=st.booleans())
    def settle(self, pick: int, move: Any, is_later: bool) -> None:
        id = self.running()[pick % len(self.running())]
        known = self.known[id]
        assert known.claim is not None
        due = self.due(False) if is_later and move == "give_back" else None
        assert self.claims.settle([Settlement(known.claim, move, due=due)]) == {id}
        known.move(move)
        if move == "give_back":
            known.attempts -= 1
            known.is_due = known.is_due and due is None
        else:
            known.lapses = 0
            self.leave_key(known)

    @precondition(lambda self: any(known.stale for known in self.known.values()))
    @rule(id=tasks, move=st.sampled_from(ENDS))
    def settle_stale(self, id: int, move: Any) -> None:
        """Claims that lapsed settle nothing; one that was settled may be settled again, to no effect."""
        for claim in self.known[id].stale:
            self.claims.settle([Settlement(claim, move)])

    @precondition(running)
    @rule(limit=st.integers(1, 5))
    def lapse(self, limit: int) -> None:
        running = self.running()
        t = self.store.schema.tasks
        with self.store.database.begin() as connection:
            connection.execute(t.update().where(t.c.status == 3).values(lease_until=self.due(True)))
        lapsed = running[:limit]
        assert self.store.sweeps.lapse(MAX_LAPSES, limit).total == len(lapsed)
        for id in lapsed:
            known = self.known[id]
            known.lapses += 1
            if known.lapses >= MAX_LAPSES:
                known.move("give_up")
                self.leave_key(known)
            else:
                known.move("lapse")

    # -- pauses -----------------------------------------------------------------------------------

    @rule(is_paused=st.booleans())
    def pause(self, is_paused: bool) -> None:
        self.store.policies.set("tag", "t", {"is_paused": is_paused}, "me")

    def is_paused(self) -> bool:
        return any(policy.is_paused for policy in self.store.policies.read())

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True))
    def hold(self, ids: list[int]) -> None:
        waiting = [self.known[id] for id in ids if self.known[id].status in MOVES["hold"].sources]
        assert self.store.holding.hold(ids) == (len(waiting) if self.is_paused() else 0)
        for known in waiting if self.is_paused() else ():
            known.move("hold")

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True))
    def release(self, ids: list[int]) -> None:
        held = [self.known[id] for id in ids if self.known[id].status in MOVES["release"].sources]
        released = self.store.holding.release(ids)
        assert {entry[:2] for entry in released} == {(known.task.id, known.version + 1) for known in held}
        for known in held:
            known.move("release")

    @precondition(running)
    @rule(pick=st.integers(0, 99), is_stale=st.booleans())
    def hold_back(self, pick: int, is_stale: bool) -> None:
        known = self.known[self.running()[pick % len(self.running())]]
        assert known.claim is not None
        if is_stale and known.stale:
            assert self.store.holding.hold_claimed(known.stale[-1:]) == set()
        elif self.is_paused():
            assert self.store.holding.hold_claimed([known.claim]) == {known.task.id}
            known.move("hold_back")
            known.attempts -= 1
        else:
            assert self.store.holding.hold_claimed([known.claim]) == set()

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def rows_are_as_known(self) -> None:
        found = {task.id: task for task in self.store.tasks.find(None, None, None, None, None, None, 1000)}
        assert set(found) == set(self.known)
        for id, known in self.known.items():
            task = found[id]
            shown = (task.status, task.version, task.attempts, task.lapses)
            assert shown == (known.status, known.version, known.attempts, known.lapses), id
            assert (task.lease_until is not None) == (task.status is Status.RUNNING)
            assert (task.expected_time == self.due(True)) == known.is_due

    @invariant()
    def keys_name_what_they_must(self) -> None:
        for key in "ab":
            assert self.store.tasks.id_of_key("t", key) == self.keys.get(key)


def can_run(known: Known) -> bool:
    return known.status in MOVES["claim"].sources and known.is_due


def replace_version(entry: Entry, version: int) -> Entry:
    return entry._replace(version=version)


def test_no_order_of_verbs_leads_where_the_moves_do_not() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder) / 'moves.sqlite3'}")
        machine = type("MovesHere", (Moves,), {"store": store})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=120,
                stateful_step_count=50,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
        store.close()
