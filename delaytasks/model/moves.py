"""The statuses of a task, and every move between them. No other module decides about statuses.

A move is a change of a row's status. A claim, a sweep and an operator make moves, and each run ends
with one. An outcome (`model/outcomes.py`) is what a processor returns to say how its run ended.
`run/calls.py` makes a move of it, and of a task that is not run:

    the run ended with                                      move
    Done, or any value that is no outcome                   succeed
    an error or Retry, while retries are left               schedule_retry
    an error or Retry, if no retry is left; Fail            fail
    Snooze, or the error of `check_lease`                   snooze
    Cancel                                                  withdraw
    no run: the task has expired, or was cancelled          expire
    no run: no time, no processor, a shutdown               give_back

Three more moves start from RUNNING and no outcome leads to them: `hold_back` if the row's tag or
queue was paused before the run (`give_back` if that fails), and `recover` or `fail_worker_lost` if
its worker died.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple


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
    sources: frozenset[Status]
    target: Status
    ending: Ending | None = None

    @property
    def source(self) -> Status:
        """The status from which the move starts, of a move that has only one."""
        (source,) = self.sources
        return source


def _move(name: str, sources: tuple[Status, ...], target: Status) -> tuple[str, Move]:
    return name, Move(name, frozenset(sources), target)


#: The moves that end a run.
SettlingMove = Literal[
    "succeed", "fail", "schedule_retry", "snooze", "withdraw", "expire", "give_back"
]


def _settle(name: SettlingMove, target: Status, ending: Ending) -> tuple[str, Move]:
    return name, Move(name, frozenset({Status.RUNNING}), target, ending)


#: Every move, by name. `schedule` has no source: it makes the row.
MOVES: dict[str, Move] = dict(
    [
        _move("schedule", (), Status.NOT_COMPLETE),
        _move("claim", (Status.NOT_COMPLETE,), Status.RUNNING),
        _settle("succeed", Status.DONE, Ending("SUCCESS")),
        _settle("fail", Status.FAILED, Ending("FAILURE", is_failure=True)),
        _settle("schedule_retry", Status.NOT_COMPLETE, Ending("RETRY", is_failure=True)),
        _settle("snooze", Status.NOT_COMPLETE, Ending("RETRY", is_attempt=False)),
        _settle("withdraw", Status.CANCELLED, Ending("REVOKED")),
        _settle("expire", Status.CANCELLED, Ending("REVOKED", is_attempt=False, has_run=False)),
        _settle("give_back", Status.NOT_COMPLETE, Ending("RETRY", is_attempt=False, has_run=False)),
        _move("hold_back", (Status.RUNNING,), Status.HELD),
        _move("recover", (Status.RUNNING,), Status.NOT_COMPLETE),
        _move("fail_worker_lost", (Status.RUNNING,), Status.FAILED),
        _move("hold", (Status.NOT_COMPLETE,), Status.HELD),
        _move("release", (Status.HELD,), Status.NOT_COMPLETE),
        _move("admit", (Status.HELD,), Status.RUNNING),
        _move("cancel", (Status.NOT_COMPLETE, Status.HELD), Status.CANCELLED),
        _move("reschedule", (Status.NOT_COMPLETE, Status.HELD), Status.NOT_COMPLETE),
        _move("replace", (Status.NOT_COMPLETE, Status.HELD), Status.NOT_COMPLETE),
        _move("rerun", (Status.FAILED, Status.CANCELLED), Status.NOT_COMPLETE),
    ]
)

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
    #: A drain of its queue, which the sweep requests, among others.
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


def late_start(stored: int) -> tuple[str, str]:
    """Return the names of both from their sum, which is the value of the column `late_by`."""
    reason = LateReason(stored % 10)
    return BroughtBy(stored - reason).name.lower(), reason.name.lower()


def moves_from(status: Status) -> list[str]:
    """Return the names of the moves that `status` allows, for buttons and messages."""
    return [move.name for move in MOVES.values() if status in move.sources]
