"""Random operations on a real store, checked against the table of moves.

The model knows each task's status, version, attempts, lapses and due time, and which claim may
settle it until when. The clock is simulated, the broker is flushed and redelivers messages, and
workers die. After each operation, the row must be in a state that MOVES allows. A refused call must
leave the row unchanged.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from chaos.simulation.clock import Times, installed
from delaytasks.core.clock import from_us, to_us
from delaytasks.core.filters import Filter
from delaytasks.core.interfaces import Entry, Settlement
from delaytasks.core.states import MOVES, Status
from delaytasks.core.task import DelayedTask
from delaytasks.timers.arming import read_message
from tests.conftest import open_store
from tests.property.machine import HORIZON_S, LEASE_US, MAX_LOST_LEASES, SWEEP_S, Producers

pytestmark = pytest.mark.slow

ENDS = ["succeed", "fail", "give_back", "give_back"]


class Moves(Producers):
    """The calls of workers, sweeps and messages."""

    tasks = Producers.tasks

    # -- workers ----------------------------------------------------------------------------------

    def took(self, claimed: list[DelayedTask]) -> None:
        for task in claimed:
            known = self.known[task.id]
            assert known.due_us <= self.times.now_us
            known.move("claim")
            known.lease_us = self.times.now_us // 1000 * 1000 + LEASE_US
            known.runs += 1
            known.claim = task
            assert (task.version, task.runs, task.lapses) == (
                known.version,
                known.runs,
                known.lapses,
            )

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True), is_stale=st.booleans())
    def claim(self, ids: list[int], is_stale: bool) -> None:
        named = [self.known[id] for id in ids]
        entries = [self.entry(known) for known in named]
        if is_stale:
            entries = [replace_version(entry, entry.version - 1) for entry in entries]
        claimed = self.claims.claim(entries)
        wanted = {k.task.id for k in named if self.can_run(k) and k.lapses == 0 and not is_stale}
        assert {task.id for task in claimed} == wanted
        self.took(claimed)

    @rule(id=tasks)
    def claim_alone(self, id: int) -> None:
        known = self.known[id]
        claimed = self.claims.claim_alone(id, known.version)
        assert bool(claimed) == self.can_run(known)
        self.took(claimed)

    @precondition(lambda self: any(map(self.can_run, self.known.values())))
    @rule(limit=st.integers(1, 3))
    def claim_due(self, limit: int) -> None:
        claimed = self.claims.claim_due("default", [0], limit)
        due = [known for known in self.known.values() if self.can_run(known) and known.lapses == 0]
        assert len(claimed) == min(limit, len(due))
        self.took(claimed)

    @precondition(lambda self: any(known.lapses for known in self.known.values()))
    @rule()
    def claim_recovered(self) -> None:
        claimed = self.claims.claim_recovered("default")
        abandoned = [
            known for known in self.known.values() if self.can_run(known) and known.lapses > 0
        ]
        assert bool(claimed) == bool(abandoned)
        self.took(claimed)

    def running(self) -> list[int]:
        """Return the tasks that run in living workers."""
        return sorted(id for id, known in self.known.items() if known.claim is not None)

    @precondition(lambda self: bool(self.running()))
    @rule(pick=st.integers(0, 99), move=st.sampled_from(ENDS), is_later=st.booleans())
    def settle(self, pick: int, move: Any, is_later: bool) -> None:
        id = self.running()[pick % len(self.running())]
        known = self.known[id]
        assert known.claim is not None
        due = self.due(False) if is_later and move == "give_back" else None
        assert self.claims.settle([Settlement(known.claim, move, expected_time=due)]) == {id}
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
            self.claims.settle([Settlement(claim, move)])

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
        assert self.store.leases.renew([self.worker], from_us(0)).rows == len(running)
        for id in running:
            self.known[id].lease_us = self.times.now_us // 1000 * 1000 + LEASE_US

    # -- time, sweeps and messages ----------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 6, 6, 20, 70]), sweeps=st.booleans())
    def advance(self, seconds: int, sweeps: bool) -> None:
        self.times.advance(seconds)
        if sweeps:
            self.sweep()

    def lapsing(self) -> list[int]:
        running = (known for known in self.known.values() if known.status is Status.RUNNING)
        return sorted(known.task.id for known in running if known.lease_us < self.times.now_us)

    def lapse(self, ids: list[int]) -> None:
        for id in ids:
            known = self.known[id]
            known.lapses += 1
            if known.lapses >= MAX_LOST_LEASES:
                known.move("fail_worker_lost")
                self.leave_key(known)
            else:
                known.move("recover")

    @precondition(lambda self: bool(self.lapsing()))
    @rule(limit=st.integers(1, 5))
    def lapse_some(self, limit: int) -> None:
        lapsing = self.lapsing()[:limit]
        assert self.store.sweeps.recover(MAX_LOST_LEASES, limit).total == len(lapsing)
        self.lapse(lapsing)

    @rule(times=st.integers(1, 3))
    def go_on_sweeping(self, times: int) -> None:
        for _ in range(times):
            self.times.advance(SWEEP_S)
            self.sweep()

    @rule()
    def sweep(self) -> None:
        is_mine = self.times.now_us - self.swept_us >= 0.8e6 * SWEEP_S
        self.report_worker()
        before = len(self.broker.messages)
        assert self.sweeper.sweep() == is_mine
        now_us = self.times.now_us
        silent = {
            name for name, seen_us in self.seen_us.items() if seen_us < now_us - 3e6 * SWEEP_S
        }
        if silent:  # the entries that they held are armed again
            self.armed_us = min(self.armed_us, now_us)
        for name in silent:
            del self.seen_us[name]
        if not is_mine:
            return
        since_us, until_us = max(self.armed_us, now_us), now_us + HORIZON_S * 1_000_000
        self.swept_us = now_us
        waiting = [known for known in self.known.values() if known.status is Status.NOT_COMPLETE]
        near = {(k.task.id, k.version) for k in waiting if since_us < k.due_us <= until_us}
        self.lapse(self.lapsing())
        sent = [message.read()[0] for message in self.broker.messages[before:]]
        assert {(entry[0], entry[1]) for entries in sent for entry in entries} == near
        self.armed_us = until_us

    @precondition(lambda self: self.broker.messages)
    @rule(pick=st.integers(0, 99), is_again=st.booleans())
    def deliver(self, pick: int, is_again: bool) -> None:
        """Deliver a message, even if its tasks have changed since. It may be delivered twice."""
        number = pick % len(self.broker.messages)
        asked = read_message(self.broker.messages[number].read(), "default")
        if not is_again:
            del self.broker.messages[number]
        if asked.entries:
            named = [(self.known[entry.id], entry) for entry in asked.entries]
            wanted = {
                e.id
                for known, e in named
                if self.can_run(known) and (known.version, known.lapses) == (e.version, 0)
            }
            claimed = self.claims.claim(asked.entries)
            assert {task.id for task in claimed} == wanted
            self.took(claimed)
        else:
            self.claim_due(3)

    @rule()
    def flush_the_broker(self) -> None:
        self.broker.flush()

    # -- pauses -----------------------------------------------------------------------------------

    @rule(is_paused=st.booleans())
    def pause(self, is_paused: bool) -> None:
        self.store.policies.set("tag", "t", {"is_paused": is_paused}, "me")

    def is_paused(self) -> bool:
        return any(policy.is_paused for policy in self.store.policies.read())

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True))
    def hold(self, ids: list[int]) -> None:
        waiting = [self.known[id] for id in ids if self.known[id].status in MOVES["hold"].sources]
        assert self.store.paused_rows.hold(ids) == (len(waiting) if self.is_paused() else 0)
        for known in waiting if self.is_paused() else ():
            known.move("hold")

    @rule(ids=st.lists(tasks, min_size=1, max_size=4, unique=True))
    def release(self, ids: list[int]) -> None:
        held = [self.known[id] for id in ids if self.known[id].status in MOVES["release"].sources]
        released = self.store.paused_rows.release(ids)
        assert {entry[:2] for entry in released} == {
            (known.task.id, known.version + 1) for known in held
        }
        for known in held:
            known.move("release")

    @precondition(lambda self: bool(self.running()))
    @rule(pick=st.integers(0, 99), is_stale=st.booleans())
    def hold_back(self, pick: int, is_stale: bool) -> None:
        known = self.known[self.running()[pick % len(self.running())]]
        assert known.claim is not None
        if is_stale and known.stale:
            assert self.store.paused_rows.hold_claimed(known.stale[-1:]) == set()
        elif self.is_paused():
            assert self.store.paused_rows.hold_claimed([known.claim]) == {known.task.id}
            known.move("hold_back")
            known.runs -= 1
        else:
            assert self.store.paused_rows.hold_claimed([known.claim]) == set()

    # -- invariants -------------------------------------------------------------------------------

    @invariant()
    def rows_are_as_known(self) -> None:
        found = {task.id: task for task in self.store.tasks.find(Filter(), 1000)}
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
            assert self.store.tasks.id_of_key("t", key) == self.keys.get(key)


def replace_version(entry: Entry, version: int) -> Entry:
    return entry._replace(version=version)


def test_no_order_of_operations_leads_to_a_state_outside_the_moves() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store, times = open_store(f"sqlite:///{Path(folder) / 'moves.sqlite3'}"), Times()
        times.serve(store)
        machine = type("MovesHere", (Moves,), {"store": store, "times": times})
        with installed(times, {}):
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
