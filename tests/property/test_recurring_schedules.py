"""Random sweeps, deaths, pauses and runs: no occurrence has two tasks, and none is left out."""

from __future__ import annotations

import tempfile
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from delaytasks import DelayedTask, Status
from tests.conftest import empty, open_store
from tests.world.recurring_world import RecurringWorld

EVERY_S = 10


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        url = f"sqlite:///{Path(self._folder.name) / 'test.sqlite3'}"
        open_store(url, table_prefix="s_").close()
        self._world = RecurringWorld(url)

    @initialize(overlap=st.sampled_from(["allow", "skip"]), jitter=st.sampled_from([0, 7]))
    def begin(self, overlap: Any, jitter: int) -> None:
        empty(self._world.store)
        self.now_s, self.since_s = 0.0, 0.0
        self.is_paused, self.is_alone = False, overlap == "skip"
        rules: dict[str, Any] = {"missed": "all", "overlap": overlap}
        self._world.recur(EVERY_S, start=EVERY_S, jitter=jitter, **rules)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 10.0, 33.0, 200.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self._set_clock()

    @rule()
    def sweep(self) -> None:
        self._world.sweep_at(self.now_s)
        if not self.is_paused and not self.is_alone:
            first_s = self.since_s // EVERY_S * EVERY_S + EVERY_S
            count = int((self.now_s - first_s) // EVERY_S) + 1
            expected = {self._world.at(first_s + n * EVERY_S) for n in range(count)}
            assert expected <= self._occurrences().keys(), "occurrences without a task"

    @rule(step=st.integers(1, 20))
    def die(self, step: int) -> None:
        self._world.sweep_and_die(self.now_s, step)

    @rule()
    def finish_what_is_due(self) -> None:
        now = self._world.at(self.now_s)
        self._world.finish([task for task in self._waiting() if task.expected_time <= now])

    @precondition(lambda self: not self.is_paused)
    @rule()
    def pause(self) -> None:
        self._world.recurring.pause("r")
        self.is_paused = True
        now, jitter = self._world.at(self.now_s), timedelta(seconds=7)
        later = [task for task in self._waiting() if task.expected_time > now + jitter]
        assert not later, "a paused schedule runs"

    @precondition(lambda self: self.is_paused)
    @rule()
    def resume(self) -> None:
        self._world.recurring.resume("r")
        self.is_paused, self.since_s = False, self.now_s

    @rule()
    def run_now(self) -> None:
        self.now_s += 0.01  # two runs in one millisecond would have one key
        self._set_clock()
        self._world.recurring.schedule_now("r")

    @invariant()
    def no_occurrence_has_two_tasks(self) -> None:
        assert [at for at, count in self._occurrences().items() if count > 1] == []

    @invariant()
    def tasks_of_a_schedule_without_overlap_wait_alone(self) -> None:
        if self.is_alone:
            made = [task for task in self._waiting() if "." not in (task.key or "")]
            assert len(made) <= 1

    def _occurrences(self) -> Counter[Any]:
        """Return how many tasks each occurrence has, without those that a pause has cancelled."""
        keys = Counter(
            task.key
            for task in self._world.tasks()
            if task.status is not Status.CANCELLED and "." not in (task.key or "")
        )
        schedule = self._world.recurring.get("r")
        instants = [self._world.at(n * EVERY_S) for n in range(int(self.now_s // EVERY_S) + 30)]
        known = {schedule.key_of(at): at for at in instants}
        return Counter({known[key or ""]: count for key, count in keys.items()})

    def _waiting(self) -> list[DelayedTask]:
        return [task for task in self._world.tasks() if not task.is_finished]

    def _set_clock(self) -> None:
        clock = self._world.clock
        clock.advance((self._world.at(self.now_s) - clock.now()).total_seconds())

    def teardown(self) -> None:
        self._world.close()
        self._folder.cleanup()


TestSchedules = pytest.mark.slow(Schedules.TestCase)
TestSchedules.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a step takes too long to shrink many
)
