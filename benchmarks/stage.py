"""The context of a case: the sides, and the amount of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.figures import Figure, Target
from benchmarks.sides import Bare, DurableEta, Ours, Side

S = TypeVar("S", bound=Side)
T = TypeVar("T")


@dataclass
class CaseContext:
    ours: Ours
    ours_in_redis: Ours
    ours_direct: Ours
    durable_eta: DurableEta
    bare: Bare
    is_quick: bool
    say: Callable[[str], None]
    round: int = 0
    _figures: dict[tuple[str, str], Figure] = field(default_factory=dict)

    def each(self, work: Callable[[S], T], *sides: S) -> list[T]:
        """Call `work` for each side, and return the results in the order of `sides`.

        Each round begins with another side, because the database may still process the effects of
        one side while the next one is measured.
        """
        first = self.round % len(sides)
        found = {side.name: work(side) for side in sides[first:] + sides[:first]}
        return [found[side.name] for side in sides]

    def figure(
        self, case: str, what: str, unit: str, target: Target | None = None, against: str = ""
    ) -> Figure:
        """Return the figure of this name. The first round creates it."""
        made = Figure(case, what, unit, target=target, against=against)
        return self._figures.setdefault((case, what), made)

    @property
    def figures(self) -> list[Figure]:
        return list(self._figures.values())

    @property
    def timers(self) -> tuple[Ours, Ours]:
        """delaytasks with each of the timers."""
        return self.ours, self.ours_in_redis

    def size(self, full: int, quick: int) -> int:
        return quick if self.is_quick else full
