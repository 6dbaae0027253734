"""The metrics of a process that schedules tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from delaytasks.metrics.families import Family, Sample
from delaytasks.wiring import wiring_of

if TYPE_CHECKING:
    from delaytasks.core.events import Events
    from delaytasks.wiring import Wired


class ProducerMetrics:
    """Counts what this process has scheduled since its start."""

    def __init__(self, events: Events) -> None:
        self._events = events

    @classmethod
    def of(cls, delays: Wired) -> ProducerMetrics:
        return cls(wiring_of(delays).events)

    def families(self) -> Iterator[Family]:
        yield Family(
            "delaytasks_scheduled",
            "Tasks that this process has scheduled.",
            "counter",
            (),
            [Sample((), self._events.counts["task.scheduled"])],
        )
