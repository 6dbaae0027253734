"""The statuses of a task, every move between them, and the outcomes and retry delays of runs.

A move is a change of a row's status, and no other module decides about statuses. A claim, a sweep
and an operator make moves, and each run ends with one. An outcome is what a processor returns to
say how its run ended. `run/calls.py` makes a move of it, and of a task that is not run:

    the run ended with                                      move
    Done, or any value that is no outcome                   succeed
    an error or Retry, while retries are left               schedule_retry
    an error or Retry, if no retry is left; Fail            fail
    Snooze, or the error of `check_lease`                   snooze
    Cancel; no success after a caller asked it to stop      withdraw
    no run: the task has expired, or was cancelled          expire
    no run: no time, no processor, a shutdown               give_back

Three more moves start from RUNNING and no outcome leads to them: `hold_back` if the row's tag or
queue was paused before the run (`give_back` if that fails), and `recover` or `fail_worker_lost` if
its worker died.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import Delay, check_wait, invalid, is_integer, is_number, show_duration
from delaytasks.model.text import shown


class Status(IntEnum):
    """Values of the `status` column. Other programs that read the table know 0 to 3."""

    NOT_COMPLETE = 0
    DONE = 1
    FAILED = 2
    RUNNING = 3
    CANCELLED = 4
    HELD = 5

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        # Because of `__str__`, Python 3.10 would format the name, and refuse `d` in SQL texts.
        return int.__format__(self, spec)


class Ending(NamedTuple):
    """What a move that settles a run says about this run."""

    #: The state of a Celery task that ends in this way.
    celery_state: Literal["SUCCESS", "FAILURE", "RETRY", "REVOKED"]
    #: Whether the run is recorded as a failed attempt.
    is_failure: bool = False
    is_attempt: bool = True
    #: Without a run, the row looks as if it was never claimed.
    has_run: bool = True


class Move(NamedTuple):
    name: str
    #: `schedule` has none: it makes the row.
    sources: frozenset[Status]
    target: Status
    #: What a move says that ends a run.
    ending: Ending | None = None

    @property
    def source(self) -> Status:
        """The status from which the move starts, of a move that has only one."""
        (source,) = self.sources
        return source


_WAITS = frozenset({Status.NOT_COMPLETE})
_HELD = frozenset({Status.HELD})
_RUNS = frozenset({Status.RUNNING})
#: Every move, by name.
MOVES = {
    move.name: move
    for move in (
        Move("schedule", frozenset(), Status.NOT_COMPLETE),
        Move("claim", _WAITS, Status.RUNNING),
        Move("succeed", _RUNS, Status.DONE, Ending("SUCCESS")),
        Move("fail", _RUNS, Status.FAILED, Ending("FAILURE", is_failure=True)),
        Move("schedule_retry", _RUNS, Status.NOT_COMPLETE, Ending("RETRY", is_failure=True)),
        Move("snooze", _RUNS, Status.NOT_COMPLETE, Ending("RETRY", is_attempt=False)),
        Move("withdraw", _RUNS, Status.CANCELLED, Ending("REVOKED")),
        Move("expire", _RUNS, Status.CANCELLED, Ending("REVOKED", is_attempt=False, has_run=False)),
        Move(
            "give_back",
            _RUNS,
            Status.NOT_COMPLETE,
            Ending("RETRY", is_attempt=False, has_run=False),
        ),
        Move("hold_back", _RUNS, Status.HELD),
        Move("recover", _RUNS, Status.NOT_COMPLETE),
        Move("fail_worker_lost", _RUNS, Status.FAILED),
        Move("hold", _WAITS, Status.HELD),
        Move("release", _HELD, Status.NOT_COMPLETE),
        Move("admit", _HELD, Status.RUNNING),
        Move("cancel", _WAITS | _HELD, Status.CANCELLED),
        Move("reschedule", _WAITS | _HELD, Status.NOT_COMPLETE),
        Move("replace", _WAITS | _HELD, Status.NOT_COMPLETE),
        Move("rerun", frozenset({Status.FAILED, Status.CANCELLED}), Status.NOT_COMPLETE),
    )
}
#: The moves that end a run.
SettlingMove = Literal[
    "succeed", "fail", "schedule_retry", "snooze", "withdraw", "expire", "give_back"
]

#: Greater versions were written by another program. Counting starts at 0 again behind them, because
#: databases cannot store more than 2^63.
MOST_VERSIONS = 2**62


def following(version: int) -> int:
    """Return the version that the next move gives a row."""
    return version + 1 if version < MOST_VERSIONS else 0


#: Statuses that only `rerun` leaves.
FINISHED = frozenset({Status.DONE, Status.FAILED, Status.CANCELLED})
#: Statuses in which a task may still run.
LIVE = frozenset(Status) - FINISHED
#: Statuses of tasks that wait. A task of a paused tag or queue, and one that waits for the capacity
#: of its tag, is HELD.
WAITING = (Status.NOT_COMPLETE, Status.HELD)


# -- Why a run began late -------------------------------------------------------------------------


#: A run that begins this many seconds after its due time is late.
LATE_S = 1.0


class BroughtBy(IntEnum):
    """What brought a row whose run began late to its process."""

    #: Its entry, which came in a message, from Redis or by a poll of the table.
    ENTRY = 10
    #: A drain of its queue, which the look for overdue rows starts, among others.
    DRAIN = 20
    #: A visit of the waitlist of its tag.
    WAITLIST = 30


class LateReason(IntEnum):
    """Why the run did not begin earlier, as far as its worker knows."""

    UNNOTICED = 0
    BUSY = 1
    NO_WORKER = 2
    DATABASE = 3
    BROKER = 4
    HELD = 5
    DEFERRED = 6
    SCHEDULED_LATE = 7
    LEASE_LOST = 8


_BROUGHT_BY = {brought_by.value: brought_by.name.lower() for brought_by in BroughtBy}
_REASONS = {reason.value: reason.name.lower() for reason in LateReason}


def late_start(stored: int) -> tuple[str, str]:
    """Return the names of both from their sum, which is the value of the column `late_by`.

    Numbers of a newer version are `"unknown"`.
    """
    reason = stored % 10
    return _BROUGHT_BY.get(stored - reason, "unknown"), _REASONS.get(reason, "unknown")


def moves_from(status: Status) -> list[str]:
    """Return the names of the moves that `status` allows, for buttons and messages."""
    return [move.name for move in MOVES.values() if status in move.sources]


# -- Outcomes: values that a processor returns to say how its task ends or continues --------------


@dataclass(frozen=True, slots=True)
class Done:
    """The task is DONE. Any other return value means the same, without a result to keep.

    Parameters
    ----------
    result
        A JSON value, which is stored if the processor was registered with `keep_result=True`.

    Examples
    --------
    >>> return Done({"receipt": 7})
    """

    result: Any = None


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed, and the task runs again; after its last retry it is FAILED.

    Parameters
    ----------
    after
        The time until the next attempt: seconds, text such as `"5m"`, or a timedelta. By default
        the next delay of the retry schedule.
    reason
        The text that is stored as the error of the attempt.

    Examples
    --------
    >>> return Retry(after="5m", reason="the partner is busy")
    """

    after: Delay | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Snooze:
    """The task runs again after `after`. This run does not count as an attempt.

    Parameters
    ----------
    after
        Seconds, text such as `"5m"`, or a timedelta.

    Examples
    --------
    >>> return Snooze("1h")
    """

    after: Delay


@dataclass(frozen=True, slots=True)
class Cancel:
    """The task is CANCELLED, because its work is no longer needed.

    Parameters
    ----------
    reason
        The text that is stored as the error of the task.

    Examples
    --------
    >>> return Cancel("the order was paid")
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """The task is FAILED, even if its retry schedule has retries left.

    Parameters
    ----------
    reason
        The text that is stored as the error of the task.

    Examples
    --------
    >>> return Fail("there is no such order")
    """

    reason: str = ""


Outcome = Done | Retry | Snooze | Cancel | Fail


# -- The delays before retries ---------------------------------------------------------------------


#: A row with a retry schedule of its own stays small.
MAX_RETRY_DELAYS = 1000


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """The delays before the retries of a task.

    With `RetrySchedule("15s 3m 10m")`, a task runs once and is retried up to three times.

    Parameters
    ----------
    retry_delays
        The time from each failed run to the next one: text such as `"15s 3m 10m"`, or a list of
        texts, seconds and timedeltas. At most 1,000 delays.
    variation
        `variation=0.1` draws each delay from 90% to 110% of its value, so that tasks that failed
        simultaneously are retried at different times.

    Raises
    ------
    InvalidInputError
        If there are no delays or too many, or `variation` is not between 0 and 1.

    Examples
    --------
    >>> delays.schedule_delay("mail.send", {}, 60, retries=RetrySchedule("15s 3m", variation=0.1))
    """

    #: Delays from seconds to days, for the processing of tasks.
    LEVELS: ClassVar[RetrySchedule]
    #: Delays for notifications to partners: ten runs within about 25 hours.
    NOTIFY: ClassVar[RetrySchedule]

    retry_delays_s: tuple[float, ...]
    variation: float

    def __init__(
        self, retry_delays: str | Iterable[str | float | timedelta], *, variation: float = 0.0
    ) -> None:
        if isinstance(retry_delays, (bytes, Mapping)) or not isinstance(retry_delays, Iterable):
            rule = "a retry schedule is made of text such as '15s 3m', or of a list"
            raise InvalidInputError(f"{rule}, not of {shown(retry_delays)}", "retry_delays")
        items: Iterable[object] = (
            retry_delays.split()
            if isinstance(retry_delays, str)
            else itertools.islice(retry_delays, MAX_RETRY_DELAYS + 1)
        )
        retry_delays_s = tuple(check_wait(item, "retry_delays") for item in items)
        if not 0 < len(retry_delays_s) <= MAX_RETRY_DELAYS:
            rule = f"a retry schedule has 1 to {MAX_RETRY_DELAYS} delays"
            raise InvalidInputError(f"{rule}, not {len(retry_delays_s)}", "retry_delays")
        if not is_number(variation, 0, 1):
            rule = "is a share from 0 to 1, such as 0.1 for 10%"
            raise invalid("variation", f"{rule}, not {shown(variation)}")
        object.__setattr__(self, "retry_delays_s", retry_delays_s)
        object.__setattr__(self, "variation", float(variation))

    def __str__(self) -> str:
        """Return the delays as text, such as "15s 3m"."""
        return " ".join(map(show_duration, self.retry_delays_s))

    def has_retry_delay(self, attempts: int) -> bool:
        """Return whether a task is retried after this number of attempts."""
        return attempts <= len(self.retry_delays_s)

    def wait_s(self, attempts: int) -> float | None:
        """Return the delay after this number of attempts; None if no retry is left."""
        if not self.has_retry_delay(attempts):
            return None
        wait = self.retry_delays_s[max(attempts, 1) - 1]  # another program may write any count
        return wait * random.uniform(1 - self.variation, 1 + self.variation)


RetrySchedule.LEVELS = RetrySchedule("5s 30s 1m 10m 30m 1h 6h 1d 2d")
RetrySchedule.NOTIFY = RetrySchedule("15s 3m 10m 30m 30m 1h 2h 6h 15h")


def retry_schedule_of(
    retries: RetrySchedule | str | int | Iterable[str | float | timedelta],
) -> RetrySchedule:
    """Return the retry schedule that the option `retries` means.

    An integer is a number of retries with the delays of `LEVELS`, whose last delay is repeated.
    """
    if isinstance(retries, RetrySchedule):
        return retries
    if isinstance(retries, (str, Iterable)):
        return RetrySchedule(retries)
    if not is_integer(retries, 1, MAX_RETRY_DELAYS):
        rule = f"a number from 1 to {MAX_RETRY_DELAYS}, delays such as '15s 3m', or a RetrySchedule"
        remedy = "leave it out if nothing is retried"
        raise invalid("retries", f"is {rule}, not {shown(retries)}; {remedy}")
    delays_s = RetrySchedule.LEVELS.retry_delays_s[:retries]
    return RetrySchedule(delays_s + delays_s[-1:] * (retries - len(delays_s)))


RetryRule = (
    RetrySchedule
    | str
    | int
    | Iterable[str | float | timedelta]
    | Mapping[type[BaseException], RetrySchedule | str | int | None]
    | None
)


#: The retry schedule of a tag for each exception type; None means that the task is FAILED.
RetriesByError = Mapping[type[BaseException], RetrySchedule | None]


def retries_by_error(retries: RetryRule) -> RetriesByError:
    """Read the option `retries`: one schedule, or a mapping of exception types to schedules."""
    if retries is None:
        return {}
    if not isinstance(retries, Mapping):
        return {Exception: retry_schedule_of(retries)}
    for kind in retries:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            rule = "maps exception types to retry schedules"
            raise invalid("retries", f"{rule}; {shown(kind)} is none")
    return {kind: None if one is None else retry_schedule_of(one) for kind, one in retries.items()}
