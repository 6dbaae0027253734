"""The observers of the runs of a process: the structured log, and the counts of runs.

`RunCounts` says of the runs of a tag how they ended, how late they began and how long they took,
and `error_pattern` what their errors have in common. A `RunCounter` counts the runs of a process.
"""

from __future__ import annotations

import re
import sysconfig
import threading
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime, timedelta
from operator import add
from typing import TYPE_CHECKING, Any

from delaytasks.model.clock import fork_safe
from delaytasks.model.moves import MOVES, SettlingMove
from delaytasks.model.task import DelayedTask, Settlement

if TYPE_CHECKING:
    from delaytasks.events import Events


class Observer:
    """Sees what becomes of the rows that a process has claimed. Its methods must not raise."""

    def started(self, task: DelayedTask, claimed: datetime, began: datetime) -> None:
        """The processor is about to be called."""

    def ended(self, settlement: Settlement, took_s: float, error: BaseException | None) -> None:
        """The processor has returned, or has raised the error."""

    def not_called(self, settlement: Settlement, claimed: datetime) -> None:
        """The row has expired, or this process cannot run it."""

    def settled(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        """The settlements were written. `accepted` are the ids of the rows that they changed."""

    def flush(self) -> None:
        """A chunk has ended, or its time budget is over: send what was observed."""


class RunLog(Observer):
    """Writes the lines of single runs, if the log is structured."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def started(self, task: DelayedTask, claimed: datetime, began: datetime) -> None:
        self._events.emit("task.started", **task.event_fields, began=began)

    def settled(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        for s in settlements:
            if s.move == "succeed" and s.task.id in accepted:
                late_s = ((s.began or s.task.due) - s.task.due).total_seconds()
                fields = s.task.event_fields
                self._events.emit("task.done", **fields, attempt=s.task.runs, late_s=late_s)


# -- Histograms of seconds with fixed bounds, so that the counts of all workers can be added ------


#: The upper bounds of the buckets of the lateness of tasks: the start minus the due time. A value
#: that equals a bound belongs to its bucket. One more bucket has all longer times. The numbers of
#: the buckets are part of the stored statistics.
LATENESS_BOUNDS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3600.0, 14_400.0, 86_400.0),
)
#: The same for the durations of runs.
DURATION_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 900.0, 3600.0, 14_400.0),
)


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
OUTCOME_NAMES = (*OUTCOMES.values(), LOST_LEASE, WORKER_LOST)
_LATENESS = [f"lateness_{number}" for number in range(len(LATENESS_BOUNDS_S) + 1)]
_DURATION = [f"duration_{number}" for number in range(len(DURATION_BOUNDS_S) + 1)]
_LATE_START = "late_start_"
#: How the values of these names are added; all others are sums. The last failure is an example.
_ADDED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("lateness_max_s", "duration_max_s", "last_us"), max),
    **dict.fromkeys(("pattern", "task_id", "error"), lambda _, new: new),
    "first_us": min,
}


class RunCounts(dict[str, Any]):
    """Numbers by name, which can be added, and are one JSON object. A missing number is 0.

    Not safe for several threads without a lock. Besides `OUTCOME_NAMES`, the names are:

        lateness_s, duration_s          the sums of all times of the two histograms
        lateness_max_s, duration_max_s  the largest of these times
        lateness_0, duration_0, …       the number of runs in each bucket of the histograms
        late_start_12, …                the runs that began late, by the value of `late_by`

    The counts of a failure group have `failed`, the pattern, an example (`task_id`, `error`), and
    the first and the last time (`first_us`, `last_us`).
    """

    def __missing__(self, name: str) -> int:
        return 0

    @property
    def started(self) -> int:
        """The runs that began, and have ended in the process that counted them."""
        return sum(self.lateness)

    @property
    def lateness(self) -> list[int]:
        return [self[name] for name in _LATENESS]

    @property
    def duration(self) -> list[int]:
        return [self[name] for name in _DURATION]

    @property
    def late_starts(self) -> dict[int, int]:
        """The runs that began late, by the value of the column `late_by`."""
        found = (name for name in self if name.startswith(_LATE_START))
        return {int(name.removeprefix(_LATE_START)): self[name] for name in found}

    def by_outcome(self) -> dict[str, int]:
        return {name: self[name] for name in OUTCOME_NAMES}

    def add_late_start(self, late_by: int) -> None:
        self[f"{_LATE_START}{late_by}"] += 1

    def add_run(self, lateness_s: float, duration_s: float) -> None:
        # A claim may precede the due time by the clock tolerance.
        if lateness_s < 0.0:
            lateness_s = 0.0
        self["lateness_s"] += lateness_s
        self["duration_s"] += duration_s
        if lateness_s > self["lateness_max_s"]:
            self["lateness_max_s"] = lateness_s
        if duration_s > self["duration_max_s"]:
            self["duration_max_s"] = duration_s
        self[_LATENESS[bisect_left(LATENESS_BOUNDS_S, lateness_s)]] += 1
        self[_DURATION[bisect_left(DURATION_BOUNDS_S, duration_s)]] += 1

    def add(self, other: Mapping[str, Any]) -> None:
        for name, value in other.items():
            known = self.get(name)
            self[name] = value if known is None else _ADDED.get(name, add)(known, value)


#: Counts by the tag and the error pattern, which is empty for the runs of a tag. A process reports
#: them.
Counted = dict[tuple[str, str], RunCounts]


def add_counts(counted: Counted, key: tuple[str, str], counts: RunCounts, most: int) -> None:
    """Add counts to those of a key, unless it would be one more group of failures than `most`."""
    _, pattern = key
    if not pattern or key in counted or sum(bool(other) for _, other in counted) < most:
        counted.setdefault(key, RunCounts()).add(counts)


def add_failure(counted: Counted, tag: str, task_id: int, error: str) -> None:
    """Add a failed run to the group of its tag and its error."""
    pattern, sample = error_pattern(error), error[-MAX_SAMPLE:]
    counts = RunCounts(failed=1, pattern=pattern, task_id=task_id, error=sample)
    add_counts(counted, (tag, pattern), counts, MAX_FAILURE_GROUPS)


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


# -- The counts of one process of the pool --------------------------------------------------------


#: The most groups of failures in one report. Further ones are counted as outcomes only.
MAX_FAILURE_GROUPS = 20
#: The longest error text of a group.
MAX_SAMPLE = 2000

_FAILURES = {name for name, move in MOVES.items() if move.ending and move.ending.is_failure}


class RunCounter(Observer):
    """Counts the runs of one runner until `take` returns the counts for a report.

    Several threads may run and settle tasks. A run is only added to a queue, without a lock, and
    the lock is taken once for the settlements of a chunk.
    """

    def __init__(self) -> None:
        fork_safe(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._runs: deque[tuple[str, timedelta, float, int | None]] = deque()
        self._counted: Counted = defaultdict(RunCounts)

    def ended(self, settlement: Settlement, took_s: float, error: BaseException | None) -> None:
        task = settlement.task
        late = (settlement.began or task.due) - task.due
        self._runs.append((task.tag, late, took_s, task.late_by))

    def settled(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        done: dict[str, int] = {}
        with self._lock:
            for settlement in settlements:
                task = settlement.task
                if settlement.move == "succeed" and task.id in accepted:
                    tag = task.tag
                    done[tag] = done.get(tag, 0) + 1
                else:
                    self._add_outcome(settlement, task.id in accepted)
            for tag, number in done.items():
                self._counted[tag, ""][OUTCOMES["succeed"]] += number

    def take(self) -> Counted:
        """Return the counts since the last call, and count anew."""
        with self._lock:
            self._add_runs()
            counted, self._counted = self._counted, defaultdict(RunCounts)
        return dict(counted)

    def _add_runs(self) -> None:
        """Add the runs of the queue to the counts of their tags."""
        runs = self._runs
        for _ in range(len(runs)):
            tag, lateness, duration_s, late_by = runs.popleft()
            counts = self._counted[tag, ""]
            counts.add_run(lateness.total_seconds(), duration_s)
            if late_by is not None:
                counts.add_late_start(late_by)

    def _add_outcome(self, settlement: Settlement, is_accepted: bool) -> None:
        task, move = settlement.task, settlement.move
        counts = self._counted[task.tag, ""]
        # A transaction of the processor that is still open keeps the row until its lease ends.
        is_left_open = settlement.is_made and move != "succeed"
        if is_left_open or not is_accepted:
            counts[LOST_LEASE] += 1
            return
        counts[OUTCOMES[move]] += 1
        if move in _FAILURES:
            add_failure(self._counted, task.tag, task.id, settlement.error or "")
