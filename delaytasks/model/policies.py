"""Policies: pauses and limits of tags and queues, stored in the database."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Set
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Literal, NamedTuple

from delaytasks.model.clock import json_fields, monotonic
from delaytasks.model.errors import InvalidInputError, StoreError
from delaytasks.model.inputs import check_integer, check_queue, check_tag, check_wait, show_duration
from delaytasks.model.text import shown

Kind = Literal["tag", "queue"]


class Unchanged(Enum):
    """The default of a limit that a call does not change."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED
MAX_LIMIT = 1_000_000_000
MIN_PERIOD_S = 0.001
MAX_PERIOD_S = 31 * 86_400.0
_RATE = re.compile(r"\s*([0-9]{1,10})\s*/\s*(.{1,40}?)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Policy:
    """The pause and the limits of a tag or a queue. Limits apply to all workers together.

    Attributes
    ----------
    kind, name
        `"tag"` or `"queue"`, and its name.
    is_paused
        Whether no task of the tag or queue starts.
    paused_until
        When the pause ends by itself. None if it lasts until `resume`.
    concurrency
        The most tasks that run simultaneously. None means no limit.
    concurrency_per_key
        The most tasks of one limit key that run simultaneously.
    rate, rate_period_s
        The most tasks that start in a period, and the period.
    version
        The number of changes of this policy.
    update_time, updated_by
        The time and the actor of the last change.
    held, running
        The numbers of HELD and RUNNING tasks, if they were counted.
    held_since
        The due time of the HELD task that was due first, if they were counted.

    Examples
    --------
    >>> [policy] = delays.policies.list(tag="mail.send")
    >>> policy.is_paused, policy.held
    (True, 120)
    """

    kind: Kind
    name: str
    is_paused: bool = False
    paused_until: datetime | None = None
    concurrency: int | None = None
    concurrency_per_key: int | None = None
    rate: int | None = None
    rate_period_s: float | None = None
    version: int = 0
    update_time: datetime | None = None
    updated_by: str | None = None
    held: int | None = None
    running: int | None = None
    held_since: datetime | None = None

    @property
    def limits(self) -> tuple[int | None, int | None, int | None, float | None]:
        return self.concurrency, self.concurrency_per_key, self.rate, self.rate_period_s

    @property
    def has_limits(self) -> bool:
        return self.limits != (None,) * 4

    @property
    def has_slots_only(self) -> bool:
        """Whether the only limit is `concurrency`, so a slot can go to any task of the tag."""
        has_slots = self.concurrency is not None and self.limits[1:] == (None,) * 3
        return has_slots and not self.is_paused

    @property
    def rate_text(self) -> str | None:
        """The rate in the form that `parse_rate` reads."""
        if self.rate is None or self.rate_period_s is None:
            return None
        period = show_duration(self.rate_period_s)
        return f"{self.rate}/{period[1:] if re.fullmatch('1[a-z]+', period) else period}"

    def as_json(self) -> dict[str, Any]:
        fields = {**asdict(self), "rate": self.rate_text}
        del fields["rate_period_s"]
        return json_fields(fields)


class Stamp(NamedTuple):
    """Identifies a state of the policy table, to find out whether a process knows it."""

    #: The number of policies, and the sum of their versions.
    policies: int = 0
    versions: int = 0
    #: The time of the last change. A new policy may have replaced another one, and after a failover
    #: two servers with different changes may have the same values above.
    changed_at: datetime | None = None


class PolicyRead(NamedTuple):
    """What a process has read from the policy table."""

    #: All policies; None if none has changed.
    policies: Policies | None
    #: The number of requests to cancel running tasks.
    cancel_requests: int = 0


class Policies:
    """The policies as they were read. Immutable."""

    def __init__(self, all: Iterable[Policy] = ()) -> None:
        self.all = tuple(all)
        paused = [policy for policy in self.all if policy.is_paused]
        self.paused_tags = {policy.name for policy in paused if policy.kind == "tag"}
        self.paused_queues = {policy.name for policy in paused if policy.kind == "queue"}
        #: When pauses end by themselves.
        self.ends = [each.paused_until for each in paused if each.paused_until is not None]
        #: The policies with limits, by tag.
        self.limited = {one.name: one for one in self.all if one.kind == "tag" and one.has_limits}
        versions = sum(policy.version for policy in self.all)
        times = (policy.update_time for policy in self.all if policy.update_time)
        self.stamp = Stamp(len(self.all), versions, max(times, default=None))

    def limits_changed_from(self, before: Policies) -> set[str]:
        """Return the tags whose policies with limits differ from those before."""
        return {tag for tag, _ in self.limited.items() ^ before.limited.items()}

    def pauses(self, tag: str, queue: str) -> bool:
        return tag in self.paused_tags or queue in self.paused_queues


NO_POLICIES = Policies()


def named(tag: object, queue: object) -> tuple[Kind, str]:
    """Return the kind and the name of the tag or queue of a call."""
    if (tag is None) == (queue is None):
        raise InvalidInputError("name a tag or a queue, one of the two", "tag")
    return ("queue", check_queue(queue)) if tag is None else ("tag", check_tag(tag))


def check_limit(limit: object, argument: str) -> int | None:
    if limit is None:
        return None
    rule = f"{argument} is an integer from 1 to {MAX_LIMIT:,}, or None for no limit"
    return check_integer(limit, argument, 1, MAX_LIMIT, f"{rule} (a pause lets nothing start)")


def parse_rate(text: object) -> tuple[int | None, float | None]:
    """Parse `"100/s"`, `"30/m"` or `"1000/1h30m"` into a number and seconds; None is no limit."""
    if text is None:
        return None, None
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        rule = "a rate is a number of starts and a period, as 100/s, 30/m or 1000/1h30m"
        raise InvalidInputError(f"{rule}, not {shown(text)}", "rate")
    period = f"1{match[2]}" if match[2][0].isalpha() else match[2]
    seconds = check_wait(period, "rate", MAX_PERIOD_S)
    if seconds < MIN_PERIOD_S:
        raise InvalidInputError(f"the period of a rate is at least 1 ms, not {period}", "rate")
    return check_limit(int(match[1]), "rate"), seconds


# -- What the processes of a worker report about the waitlists of limited tags --------------------


#: A worker looks again after this time at a waitlist whose tag has no free slot: a worker that
#: stopped, or a raised limit, frees slots without a message.
WAITLIST_RECHECK_S = 1.0


class WaitlistsSeen(NamedTuple):
    """The waitlists of the limited tags that a claim found, and the number of rows that it held."""

    #: Each waitlist is a queue and a tag.
    waitlists: Set[tuple[str, str]] = frozenset()
    held: int = 0

    def merge(self, other: WaitlistsSeen) -> WaitlistsSeen:
        return WaitlistsSeen(self.waitlists | other.waitlists, self.held + other.held)


NO_WAITLISTS = WaitlistsSeen()


class WaitlistState(NamedTuple):
    """The waitlist of a limited tag in a queue, as a process left it."""

    queue: str
    tag: str
    #: The number of tasks that may start now, as far as known; None if no process has looked.
    open: int | None = 1
    #: The time after which a process should look again.
    recheck_s: float = WAITLIST_RECHECK_S


# -- the policies that a process applies, read about once a second ---------------------------------

# A read costs one row while nothing changes, and otherwise all policies, of which there are few. A
# worker's main process reads in a thread, and each job for the pool carries the stamp of the
# policies that it knows. A pool process reads only if it knows other policies, if the main process
# has read none yet, or while it continues with a backlog. Other processes, such as commands, read
# when they use the policies and the last read is older than a second.


POLICY_REFRESH_S = 1.0


class PolicyCache:
    """The policies, as this process has read them last."""

    def __init__(self, read: Callable[[Stamp | None], PolicyRead]) -> None:
        """`read(stamp)` returns the policies unless they have this stamp."""
        self._read = read
        self.known = NO_POLICIES
        #: The number of requests to cancel running tasks, at the last read.
        self.cancel_requests = 0
        self._read_at = float("-inf")
        #: When the read began whose policies are known. Threads may share a cache, and `follow`
        #: moves `_read_at` for each chunk while another thread still reads.
        self._asked_at = float("-inf")
        self._is_read = False
        #: The main process determines when to read.
        self.is_led = False

    @property
    def stamp(self) -> Stamp | None:
        """The stamp of the known policies; None if this process has read none."""
        return self.known.stamp if self._is_read else None

    def current(self) -> Policies:
        """Return the policies, which are at most about a second old."""
        if not self.is_led and monotonic() - self._read_at >= POLICY_REFRESH_S:
            try:
                self.refresh()
            except StoreError:
                if not self._is_read:
                    raise
                self._read_at = monotonic()  # the next statement of the chunk reports the outage
        return self.known

    def refresh(self) -> Policies:
        """Read the policies if they have changed, and return them as they are now."""
        asked_at = monotonic()
        found = self._read(self.stamp)
        if asked_at < self._asked_at:  # another thread has asked later, and has read more
            return self.known
        if found.policies is not None:
            self.known = found.policies
        self.cancel_requests = found.cancel_requests
        self._read_at = self._asked_at = asked_at
        self._is_read = True
        return self.known

    def follow(self, stamp: Stamp | None, is_led: bool = True) -> None:
        """Read the policies unless they have this stamp, which the main process sent.

        The stamp is None if the main process has read none. If the process is not led, `current`
        reads them again about once a second.
        """
        self.is_led = is_led
        if stamp is None or stamp != self.known.stamp:
            self.refresh()
        else:
            self._read_at = monotonic()  # the main process has read
