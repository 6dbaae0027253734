"""Ladders: how long to wait before each further run of a task that failed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from delaytasks.core.errors import InvalidLadderError
from delaytasks.core.inputs import check_wait
from delaytasks.core.text import shown

#: More than anybody climbs, and a row that names its own ladder stays small.
MAX_RUNGS = 1000
MAX_RUNG_S = 366 * 86400.0


@dataclass(frozen=True, slots=True)
class Ladder:
    """`Ladder("15s 3m 10m")` has three rungs: a task runs once, and up to three times more.

    Each rung is the time from a failed run to the next one. `jitter=0.1` draws each from 90% to 110% of it, so that
    what failed together does not come back together.
    """

    rungs_s: tuple[float, ...]
    jitter: float

    def __init__(self, rungs: str | Iterable[str | float | timedelta], *, jitter: float = 0.0) -> None:
        if isinstance(rungs, (bytes, Mapping)) or not isinstance(rungs, Iterable):
            raise InvalidLadderError(f"a ladder is made of text such as '15s 3m', or of a list, not of {shown(rungs)}")
        items: Iterable[object] = rungs.split() if isinstance(rungs, str) else itertools.islice(rungs, MAX_RUNGS + 1)
        rungs_s = tuple(check_wait(item, MAX_RUNG_S) for item in items)
        if not 0 < len(rungs_s) <= MAX_RUNGS:
            raise InvalidLadderError(f"a ladder has 1 to {MAX_RUNGS} rungs, not {len(rungs_s)}")
        if isinstance(jitter, bool) or not isinstance(jitter, (int, float)) or not 0 <= jitter <= 1:
            raise InvalidLadderError(f"jitter is a number from 0 to 1, not {shown(jitter)}")
        object.__setattr__(self, "rungs_s", rungs_s)
        object.__setattr__(self, "jitter", float(jitter))

    @classmethod
    def fixed(cls, wait: str | float | timedelta, *, times: int, jitter: float = 0.0) -> Ladder:
        """The same wait before each of `times` further runs."""
        return cls([wait] * _checked(times), jitter=jitter)

    @classmethod
    def exponential(
        cls,
        first: str | float | timedelta,
        *,
        times: int,
        factor: float = 2.0,
        cap: str | float | timedelta = "1d",
        jitter: float = 0.1,
    ) -> Ladder:
        """Each wait is `factor` times the one before it, up to `cap`."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor <= 100:
            raise InvalidLadderError(f"factor is a number from 1 to 100, not {shown(factor)}")
        highest = check_wait(cap, MAX_RUNG_S)
        rungs, wait = [], check_wait(first, MAX_RUNG_S)
        for _ in range(_checked(times)):
            rungs.append(min(wait, highest))
            wait = min(wait * factor, MAX_RUNG_S)
        return cls(rungs, jitter=jitter)

    def has_rung(self, failures: int) -> bool:
        """Whether it goes on after so many failed runs."""
        return failures <= len(self.rungs_s)

    def wait_s(self, failures: int) -> float | None:
        """The wait after so many failed runs; None when no rung is left."""
        if not self.has_rung(failures):
            return None
        wait = self.rungs_s[max(failures, 1) - 1]  # another program may count from anywhere
        return wait * random.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else wait


@dataclass(frozen=True, slots=True)
class Retries:
    """Which ladder a tag's failures climb, by the kind of error; None for those that are FAILED at once."""

    by_error: Mapping[type[BaseException], Ladder | None]

    @classmethod
    def of(cls, retry: RetryRule) -> Retries:
        """A ladder (or the text of one) for all errors, or a mapping of exception types to ladders."""
        if retry is None:
            return cls({})
        if not isinstance(retry, Mapping):
            return cls({Exception: ladder_of(retry)})
        for kind in retry:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise InvalidLadderError(f"retry maps exception types to ladders; {shown(kind)} is none")
        return cls({kind: None if ladder is None else ladder_of(ladder) for kind, ladder in retry.items()})

    def ladder_for(self, kind: type[BaseException], own: Ladder | None = None) -> Ladder | None:
        """By the nearest class; a task's own ladder takes the place of its tag's, but makes nothing worth another try
        that the tag says is not."""
        for base in kind.__mro__:
            if base in self.by_error:
                ladder = self.by_error[base]
                return None if ladder is None else own or ladder
        return own


#: Of the source designs: levels of a delay queue, and how often a partner is notified.
LEVELS = Ladder("5s 30s 1m 10m 30m 1h 6h 1d 2d")
NOTIFY = Ladder("15s 3m 10m 30m 30m 1h 2h 6h 15h")


def ladder_of(retry: Ladder | str | int | Iterable[str | float | timedelta]) -> Ladder:
    """The retry schedule that `retry=` means. An integer is a number of retries with the delays of `LEVELS`, of which
    the last one repeats."""
    if isinstance(retry, Ladder):
        return retry
    if isinstance(retry, (str, Iterable)):
        return Ladder(retry)
    if isinstance(retry, bool) or not isinstance(retry, int) or not 0 < retry <= MAX_RUNGS:
        raise InvalidLadderError(
            f"retry is a number of retries from 1 to {MAX_RUNGS}, delays such as '15s 3m', or a Ladder, not "
            f"{shown(retry)}; leave it out where there is nothing to retry"
        )
    delays_s = LEVELS.rungs_s[:retry]
    return Ladder(delays_s + delays_s[-1:] * (retry - len(delays_s)))


def _checked(times: object) -> int:
    if isinstance(times, bool) or not isinstance(times, int) or not 0 < times <= MAX_RUNGS:
        raise InvalidLadderError(f"times is an integer from 1 to {MAX_RUNGS}, not {shown(times)}")
    return times


RetryRule = (
    Ladder
    | str
    | int
    | Iterable[str | float | timedelta]
    | Mapping[type[BaseException], Ladder | str | int | None]
    | None
)
