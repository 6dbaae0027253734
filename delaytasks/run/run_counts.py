"""Counts of the runs of a tag: how they ended, how late they began, how long they took, and the
patterns of their errors."""

from __future__ import annotations

import re
import sysconfig
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.model.clock import AN_HOUR, hour_of
from delaytasks.model.moves import SettlingMove

# -- Histograms of seconds with fixed bounds, so that the counts of all workers can be added ------


#: The upper bounds of the buckets of the lateness of tasks: the start minus the due time. A value
#: that equals a bound belongs to its bucket. One more bucket has all longer times. The bounds are
#: part of the stored statistics, so a bound may be appended but neither changed nor removed.
LATENESS_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3600.0, 14_400.0, 86_400.0),
)
#: The same for the durations of runs.
DURATION_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3600.0, 14_400.0),
)


def bucket_of(seconds: float, bounds: Sequence[float]) -> int:
    """Return the number of the bucket of a time."""
    return bisect_left(bounds, seconds)


#: The tag under which the tags beyond the constant `statistics_tags` are counted.
OTHER_TAGS = "(other)"
#: The moves that end a run, with the names under which they are counted.
OUTCOMES: dict[SettlingMove, str] = {
    "succeed": "done",
    "fail": "failed",
    "schedule_retry": "retried",
    "snooze": "snoozed",
    "withdraw": "cancelled",
    "expire": "expired",
    "give_back": "given_back",
}
#: Runs whose settlement changed no row, since their lease was lost.
LOST_LEASE = "lease_lost"
#: Tasks that failed because their workers died too often.
WORKER_LOST = "worker_lost"
#: All names, in the order in which they are stored: a new one is appended here.
OUTCOME_NAMES = (*OUTCOMES.values(), LOST_LEASE, WORKER_LOST)
_POSITIONS = {name: number for number, name in enumerate(OUTCOME_NAMES)}


@dataclass(slots=True, eq=False)
class RunCounts:
    """Counts that can be added. Not safe for several threads without a lock."""

    #: For tags with `on_time`: the runs that began in time, and those that did not, with the tasks
    #: that expired.
    on_time: int = 0
    late: int = 0
    #: The sums of all times of the two histograms.
    lateness_s: float = 0.0
    duration_s: float = 0.0
    #: The largest of these times.
    lateness_max_s: float = 0.0
    duration_max_s: float = 0.0
    #: The number of each outcome, in the order of `OUTCOME_NAMES`.
    outcomes: list[int] = field(default_factory=lambda: [0] * len(OUTCOME_NAMES))
    #: The runs that began late, by the value of the column `late_by`.
    late_starts: Counter[int] = field(default_factory=Counter)
    lateness: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_BOUNDS_S) + 1))
    duration: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))

    @property
    def started(self) -> int:
        """The runs that began, and have ended in the process that counted them."""
        return sum(self.lateness)

    def outcome(self, name: str) -> int:
        return self.outcomes[_POSITIONS[name]]

    def by_outcome(self) -> dict[str, int]:
        return dict(zip(OUTCOME_NAMES, self.outcomes, strict=True))

    def add_outcome(self, name: str, count: int = 1) -> None:
        self.outcomes[_POSITIONS[name]] += count

    def add_run(self, lateness_s: float, duration_s: float, on_time_s: float | None) -> None:
        """Add one run. `on_time_s` is the lateness that its processor promises not to exceed.

        Every task pays for this method, so `bucket_of` is not called here.
        """
        # A claim may precede the due time by the clock tolerance.
        if lateness_s < 0.0:
            lateness_s = 0.0
        self.lateness_s += lateness_s
        self.duration_s += duration_s
        if lateness_s > self.lateness_max_s:
            self.lateness_max_s = lateness_s
        if duration_s > self.duration_max_s:
            self.duration_max_s = duration_s
        self.lateness[bisect_left(LATENESS_BOUNDS_S, lateness_s)] += 1
        self.duration[bisect_left(DURATION_BOUNDS_S, duration_s)] += 1
        if on_time_s is not None:
            if lateness_s <= on_time_s:
                self.on_time += 1
            else:
                self.late += 1

    def add(self, other: RunCounts) -> None:
        self.on_time += other.on_time
        self.late += other.late
        self.lateness_s += other.lateness_s
        self.duration_s += other.duration_s
        self.lateness_max_s = max(self.lateness_max_s, other.lateness_max_s)
        self.duration_max_s = max(self.duration_max_s, other.duration_max_s)
        self.late_starts.update(other.late_starts)
        for mine, others in (
            (self.outcomes, other.outcomes),
            (self.lateness, other.lateness),
            (self.duration, other.duration),
        ):
            for number, count in enumerate(others):
                if count:
                    mine[number] += count

    def copy(self) -> RunCounts:
        counts = RunCounts()
        counts.add(self)
        return counts

    def as_list(self) -> list[Any]:
        """Return the counts in compact form, for messages between processes and for JSON."""
        return [
            _sparse(self.outcomes),
            [self.on_time, self.late] if self.on_time or self.late else [],
            round(self.lateness_s, 3),
            round(self.duration_s, 3),
            _sparse(self.lateness),
            _sparse(self.duration),
            self.lateness_max_s,
            self.duration_max_s,
            [each for pair in self.late_starts.items() for each in pair],
        ]

    @classmethod
    def of(cls, stored: Sequence[Any]) -> RunCounts:
        """Return the counts that `as_list` has written."""
        counts = cls()
        counts.add_stored(stored)
        return counts

    def add_stored(self, stored: Sequence[Any]) -> None:
        """Add what `as_list` returned. Buckets of a newer version count in the last one."""
        outcomes, contract, lateness_s, duration_s, lateness, duration, *others = stored
        latest_s, longest_s, late = others
        self.late_starts.update(dict(zip(late[::2], late[1::2], strict=True)))
        self.lateness_max_s = max(self.lateness_max_s, latest_s)
        self.duration_max_s = max(self.duration_max_s, longest_s)
        self.lateness_s += lateness_s
        self.duration_s += duration_s
        if contract:
            self.on_time += contract[0]
            self.late += contract[1]
        for into, pairs in (
            (self.outcomes, outcomes),
            (self.lateness, lateness),
            (self.duration, duration),
        ):
            for number, count in zip(pairs[::2], pairs[1::2], strict=True):
                into[min(number, len(into) - 1)] += count


class FailureCount(NamedTuple):
    """Failed runs of one tag with the same error pattern."""

    tag: str
    pattern: str
    runs: int
    #: The task and the error of one of them.
    task_id: int
    error: str


class RunStatistics(NamedTuple):
    """What a process has counted since its last report. The counts are in compact form."""

    tags: tuple[tuple[str, list[Any]], ...] = ()
    failures: tuple[FailureCount, ...] = ()


def _sparse(counts: Sequence[int]) -> list[int]:
    """Return number and count of each bucket that is not empty, one after the other."""
    return [each for number, count in enumerate(counts) if count for each in (number, count)]


# -- Failed runs with the same error, as workers have counted them by the hour --------------------


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed runs of a tag with the same error.

    Attributes
    ----------
    tag
        The tag.
    pattern
        What their errors have in common; `*` stands for what differs.
    fingerprint
        A short name of the pattern.
    runs
        The number of failed runs, retried ones included.
    first_at, last_at
        When the first and the last of them failed, within a minute.
    task_id, error
        One of the last tasks that failed in this way, and the end of its error text.
    hours
        The number of failed runs by the hour, for the last 48 hours that have any.
    """

    tag: str
    pattern: str
    fingerprint: str
    runs: int
    first_at: datetime
    last_at: datetime
    task_id: int
    error: str
    hours: Mapping[datetime, int]

    @property
    def filters(self) -> dict[str, str]:
        """The filters for `find` and the methods of `bulk` that select the tasks of this group."""
        return {"tag": self.tag, "error": self.pattern}

    def first_since(self, begin: datetime) -> datetime | None:
        """Return when the first run failed since the beginning of an hour; None without runs."""
        hours = [hour for hour, runs in self.hours.items() if runs and hour >= begin]
        return max(min(hours), self.first_at) if hours else None


class CountedFailures(NamedTuple):
    """A group of failures, and what its runs are compared with."""

    group: FailureGroup
    #: All runs of the tag since `recent_hours(now)`, or 0 if they were not counted.
    runs_of_tag: int


def recent_hours(now: datetime) -> datetime:
    """Return the beginning of the hour before the present one."""
    return hour_of(now) - AN_HOUR


# -- Patterns of error texts, by which failures are grouped ---------------------------------------

# A pattern is what the errors of one kind have in common: the innermost function of the user's
# code, the type of the exception, and its message. `*` stands for what differs from task to task:
# numbers, ids, quoted text. The filter `error=` of `find` and of the methods of `bulk` takes such a
# pattern, so a group of failures and the tasks that belong to it have one name:
#
#     * in charge\n*ValueError: order * of * was not found*


#: The longest pattern. The rest of a long message is left out.
MAX_PATTERN = 300
#: The part of an error text that is searched, since a text may have 64 KiB.
_MAX_SEARCHED = 16_384
#: The longest part of a message that becomes a pattern.
_MAX_MESSAGE = 500

#: UUIDs, quoted text, addresses, and every word that contains a digit.
_VARIABLE = re.compile(
    r"""
    '[^'\n]*' | "[^"\n]*" | `[^`\n]*`
    | <[^<>\n]*\ at\ 0x[0-9a-fA-F]+>
    | \b[0-9a-fA-F]{8,}\b
    | [-+\w./:@%#$]*\d[-+\w./:@%#$]*
    """,
    re.VERBOSE,
)
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]+)", line \d+, in (?P<name>[^\n]+)$', re.MULTILINE)
#: The first line of an exception, which begins at the margin: its type, and perhaps a message.
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>[^\n]*))?$", re.MULTILINE)
#: Files of Python and of installed packages, which are not the user's code.
_INSTALLED = (
    *{sysconfig.get_path(name).replace("\\", "/") for name in ("stdlib", "platstdlib")},
    *("/site-packages/", "/dist-packages/"),
)


def error_pattern(text: str) -> str:
    """Return the pattern of an error text: a traceback, or the reason of an outcome."""
    if len(text) > _MAX_SEARCHED:
        text = text[-_MAX_SEARCHED:]
    frames = list(_FRAME.finditer(text))
    if not frames:
        return _limited(_without_variables(text.split("\n", 1)[0]) + "*")
    last = frames[-1]
    exception = _EXCEPTION.search(text, last.end())
    own = next((frame for frame in reversed(frames) if _is_users(frame["file"])), last)
    pattern = f"* in {_escaped(own['name'])}\n*"
    if exception is not None:
        message = exception["message"]
        what = f": {_without_variables(message)}" if message else ""
        pattern += f"{_escaped(exception['type'])}{what}*"
    return _limited(pattern)


def _is_users(path: str) -> bool:
    path = path.replace("\\", "/")
    return not path.startswith("<") and not any(part in path for part in _INSTALLED)


def _without_variables(message: str) -> str:
    """Replace the variable parts by `*`. A `*` of the message itself becomes one, too."""
    return _VARIABLE.sub("*", message[:_MAX_MESSAGE])


def _escaped(name: str) -> str:
    return re.sub(r"\d+", "*", name.strip())


def _limited(pattern: str) -> str:
    if len(pattern) > MAX_PATTERN:
        pattern = pattern[: MAX_PATTERN - 1] + "*"
    return re.sub(r"\*+", "*", pattern)
