"""How long the tasks of a tag occupy a process, and what the limits of a tag allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from delaytasks.core.policies import Policy
from delaytasks.core.settings import Settings
from delaytasks.forecast.result import RateSource
from delaytasks.forecast.simulation import Service

#: The duration of a task of which nothing is known, in seconds.
ASSUMED_DURATION_S = 0.05
#: The time that a chunk costs a process in addition to its processors (docs/capacity.md).
CHUNK_S = 0.008
#: The part of it that one row costs at least.
LEAST_ROW_S = 0.00006
#: The most rows of a chunk.
MAX_ROWS = 200


class TagRate(NamedTuple):
    """The needs of a tag's tasks."""

    service: Service
    source: RateSource

    @property
    def per_process(self) -> float:
        """The number of tasks that one process runs in a second."""
        return 1 / self.service.seconds


@dataclass(frozen=True)
class Rates:
    """Computes the rates of tags.

    Parameters
    ----------
    settings
        The settings.
    together_of
        Returns how many tasks of a tag a process runs concurrently, or in one batch.
    durations
        The measured durations in seconds, by tag.
    rate
        The number of tasks that a process runs in a second, as the caller gave it. It applies to
        tags that were not measured.
    policies
        The policies of tags.
    """

    settings: Settings
    together_of: Callable[[str], int]
    durations: Mapping[str, float]
    rate: float | None
    policies: Mapping[str, Policy]

    def of(self, tags: Iterable[str]) -> dict[str, TagRate]:
        return {tag: self._of(tag) for tag in tags}

    def _of(self, tag: str) -> TagRate:
        measured_s = self.durations.get(tag)
        if measured_s is None and self.rate is not None:
            seconds = 1 / self.rate
            return TagRate(Service(seconds, self._most_per_s(tag, seconds)), "given")
        duration_s = ASSUMED_DURATION_S if measured_s is None else measured_s
        seconds = self._process_seconds(duration_s / self.together_of(tag))
        source: RateSource = "assumed" if measured_s is None else "measured"
        return TagRate(Service(seconds, self._most_per_s(tag, duration_s)), source)

    def _process_seconds(self, duration_s: float) -> float:
        """Add to the duration what delaytasks needs itself, by the model of docs/capacity.md."""
        budget_s = self.settings.chunk_time_budget_s
        rows = min(max(budget_s / max(duration_s, 1e-9), 1.0), MAX_ROWS)
        return duration_s + max(CHUNK_S / rows, LEAST_ROW_S)

    def _most_per_s(self, tag: str, duration_s: float) -> float | None:
        policy = self.policies.get(tag)
        if policy is None or policy.unusable is not None:
            return None
        most: list[float] = []
        if policy.rate is not None and policy.rate_period_s is not None:
            most.append(policy.rate / policy.rate_period_s)
        if policy.concurrency is not None:
            most.append(policy.concurrency / max(duration_s, LEAST_ROW_S))
        return min(most, default=None)
