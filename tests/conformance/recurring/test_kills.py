"""Each occurrence gets one task if sweepers die at any step, and with any number of sweepers."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import event

from delaytasks.recurrence import creation as creation_module
from delaytasks.storage.store import Store
from tests.conformance.recurring.recurring_harness import RecurringHarness

EXPECTED_S = [10, 20, 30, 40, 50, 60, 70]


class KilledError(Exception):
    """Ends a sweeper. SQLAlchemy rolls its transaction back, as a database does after a death."""


class Killer:
    """Kills the sweeper at one of its steps: before or after a statement, or after a commit."""

    def __init__(self, harness: RecurringHarness, step: int) -> None:
        self._harness = harness
        self._left = step
        self._engine = harness.store.database.tx
        self.has_killed = False

    def sweep(self, at_s: float) -> None:
        names = ("before_cursor_execute", "after_cursor_execute")
        for name in names:
            event.listen(self._engine, name, self._count)
        try:
            self._harness.sweep(at_s, self._count)
        except KilledError:
            pass
        for name in names:
            event.remove(self._engine, name, self._count)

    def _count(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.has_killed = True
            raise KilledError


def test_a_sweeper_may_die_at_each_step(harness: RecurringHarness) -> None:
    """Every step of a sweep is a point of death, until the sweep ends without one."""
    steps = 0
    while True:
        steps += 1
        name = f"r{steps}"
        harness.recurring.set(name, name, every="10s", start=harness.at(10))
        killer = Killer(harness, steps)
        killer.sweep(0)
        if not killer.has_killed:
            break
        assert harness.due_s(name) in ([], EXPECTED_S), f"step {steps} left a part of the tasks"
        harness.sweep(0)
        assert harness.due_s(name) == EXPECTED_S, f"after a death at step {steps}"
    assert steps >= 8


def test_sweepers_that_sweep_together_make_each_task_once(
    store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normally `begin_sweep` lets only one process sweep. Here nothing keeps the others away."""
    monkeypatch.setattr(creation_module, "BATCH_SCHEDULES", 4)
    sweepers = [RecurringHarness(database_url, store) for _ in range(3)]
    first, errors = sweepers[0], list[BaseException]()
    for number in range(10):
        overlap: Any = "skip" if number == 9 else "allow"
        first.recurring.set(
            f"r{number}", "report", every="10s", start=first.at(10), overlap=overlap
        )

    def sweep(sweeper: RecurringHarness) -> None:
        for at_s in range(0, 60, 5):
            sweeper.start = first.start
            try:
                sweeper.sweep(at_s)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=sweep, args=(sweeper,)) for sweeper in sweepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # A sweeper that meets a change is rolled back as a whole; the next sweep repeats its work.
    first.sweep(60)
    keys = Counter(task.key for task in first.tasks())
    assert {key: count for key, count in keys.items() if count > 1} == {}
    names = Counter((key or "").partition("@")[0] for key in keys)
    assert names == {**{f"r{number}": 13 for number in range(9)}, "r9": 1}
    assert all("database is locked" in str(error) for error in errors), errors
    for sweeper in sweepers:
        sweeper.close()
