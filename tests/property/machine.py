"""The model of a table of tasks, and the operations of producers and operators."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from chaos.simulation.broker import BrokerPublisher, SimulatedBroker
from chaos.simulation.clock import Times
from delaytasks import DuplicateTaskError, TaskStateError
from delaytasks.core.clock import Clock, from_us
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry
from delaytasks.core.states import FINISHED, MOVES, Status
from delaytasks.core.task import DelayedTask, OnConflict
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.storage.store import Store
from delaytasks.timers.arming import EtaTimer
from tests.conftest import empty, settings_for

MAX_LOST_LEASES, SWEEP_S, HORIZON_S, LEASE_US = 3, 5, 20, 60_000_000
POLICIES: list[OnConflict] = ["reject", "keep", "replace"]
#: Tasks are mostly due, since a waiting task takes part in few moves.
DUE = st.sampled_from([True, True, True, False])
_ids = itertools.count(1)


@dataclass
class Known:
    """The expected content of a task's row."""

    task: DelayedTask
    status: Status = Status.NOT_COMPLETE
    version: int = 0
    runs: int = 0
    lapses: int = 0
    due_us: int = 0
    lease_us: int = 0
    #: The claim that may settle the task, and the claims that may no longer do it.
    claim: DelayedTask | None = None
    stale: list[DelayedTask] = field(default_factory=list)

    def move(self, name: str) -> None:
        assert self.status in MOVES[name].sources
        self.status = MOVES[name].target
        self.version += 1
        if self.claim is not None:
            self.stale.append(self.claim)
            self.claim = None


class Producers(RuleBasedStateMachine):
    """The expected content of the table, and the calls of producers and operators."""

    store: Store  # set by the test: created once, and emptied for each run
    times: Times
    tasks = Bundle("tasks")

    @initialize(target=tasks)
    def begin(self) -> Any:
        empty(self.store)
        self.seen_us: dict[str, int] = {}
        self.begin_worker()
        self.clock = Clock(self.store.tasks.now)
        self.broker = SimulatedBroker(random.Random(0), is_reliable=True)
        publisher: Any = BrokerPublisher(self.broker, lambda: self.times.now_us)
        timer = EtaTimer(publisher, self.clock)
        settings = settings_for(
            "sqlite://", sweep=SWEEP_S, horizon=HORIZON_S, max_lost_leases=MAX_LOST_LEASES
        )
        self.sweeper = Sweeper(
            settings, self.store.sweeps, self.store.workers, self.clock, timer, Events()
        )
        self.swept_us = self.armed_us = 0
        self.known: dict[int, Known] = {}
        self.keys: dict[str, int] = {}
        return multiple(
            *(self.schedule_keyed(True, key, "reject") for key in "ab"), self.schedule(True)
        )

    def begin_worker(self) -> None:
        self.worker = f"w{next(_ids)}"
        self.claims = self.store.claims(self.worker, None)
        self.report_worker()

    def report_worker(self) -> None:
        self.store.workers.report(self.worker, ["default"], "solo", 1, 0)
        self.seen_us[self.worker] = self.times.now_us

    def due(self, is_due: bool) -> Any:
        return from_us(self.due_us(is_due))

    def due_us(self, is_due: bool) -> int:
        return self.times.now_us + (-60 if is_due else 25) * 1_000_000

    def can_run(self, known: Known) -> bool:
        return known.status in MOVES["claim"].sources and known.due_us <= self.times.now_us

    def entry(self, known: Known) -> Entry:
        return Entry(known.task.id, known.version, known.due_us)

    def leave_key(self, known: Known) -> None:
        key = known.task.key
        if key is not None and self.keys.get(key) == known.task.id:
            del self.keys[key]

    # -- producers --------------------------------------------------------------------------------

    @rule(target=tasks, is_due=DUE)
    def schedule(self, is_due: bool) -> int:
        made = DelayedTask(
            next(_ids), "t", "{}", self.due(is_due), create_time=from_us(self.times.now_us)
        )
        assert self.store.tasks.insert(made)
        self.known[made.id] = Known(made, due_us=self.due_us(is_due))
        return made.id

    @rule(target=tasks, is_due=DUE, key=st.sampled_from("ab"), policy=st.sampled_from(POLICIES))
    def schedule_keyed(self, is_due: bool, key: str, policy: OnConflict) -> int:
        made = DelayedTask(
            next(_ids), "t", "{}", self.due(is_due), key=key, create_time=from_us(self.times.now_us)
        )
        # The key of a task with the failure "worker lost" stays in the table, but is free.
        owner = self.known.get(self.keys.get(key, 0))
        if owner is None or owner.status in FINISHED:
            found, is_new = self.store.tasks.insert_keyed(made, policy)
            assert (found.id, is_new) == (made.id, True)
        elif policy == "reject":
            with pytest.raises(DuplicateTaskError) as caught:
                self.store.tasks.insert_keyed(made, policy)
            assert caught.value.id == owner.task.id
            return owner.task.id
        elif policy == "keep":
            found, is_new = self.store.tasks.insert_keyed(made, policy)
            assert (found.id, found.version, is_new) == (owner.task.id, owner.version, False)
            return owner.task.id
        elif owner.status in MOVES["replace"].sources:
            found, is_new = self.store.tasks.insert_keyed(made, policy)
            owner.move("replace")
            owner.runs = owner.lapses = 0
            owner.due_us = self.due_us(is_due)
            assert (found.id, found.version, is_new) == (owner.task.id, owner.version, True)
            return owner.task.id
        else:
            found, is_new = self.store.tasks.insert_keyed(made, policy)
            assert (found.id, is_new) == (made.id, True)
        self.known[made.id] = Known(made, due_us=self.due_us(is_due))
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
            with pytest.raises(TaskStateError) as caught:
                self.store.tasks.cancel(id)
            assert caught.value.status is known.status

    @rule(id=tasks, is_due=DUE)
    def reschedule(self, id: int, is_due: bool) -> None:
        known = self.known[id]
        if known.status in MOVES["reschedule"].sources:
            self.store.tasks.reschedule(id, self.due(is_due), version=known.version)
            known.move("reschedule")
            known.due_us = self.due_us(is_due)
        else:
            with pytest.raises(TaskStateError):
                self.store.tasks.reschedule(id, self.due(is_due))

    @rule(id=tasks, is_due=DUE)
    def rerun(self, id: int, is_due: bool) -> None:
        known = self.known[id]
        owner = self.keys.get(known.task.key or "", id)
        if known.status not in MOVES["rerun"].sources:
            with pytest.raises(TaskStateError):
                self.store.tasks.rerun(id, self.due(is_due))
        elif owner != id:
            with pytest.raises(DuplicateTaskError):
                self.store.tasks.rerun(id, self.due(is_due))
        else:
            self.store.tasks.rerun(id, self.due(is_due))
            known.move("rerun")
            known.runs = known.lapses = 0
            known.due_us = self.due_us(is_due)
            if known.task.key is not None:
                self.keys[known.task.key] = id

    @rule(id=tasks, is_due=DUE)
    def touch(self, id: int, is_due: bool) -> None:
        """Extend a timeout. A touch does not make a waiting task due."""
        assert self.store.touches.touch(id, self.due(is_due)) is bool(self.touched([id], is_due))

    @rule(ids=st.lists(tasks, max_size=4), is_due=DUE)
    def touch_many(self, ids: list[int], is_due: bool) -> None:
        assert self.store.touches.touch_many(ids, self.due(is_due)) == self.touched(ids, is_due)

    def touched(self, ids: list[int], is_due: bool) -> set[int]:
        waiting = {id for id in ids if self.known[id].status in MOVES["reschedule"].sources}
        for id in waiting:
            self.known[id].due_us = max(self.known[id].due_us, self.due_us(is_due))
        return waiting
