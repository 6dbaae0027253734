"""Recurring schedules in a run. Each occurrence counts as a call that was acknowledged.

The schedules recur from the beginning of the run until its last fault is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from chaos.celery_messages import TAG as CELERY_TAG
from chaos.celery_messages import celery_note
from chaos.history import History, Occurrences
from chaos.occurrences import read_occurrences
from chaos.rows import rows_of
from chaos.system import SystemUnderTest
from delaytasks.model.clock import to_us
from delaytasks.model.errors import DelayTaskError

T = TypeVar("T")
TAG = "chaos.recurring"
#: The reads of a database that is starting again are repeated this often, each second.
TRIES = 60
#: A schedule whose tasks must not overlap is behind until the next sweep.
BEHIND_US = 5_000_000


class Recurs(NamedTuple):
    """A schedule of the run."""

    name: str
    every_s: int
    missed: Literal["all", "latest"] = "all"
    overlap: Literal["allow", "skip"] = "allow"
    is_celery: bool = False


SCHEDULES = (
    Recurs("each 1 s", 1),
    Recurs("each 2 s", 2),
    Recurs("each 5 s", 5),
    Recurs("the latest of each 2 s", 2, missed="latest"),
    Recurs("one at a time, each 2 s", 2, missed="latest", overlap="skip"),
    Recurs("a Celery task, each 2 s", 2, is_celery=True),
)


class RecurringLoad:
    def __init__(self, system: SystemUnderTest) -> None:
        self._system = system
        self._delays = system.deployment.producer(system.database_url)
        #: The first and the last occurrence of each schedule while it is watched.
        self._first_us = {each.name: self._start(each) for each in SCHEDULES}
        self._last_us: dict[str, int] = {}

    def stop(self) -> None:
        """Make no more tasks, and cancel the tasks that wait for later occurrences."""
        for each in SCHEDULES:
            until_us = self._retried(partial(self._handled_until_us, each.name))
            first_us, interval_us = self._first_us[each.name], each.every_s * 1_000_000
            self._last_us[each.name] = until_us - (until_us - first_us) % interval_us
            self._retried(partial(self._delays.recurring.pause, each.name))

    def read(self, history: History) -> None:
        """Add a call for each task, and the occurrences of each schedule, to the history."""
        rows = (*rows_of(self._delays, TAG), *rows_of(self._delays, CELERY_TAG))
        found = read_occurrences(history, rows)
        self._delays.close()
        history.occurrences = [
            Occurrences(
                each.name,
                each.every_s * 1_000_000,
                self._first_us[each.name],
                self._last_us[each.name],
                found.get(each.name, []),
                each.missed,
                each.overlap,
            )
            for each in SCHEDULES
        ]

    def _start(self, recurs: Recurs) -> int:
        body = {"folder": str(self._system.notes), "s": 0.3 if recurs.overlap == "skip" else 0}
        schedule = self._delays.recurring.set(
            recurs.name,
            celery_note if recurs.is_celery else TAG,
            None if recurs.is_celery else body,
            every=recurs.every_s,
            missed=recurs.missed,
            overlap=recurs.overlap,
        )
        assert schedule.start_at is not None
        return to_us(schedule.start_at) + recurs.every_s * 1_000_000

    def _handled_until_us(self, name: str) -> int:
        """Return the time until which sweeps have handled the occurrences, if it is recent."""
        now_us = to_us(self._system.store.tasks.now())
        next_at = self._delays.recurring.get(name).next_at
        if next_at is None:
            return now_us
        if to_us(next_at) < now_us - BEHIND_US:
            raise DelayTaskError(f"the schedule {name!r} is behind")
        return min(now_us, to_us(next_at) - 1)

    def _retried(self, call: Callable[[], T]) -> T:
        for attempt in range(TRIES):
            try:
                return call()
            except DelayTaskError:
                if attempt == TRIES - 1:
                    raise
                self._system.is_over.wait(1)
        raise AssertionError("the last attempt returns or raises")
