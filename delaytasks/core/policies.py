"""What is paused, and what limits there are: of tags and queues, kept in the database, changeable while all runs."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from delaytasks.core.durations import parse_duration, show_duration
from delaytasks.core.errors import InvalidDelayError, InvalidPolicyError
from delaytasks.core.inputs import check_queue, check_tag
from delaytasks.core.text import shown

Kind = Literal["tag", "queue"]
MAX_LIMIT = 1_000_000_000
MAX_PERIOD_S = 31 * 86_400.0
_RATE = re.compile(r"\s*([0-9]{1,10})\s*/\s*(.{1,40}?)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Policy:
    """What holds for a tag or a queue."""

    kind: Kind
    name: str
    is_paused: bool = False
    #: The most rows that run at once, of all workers together; and of each concurrency key.
    concurrency: int | None = None
    key_concurrency: int | None = None
    #: The most rows that begin in a period.
    rate: int | None = None
    rate_period_s: float | None = None
    version: int = 0
    #: The version of which all rows are held or released.
    applied_version: int | None = None
    update_time: datetime | None = None
    updated_by: str | None = None
    #: How many rows are held now, where somebody counted.
    held: int | None = None
    #: And how many run.
    running: int | None = None
    #: The databases where it is not so, or that could not be asked.
    missing: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.is_paused and self.limits == (None, None, None, None)

    @property
    def limits(self) -> tuple[int | None, int | None, int | None, float | None]:
        return self.concurrency, self.key_concurrency, self.rate, self.rate_period_s

    @property
    def has_limits(self) -> bool:
        return self.limits != (None,) * 4

    @property
    def has_places_only(self) -> bool:
        """Whether a task that runs may hand its place over, whoever is next."""
        return self.concurrency is not None and self.limits[1:] == (None,) * 3 and not self.is_paused

    @property
    def is_applied(self) -> bool:
        return self.applied_version == self.version

    @property
    def rate_text(self) -> str | None:
        """In the form that `parse_rate` reads."""
        if self.rate is None or self.rate_period_s is None:
            return None
        period = show_duration(self.rate_period_s)
        return f"{self.rate}/{period[1:] if re.fullmatch('1[a-z]+', period) else period}"

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "is_paused": self.is_paused,
            "concurrency": self.concurrency,
            "key_concurrency": self.key_concurrency,
            "rate": self.rate_text,
            "held": self.held,
            "running": self.running,
            "is_applied": self.is_applied,
            "version": self.version,
            "update_time": self.update_time and self.update_time.isoformat(),
            "updated_by": self.updated_by,
            "missing": list(self.missing),
        }


@dataclass(frozen=True)
class Policies:
    """Those of one database, as they were when they were read."""

    all: tuple[Policy, ...] = ()
    paused_tags: frozenset[str] = field(init=False)
    paused_queues: frozenset[str] = field(init=False)
    #: By tag, of those that have limits.
    limited: dict[str, Policy] = field(init=False, compare=False)
    #: Two that say the same have the same; 0 says nothing.
    stamp: int = field(init=False)

    def __post_init__(self) -> None:
        paused = [policy for policy in self.all if policy.is_paused]
        limited = [policy for policy in self.all if policy.kind == "tag" and policy.has_limits]
        said = sorted((p.kind, p.name, p.is_paused, p.limits) for p in self.all if not p.is_empty)
        object.__setattr__(self, "paused_tags", frozenset(p.name for p in paused if p.kind == "tag"))
        object.__setattr__(self, "paused_queues", frozenset(p.name for p in paused if p.kind == "queue"))
        object.__setattr__(self, "limited", {policy.name: policy for policy in limited})
        object.__setattr__(self, "stamp", zlib.crc32(repr(said).encode()) or 1 if said else 0)

    @property
    def has_pauses(self) -> bool:
        return bool(self.paused_tags or self.paused_queues)

    def pauses(self, tag: str, queue: str) -> bool:
        return tag in self.paused_tags or queue in self.paused_queues


NO_POLICIES = Policies()


def named(tag: object, queue: object) -> tuple[Kind, str]:
    """What a call names: a tag or a queue."""
    if (tag is None) == (queue is None):
        raise InvalidPolicyError("name a tag or a queue, one of the two")
    return ("queue", check_queue(queue)) if tag is None else ("tag", check_tag(tag))


def check_limit(limit: object, what: str) -> int | None:
    if limit is None:
        return None
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
        raise InvalidPolicyError(
            f"{what} is an integer from 1 to {MAX_LIMIT:,}, or None for no limit, not {shown(limit)}; "
            "to run nothing at all, pause it"
        )
    return int(limit)


def parse_rate(text: object) -> tuple[int | None, float | None]:
    """`"100/s"`, `"30/m"` or `"1000/1h30m"` as a number and seconds; None is no limit."""
    if text is None:
        return None, None
    rule = "a rate is a number of starts and a period, as 100/s, 30/m or 1000/1h30m"
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidPolicyError(f"{rule}, not {shown(text)}")
    period = match[2]
    try:
        seconds = parse_duration("1" + period if period[0].isalpha() else period).total_seconds()
    except InvalidDelayError:
        raise InvalidPolicyError(f"{rule}, not {shown(text)}") from None
    if not 0.001 <= seconds <= MAX_PERIOD_S:
        raise InvalidPolicyError(f"the period of a rate is 1 ms to 31 days, not {shown(period)}")
    return check_limit(int(match[1]), "a rate"), seconds
