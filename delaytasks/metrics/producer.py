"""The metrics of a process that schedules tasks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from delaytasks.core.forks import reset_in_child
from delaytasks.core.run_counts import OTHER_TAGS
from delaytasks.metrics.families import Family, Sample
from delaytasks.runtime import runtime_of

if TYPE_CHECKING:
    from delaytasks.runtime import HasRuntime


class ProducerMetrics:
    """Counts by tag what this process schedules from now on. A subscriber of events.

    Parameters
    ----------
    max_tags
        All tags after this many are counted as one.
    """

    def __init__(self, max_tags: int) -> None:
        self._max_tags = max_tags
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        """Begin again at zero: the parent process reports its own counts."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(cls, delays: HasRuntime) -> ProducerMetrics:
        wiring = runtime_of(delays)
        metrics = cls(wiring.settings.statistics_tags)
        wiring.events.subscribe(metrics)
        return metrics

    def __call__(self, name: str, fields: Mapping[str, Any]) -> None:
        if name != "task.scheduled":
            return
        tag = fields["tag"]
        with self._lock:
            is_named = tag in self._counts or len(self._counts) < self._max_tags
            self._counts[tag if is_named else OTHER_TAGS] += fields.get("count", 1)

    def families(self) -> Iterator[Family]:
        with self._lock:
            counts = self._counts.copy()
        yield Family(
            "delaytasks_scheduled",
            "Tasks that this process has scheduled since it registered this metric.",
            "counter",
            ("tag",),
            [Sample((tag,), count) for tag, count in counts.items()],
        )
