"""The results: one value per round for each measure and system, or the reason for its absence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


class Measure(NamedTuple):
    """A column of a table; `better` is the direction of improvement."""

    name: str
    workload: str
    what: str
    unit: str
    better: Literal["more", "less"]


_P50, _P99 = "lateness p50", "lateness p99"
_MEASURES = [
    Measure("call", "call", "one call each", "tasks/s", "more"),
    Measure("bulk", "bulk", "in bulk", "tasks/s", "more"),
    Measure("burst", "burst", "drained", "tasks/s", "more"),
    Measure("burst_p99", "burst", _P99, "ms", "less"),
    *[
        measure
        for rate in ("50", "1000")
        for measure in (
            Measure(f"steady_{rate}_p50", f"steady_{rate}", _P50, "ms", "less"),
            Measure(f"steady_{rate}_p99", f"steady_{rate}", _P99, "ms", "less"),
            Measure(f"steady_{rate}_early", f"steady_{rate}", "started early", "%", "less"),
            Measure(
                f"steady_{rate}_worker",
                f"steady_{rate}",
                "CPU of the worker",
                "ms per task",
                "less",
            ),
            Measure(
                f"steady_{rate}_servers",
                f"steady_{rate}",
                "CPU of the servers",
                "ms per task",
                "less",
            ),
        )
    ],
    Measure("backlog_ran", "backlog", "ran", "%", "more"),
    Measure("backlog_without", "backlog", f"{_P99} without the backlog", "ms", "less"),
    Measure("backlog_p99", "backlog", _P99, "ms", "less"),
    Measure("backlog_worker", "backlog", "worker memory", "bytes per far task", "less"),
    Measure("backlog_server", "backlog", "memory of the servers", "bytes per far task", "less"),
    Measure("recovery_last", "recovery", "lateness of the last task", "s", "less"),
    Measure("recovery_missing", "recovery", "did not run", "tasks", "less"),
]
MEASURES = {measure.name: measure for measure in _MEASURES}


@dataclass
class Results:
    #: The description of each system: title, version and configuration.
    systems: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The systems that could not be measured, with the reasons.
    left_out: dict[str, str] = field(default_factory=dict)
    #: The size of each workload as text.
    sizes: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    #: Remarks on a value, or the reason for its absence; by workload and system.
    remarks: dict[str, dict[str, str]] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    is_quick: bool = False
    failures: list[str] = field(default_factory=list)

    def add(self, measure: str, system: str, value: float | None) -> None:
        if measure not in MEASURES:
            raise KeyError(measure)
        if value is not None:
            self.values.setdefault(measure, {}).setdefault(system, []).append(value)

    def remark(self, workload: str, system: str, text: str) -> None:
        """Add a remark, unless an earlier round has added it."""
        if not text:
            return
        before = self.remarks.setdefault(workload, {}).get(system, "")
        if text not in before:
            self.remarks[workload][system] = f"{before}; {text}" if before else text

    def of(self, measure: str) -> Mapping[str, list[float]]:
        return self.values.get(measure, {})

    def median(self, measure: str, system: str) -> float | None:
        found = self.of(measure).get(system)
        return statistics.median(found) if found else None

    def as_json(self) -> dict[str, Any]:
        figures = [
            {**measure._asdict(), "values": self.values[measure.name]}
            for measure in _MEASURES
            if measure.name in self.values
        ]
        return {
            "machine": self.machine,
            "quick": self.is_quick,
            "peers": {
                "systems": self.systems,
                "left_out": self.left_out,
                "sizes": self.sizes,
                "remarks": self.remarks,
            },
            "figures": figures,
            "failures": self.failures,
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Results:
        values = {figure["name"]: figure["values"] for figure in found["figures"]}
        return cls(
            **found["peers"],
            values=values,
            machine=found["machine"],
            is_quick=found["quick"],
            failures=found["failures"],
        )
