"""Random operations on a real database, checked against the table of moves.

The model knows each task's status, version, attempts, lapses and due time, and which claim may
settle it until when. The clock is simulated, the broker loses and repeats messages, and workers
die. After each operation, the row must be in a state that MOVES allows. A refused call must leave
the row unchanged.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, multiple, precondition, rule

from chaos.simulation.clock import Times, installed
from delaytasks import DelayedTask, DuplicateTaskError, Status, TaskStateError
from tests.conftest import empty, open_store
from tests.world import FINISHED, MOVES, Entry, World, from_us, to_us

pytestmark = pytest.mark.slow

MAX_LOST_LEASES, SWEEP_S, HORIZON_S, LEASE_US = 3, 5, 20, 60_000_000
ENDS = ["succeed", "fail", "give_back", "give_back"]
#: Tasks are mostly due, since a waiting task takes part in few moves.
IN_S = st.sampled_from([0, 0, 0, 25])


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

    def can(self, name: str) -> bool:
        return self.status in MOVES[name].sources

    def move(self, name: str) -> None:
        assert self.can(name)
        self.status = MOVES[name].target
        self.version += 1
        if self.claim is not None:
            self.stale.append(self.claim)
            self.claim = None


class Moves(stateful.RuleBasedStateMachine):
    """The expected content of the table, and the calls that change it."""

    store: Any  # set by the test: created once, and emptied for each run
    times: Times
    tasks = stateful.Bundle("tasks")

    @initialize(target=tasks)
    def begin(self) -> Any:
        empty(self.store)
        limits: dict[str, Any] = {"horizon": HORIZON_S, "max_lost_leases": MAX_LOST_LEASES}
        self.world = World(self.store, sweep=SWEEP_S, **limits)
        self.known: dict[int, Known] = {}
        self.keys: dict[str, int] = {}
        self.names = (f"w{number}" for number in itertools.count())
        self.seen_us: dict[str, int] = {}
        self.begin_worker()
        self.swept_us = self.armed_us = 0
        self.is_paused = False
        #: Whether policies have changed since the last sweep, which looks for held rows then.
        self.has_changed = False
        return multiple(*(self.schedule_keyed(0, key, "reject") for key in "ab"), self.schedule(0))

    def teardown(self) -> None:
        self.world.close()

    def begin_worker(self) -> None:
        self.worker = next(self.names)
        self.report_worker()

    def report_worker(self) -> None:
        self.world.serve(self.worker, "default")
        self.seen_us[self.worker] = self.times.now_us

    def due_us(self, in_s: int) -> int:
        return self.times.now_us + in_s * 1_000_000

    def can_run(self, known: Known) -> bool:
        return known.can("claim") and known.due_us <= self.times.now_us

    def those(self, status: Status) -> list[Known]:
        return [known for known in self.known.values() if known.status is status]

    def leave_key(self, known: Known) -> None:
        key = known.task.key
        if key is not None and self.keys.get(key) == known.task.id:
            del self.keys[key]

    # -- producers and operators ------------------------------------------------------------------

    @rule(target=tasks, in_s=IN_S)
    def schedule(self, in_s: int) -> int:
        return self.new_task(in_s)

    def new_task(self, in_s: int, **options: Any) -> int:
        made = self.world.delays.schedule_delay("t", {}, in_s, **options)
        self.known.setdefault(made.id, Known(made, due_us=self.due_us(in_s)))
        return made.id

    @rule(
        target=tasks,
        in_s=IN_S,
        key=st.sampled_from("ab"),
        policy=st.sampled_from(["reject", "keep", "replace"]),
    )
    def schedule_keyed(self, in_s: int, key: str, policy: str) -> int:
        # The key of a task with the failure "worker lost" stays in the table, but is free.
        owner = self.known.get(self.keys.get(key, 0))
        has_owner = owner is not None and owner.status not in FINISHED
        if owner is not None and has_owner and policy == "reject":
            with pytest.raises(DuplicateTaskError) as caught:
                self.new_task(in_s, key=key)
            assert caught.value.id == owner.task.id
            return owner.task.id
        id = self.new_task(in_s, key=key, on_conflict=policy)
        if owner is None or not has_owner or (policy == "replace" and not owner.can("replace")):
            assert owner is None or id != owner.task.id
            self.keys[key] = id
            return id
        assert id == owner.task.id
        if policy == "replace":
            owner.move("replace")
            owner.runs = owner.lapses = 0
            owner.due_us = self.due_us(in_s)
        return id

    @rule(id=tasks)
    def cancel(self, id: int) -> None:
        known, can = self.known[id], self.known[id].can("cancel")
        result = self.world.cancel(id)
        if can:
            known.move("cancel")
            self.leave_key(known)
        assert (bool(result), result.status) == (can, known.status)

    @rule(id=tasks, in_s=IN_S, move=st.sampled_from(["reschedule", "rerun"]))
    def give_time(self, id: int, in_s: int, move: str) -> None:
        known, call = self.known[id], getattr(self.world.delays, move)
        if not known.can(move):
            with pytest.raises(TaskStateError):
                call(id, in_s)
        elif move == "rerun" and self.keys.get(known.task.key or "", id) != id:
            with pytest.raises(DuplicateTaskError):
                call(id, in_s)
        else:
            call(id, in_s, version=known.version)
            known.move(move)
            known.due_us = self.due_us(in_s)
            if move == "rerun":
                known.runs = known.lapses = 0
                if known.task.key is not None:
                    self.keys[known.task.key] = id

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True), in_s=IN_S)
    def touch(self, ids: list[int], in_s: int) -> None:
        """Extend timeouts. A touch does not make a waiting task due."""
        result = self.world.delays.touch(ids if len(ids) > 1 else ids[0], in_s)
        waiting = [known for known in map(self.known.__getitem__, ids) if known.can("reschedule")]
        assert {*ids} - {*result.gone} == {known.task.id for known in waiting}
        for known in waiting:
            known.due_us = max(known.due_us, self.due_us(in_s))

    # -- workers ----------------------------------------------------------------------------------

    def took(self, claimed: Iterable[DelayedTask]) -> None:
        for task in claimed:
            known = self.known[task.id]
            assert known.due_us <= self.times.now_us
            known.move("claim")
            known.lease_us = self.times.now_us // 1000 * 1000 + LEASE_US
            known.runs += 1
            known.claim = task
            shown = (task.version, task.runs, task.lapses)
            assert shown == (known.version, known.runs, known.lapses)

    def take_named(self, entries: list[Entry]) -> None:
        wanted = {
            entry.id
            for entry in entries
            if self.can_run(known := self.known[entry.id])
            and (known.version, known.lapses) == (entry.version, 0)
        }
        claimed = self.world.claim(*entries, by=self.worker)
        assert {task.id for task in claimed} == wanted
        self.took(claimed)

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True), age=st.integers(0, 1))
    def claim(self, ids: list[int], age: int) -> None:
        named = [self.known[id] for id in ids]
        self.take_named([Entry(one.task.id, one.version - age, one.due_us) for one in named])

    @rule(id=tasks)
    def claim_alone(self, id: int) -> None:
        known = self.known[id]
        claimed = self.world.worker(self.worker).claim_alone(known.task, known.version)
        assert bool(claimed) == self.can_run(known)
        self.took(claimed)

    @precondition(lambda self: any(map(self.can_run, self.known.values())))
    @rule(most=st.integers(1, 3))
    def claim_due(self, most: int) -> None:
        claimed = self.world.claim_due(most=most, by=self.worker)
        due = [known for known in self.known.values() if self.can_run(known) and not known.lapses]
        assert len(claimed) == min(most, len(due))
        self.took(claimed)

    @precondition(lambda self: any(known.lapses for known in self.known.values()))
    @rule()
    def claim_recovered(self) -> None:
        claimed = self.world.worker(self.worker).claim_recovered()
        due = [known for known in self.known.values() if self.can_run(known) and known.lapses]
        assert bool(claimed) == bool(due)
        self.took(claimed)

    def running(self) -> list[int]:
        """Return the tasks that run in living workers."""
        return [id for id, known in self.known.items() if known.claim is not None]

    @precondition(lambda self: bool(self.running()))
    @rule(pick=st.integers(0, 99), move=st.sampled_from(ENDS), is_later=st.booleans())
    def settle(self, pick: int, move: Any, is_later: bool) -> None:
        known = self.known[self.running()[pick % len(self.running())]]
        assert known.claim is not None
        due = from_us(self.due_us(25)) if is_later and move == "give_back" else None
        assert self.world.settle(known.claim, move, by=self.worker, expected_time=due)
        known.move(move)
        if move == "give_back":
            known.runs -= 1
            known.due_us = known.due_us if due is None else to_us(due)
        else:
            known.lapses = 0
            self.leave_key(known)

    @precondition(lambda self: any(known.stale for known in self.known.values()))
    @rule(id=tasks, move=st.sampled_from(ENDS))
    def settle_stale(self, id: int, move: Any) -> None:
        """Check that a claim with a lost lease settles nothing, and that a repeated settlement has
        no effect.
        """
        for claim in self.known[id].stale:
            self.world.settle(claim, move, by=self.worker)

    @precondition(lambda self: bool(self.running()))
    @rule()
    def crash(self) -> None:
        """Kill the worker, and start another one."""
        for known in self.known.values():
            known.claim = None
        self.begin_worker()

    @rule()
    def renew(self) -> None:
        running = self.running()
        assert self.world.renew(by=self.worker).rows == len(running)
        for id in running:
            self.known[id].lease_us = self.times.now_us // 1000 * 1000 + LEASE_US

    # -- time, sweeps and messages ----------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 6, 6, 20, 70]), sweeps=st.integers(0, 3))
    def advance(self, seconds: int, sweeps: int) -> None:
        self.times.advance(seconds)
        for _ in range(sweeps):
            self.sweep()
            self.times.advance(SWEEP_S)

    def lapsing(self) -> list[Known]:
        return [one for one in self.those(Status.RUNNING) if one.lease_us < self.times.now_us]

    def lapse(self, lapsing: Iterable[Known]) -> None:
        for known in lapsing:
            known.lapses += 1
            if known.lapses >= MAX_LOST_LEASES:
                known.move("fail_worker_lost")
                self.leave_key(known)
            else:
                known.move("recover")

    @precondition(lambda self: bool(self.lapsing()))
    @rule(most=st.integers(1, 5))
    def lapse_some(self, most: int) -> None:
        lapsing = self.lapsing()
        recovered = self.world.recover(MAX_LOST_LEASES, most)
        assert recovered.total == min(len(lapsing), most)
        ended = [one for one in lapsing if self.world.read(one.task.id).status != Status.RUNNING]
        assert len(ended) == recovered.total
        self.lapse(ended)

    @rule()
    def sweep(self) -> None:
        now_us = self.times.now_us
        is_mine = now_us - self.swept_us >= 0.8e6 * SWEEP_S
        self.report_worker()
        before = len(self.world.broker.armed)
        assert self.world.sweep() == is_mine
        silent = [name for name, at_us in self.seen_us.items() if at_us < now_us - 3e6 * SWEEP_S]
        if silent:  # the entries that they held are armed again
            self.armed_us = min(self.armed_us, now_us)
        for name in silent:
            del self.seen_us[name]
        if not is_mine:
            return
        since_us, until_us = max(self.armed_us, now_us), now_us + HORIZON_S * 1_000_000
        self.swept_us, self.armed_us = now_us, until_us
        waiting = self.those(Status.NOT_COMPLETE)
        armed = [known for known in waiting if since_us < known.due_us <= until_us]
        self.lapse(self.lapsing())
        if self.has_changed and not self.is_paused:
            for known in self.those(Status.HELD):
                known.move("release")
                if now_us < known.due_us <= until_us:
                    armed.append(known)
        self.has_changed = False
        sent = {entry[:2] for entry in self.world.broker.armed[before:]}
        assert sent == {(known.task.id, known.version) for known in armed}

    @precondition(lambda self: self.world.broker.armed)
    @rule(pick=st.integers(0, 99), most=st.integers(1, 3), is_again=st.booleans())
    def deliver(self, pick: int, most: int, is_again: bool) -> None:
        """Deliver a message, even if its tasks have changed since. It may be delivered twice."""
        armed = self.world.broker.armed
        part = slice(first := pick % len(armed), first + most)
        entries = list({entry.id: entry for entry in armed[part]}.values())
        if not is_again:
            del armed[part]
        self.take_named(entries)

    @rule()
    def flush_the_broker(self) -> None:
        self.world.broker.lose()

    # -- pauses -----------------------------------------------------------------------------------

    @rule()
    def pause_or_resume(self) -> None:
        policies = self.world.delays.policies
        (policies.resume if self.is_paused else policies.pause)(tag="t")
        self.is_paused, self.has_changed = not self.is_paused, True

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True))
    def release(self, ids: list[int]) -> None:
        may_run = [] if self.is_paused else ids
        held = [self.known[id] for id in may_run if self.known[id].can("release")]
        released = {entry[:2] for entry in self.world.release(*ids)}
        for known in held:
            known.move("release")
        assert released == {(known.task.id, known.version) for known in held}

    @precondition(lambda self: bool(self.running()))
    @rule(pick=st.integers(0, 99), is_stale=st.booleans())
    def hold_back(self, pick: int, is_stale: bool) -> None:
        known = self.known[self.running()[pick % len(self.running())]]
        assert known.claim is not None
        if is_stale and known.stale:
            assert self.world.hold_back(known.stale[-1]) == set()
        elif self.is_paused:
            assert self.world.hold_back(known.claim) == {known.task.id}
            known.move("hold_back")
            known.runs -= 1
        else:
            assert self.world.hold_back(known.claim) == set()

    # -- invariants -------------------------------------------------------------------------------

    @invariant()
    def rows_are_as_known(self) -> None:
        found = {task.id: task for task in self.world.delays.find(limit=1000)}
        assert set(found) == set(self.known)
        for id, known in self.known.items():
            task = found[id]
            shown = (task.status, task.version, task.runs, task.lapses)
            assert shown == (known.status, known.version, known.runs, known.lapses), id
            assert (task.lease_until is not None) == (task.status is Status.RUNNING)
            assert to_us(task.expected_time) == known.due_us

    @invariant()
    def keys_name_what_they_must(self) -> None:
        for key in "ab":
            assert self.world.owner(key, "t") == self.keys.get(key)


def test_no_order_of_operations_leads_to_a_state_outside_the_moves() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, times = open_store(f"sqlite:///{Path(folder) / 'moves.sqlite3'}"), Times()
        times.serve(store)
        machine = type("MovesHere", (Moves,), {"store": store, "times": times})
        with installed(times, {}):
            steps = settings(
                max_examples=120, stateful_step_count=50, deadline=None, derandomize=True
            )
            quiet = settings(steps, database=None, suppress_health_check=[HealthCheck.too_slow])
            stateful.run_state_machine_as_test(machine, settings=quiet)
        store.close()
