"""The results of a case: values of several rounds and their target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Target:
    """A bound. `of` is the compared value: ours, or its ratio to bare Celery's."""

    of: Literal["value", "ratio"]
    most: float | None = None
    least: float | None = None

    def __str__(self) -> str:
        if self.most is not None and self.most == self.least:
            return f"= {self.most:,g}"
        sign, bound = ("≤", self.most) if self.most is not None else ("≥", self.least)
        return f"{sign} {bound:,g}{' ×' if self.of == 'ratio' else ''}"

    def is_reached(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (
            self.least is None or value >= self.least
        )


@dataclass
class Figure:
    """One line of the table. `ours` and `bare` have one value for each round."""

    case: str
    what: str
    unit: str
    ours: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    target: Target | None = None
    #: The label in the column of bare Celery if the comparison is with something else.
    against: str = ""
    remark: str = ""

    def add(self, ours: float, bare: float | None = None) -> None:
        self.ours.append(ours)
        if bare is not None:
            self.bare.append(bare)

    @property
    def ratios(self) -> list[float]:
        """The ratios of each round. Whatever slows the machine for a while slows both sides."""
        return [a / b if b else math.inf for a, b in zip(self.ours, self.bare, strict=False)]

    @property
    def is_reached(self) -> bool | None:
        if self.target is None or not self.ours:
            return None
        values = self.ratios if self.target.of == "ratio" else self.ours
        return bool(values) and self.target.is_reached(statistics.median(values))

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "what": self.what,
            "unit": self.unit,
            "delaytasks": self.ours,
            "celery": self.bare,
            "against": self.against or "celery eta",
            "ratios": self.ratios,
            "target": None if self.target is None else str(self.target),
            "reached": self.is_reached,
            "remark": self.remark,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
