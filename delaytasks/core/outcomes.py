"""What a processor may return instead of nothing: how its task is to end, or go on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Done:
    """Success, as any other return value is. `result` is kept where the processor says `keep_result=True`."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Retry:
    """A failed attempt: run again after `after`, or after the ladder's next wait. Past the last rung it is FAILED."""

    after: float | str | timedelta | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Snooze:
    """Not now: run again after `after`, as if this run had not been."""

    after: float | str | timedelta


@dataclass(frozen=True, slots=True)
class Cancel:
    """Not needed any more: CANCELLED."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """FAILED, whatever rungs the ladder has left."""

    reason: str = ""


Outcome = Done | Retry | Snooze | Cancel | Fail
