"""Gauges: the numbers of tasks and workers that the sweep counts once a minute."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from delaytasks.core.body import dump_json


@dataclass(frozen=True, slots=True)
class Gauges:
    """What a sweep has counted in one database.

    Attributes
    ----------
    pending, running, failed, held
        The tasks of a status. Large numbers are the planner's estimates.
    overdue
        The waiting tasks that are late by more than the grace period.
    oldest_overdue_s
        The lateness of the oldest of them, or 0.
    sweep_s
        The duration of the sweep.
    workers
        The workers that have reported recently.
    """

    pending: float = 0
    overdue: float = 0
    running: float = 0
    failed: float = 0
    held: float = 0
    oldest_overdue_s: float = 0
    sweep_s: float = 0
    workers: float = 0

    def as_text(self) -> str:
        return dump_json(_rounded(self))

    @classmethod
    def of(cls, stored: str | Mapping[str, float]) -> Gauges:
        """Read what `as_text` returned. Unknown names of a newer version are left out."""
        try:
            values = json.loads(stored) if isinstance(stored, str) else stored
            return cls(**{name: values[name] for name in GAUGE_NAMES if name in values})
        except (ValueError, TypeError, KeyError):
            return cls()

    @classmethod
    def mean(cls, many: Sequence[Gauges]) -> Gauges:
        """Return the means of gauges of one database at several times."""
        return cls(
            **{
                name: round(sum(getattr(one, name) for one in many) / len(many), 3)
                for name in GAUGE_NAMES
            }
        )

    @classmethod
    def total(cls, many: Sequence[Gauges]) -> Gauges:
        """Return the gauges of several databases together. Each worker reports to all of them."""
        highest = {"oldest_overdue_s", "sweep_s", "workers"}
        return cls(
            **{
                name: (max if name in highest else sum)(getattr(one, name) for one in many)
                for name in GAUGE_NAMES
            }
        )


GAUGE_NAMES = tuple(field.name for field in fields(Gauges))


def packed_gauges(parts: Mapping[int, Gauges]) -> bytes:
    """Return the gauges of the minutes of an hour, or of the hours of a day, in compact form."""
    stored = {part: _rounded(gauges) for part, gauges in sorted(parts.items())}
    return zlib.compress(dump_json(stored).encode(), 9)


def unpacked_gauges(packed: bytes) -> dict[int, Gauges]:
    """Read what `packed_gauges` returned; a value of another program has no parts."""
    try:
        return {
            int(part): Gauges.of(values)
            for part, values in json.loads(zlib.decompress(packed)).items()
        }
    except (ValueError, TypeError, AttributeError, zlib.error):
        return {}


def _rounded(gauges: Gauges) -> dict[str, float]:
    return {name: round(value, 3) for name, value in asdict(gauges).items() if value}
