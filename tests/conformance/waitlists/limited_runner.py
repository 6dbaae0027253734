"""A runner whose tags have limits."""

from __future__ import annotations

from datetime import timedelta
from functools import cached_property
from typing import Any

from sqlalchemy import select

from delaytasks import DelayTask
from delaytasks.limits.admission import Admission
from tests.recording import RunnerHarness


class LimitedRunnerHarness(RunnerHarness):
    @cached_property
    def admission(self) -> Admission:
        claims: Any = self.claims
        return Admission(self.waitlist, claims)

    def limit(self, tag: str = "note", **limits: Any) -> None:
        self.store.policies.set("tag", tag, limits, "a test")

    def claim(self, *tasks: DelayTask) -> list[DelayTask]:
        """Claim tasks like a worker that runs them for a while."""
        return self.claims.claim([self.entry(task) for task in tasks])

    def admit(self, limit: int = 100, tag: str = "note") -> list[DelayTask]:
        return list(self.admission.admit("default", tag, limit)[0])

    def waitlist_rows(self) -> int:
        with self.store.database.begin() as connection:
            return len(connection.execute(select(self.store.schema.waitlists)).all())


def touch_task(bench: LimitedRunnerHarness, task: DelayTask) -> None:
    assert bench.store.touches.touch(task.id, bench.clock.now() + timedelta(seconds=60))
