"""Values and protocols that the packages share with the storage and the timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

from delaytasks.model.clock import to_us
from delaytasks.model.inputs import Spread, is_queue
from delaytasks.model.moves import MOVES, Ending, SettlingMove, Status
from delaytasks.model.policies import NO_WAITLISTS, WaitlistsSeen
from delaytasks.model.task import DelayedTask

#: The new due time of rescheduled tasks: an instant, a shift, times in a period, or None if it
#: stays.
To = datetime | timedelta | Spread | None


class Entry(NamedTuple):
    """A task that is due within the horizon, as a timer keeps it and a message names it."""

    id: int
    version: int
    due_us: int
    queue: str = "default"
    priority: int = 0

    @classmethod
    def of(cls, task: DelayedTask) -> Entry:
        return cls(task.id, task.version, to_us(task.expected_time), task.queue, task.priority)

    def as_list(self) -> list[int]:
        """Return what a message about the entry's queue says."""
        return [self.id, self.version, self.due_us, self.priority]


def by_queue(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each queue, without those that workers refuse.

    Other programs write rows with any values. The sweep finds these rows.
    """
    queues: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.id > 0 and entry.version >= 0 and entry.due_us >= 0:
            queues.setdefault(entry.queue, []).append(entry)
    return {queue: found for queue, found in queues.items() if is_queue(queue)}


class UnclaimedRow(NamedTuple):
    """A task that a message named and that the claim did not get."""

    id: int
    version: int
    status: Status
    due_us: int
    lapses: int


class Claimed(list[DelayedTask]):
    """The tasks that a claim got, and the waitlists that it saw."""

    def __init__(
        self, tasks: Iterable[DelayedTask] = (), seen: WaitlistsSeen = NO_WAITLISTS
    ) -> None:
        super().__init__(tasks)
        self.seen = seen

    def add(self, other: Claimed) -> None:
        self.extend(other)
        self.seen = self.seen.merge(other.seen)


class Pending(NamedTuple):
    """The unfinished tasks of one tag."""

    tag: str
    tasks: int
    first_due: datetime
    queues: tuple[str, ...] = ()


class OverdueGroup(NamedTuple):
    """Overdue tasks of one queue and tag."""

    queue: str
    tag: str
    #: Why a worker has deferred them (`model/why.py` has the codes); None if no worker has.
    cause: str | None
    tasks: int
    oldest: datetime


class UntrustedInput(NamedTuple):
    """Rows of one tag that another program wrote, and that no worker can claim."""

    tag: str
    tasks: int
    first_due: datetime
    #: The first and the last id.
    ids: tuple[int, int]
    problem: str


class Level(NamedTuple):
    """A queue and a priority that have waiting tasks."""

    queue: str
    priority: int


class QueuePlace(NamedTuple):
    """The position of a walk through all queues; None is the beginning.

    The fields are the last queue with tasks, and the last one with waitlists.
    """

    tasks: str | None = None
    waitlists: str | None = None


class FoundRow(NamedTuple):
    """A row of a level, as a walk through it found it."""

    id: int
    tag: str
    due: datetime


class Recovered(NamedTuple):
    """Abandoned rows: their worker died or lost its lease."""

    total: int
    #: The tasks that failed because they lost too many leases.
    worker_lost: Sequence[DelayedTask]
    #: Id and tag of the tasks that exceeded their time limit.
    timed_out: Sequence[tuple[int, str]] = ()
    #: The levels of the tasks that can run again.
    levels: Set[Level] = frozenset()


class Step(NamedTuple):
    """The result of one step of a bulk command, which changes some hundreds of tasks."""

    #: The moved tasks, with their new versions.
    moved: list[Entry]
    #: The number of tasks that have moved since, or that the filter no longer matches.
    refused: int
    #: The ids of tasks that other transactions have locked, or whose keys they have locked.
    busy: list[int]
    #: Id, version and due time of the tasks that must get their keys back first.
    keyed: list[tuple[int, int, datetime]]


class Settlement(NamedTuple):
    """The move that ends one run, fenced by the version that the claim returned.

    Each task makes one, and a tuple takes a third of the time of a frozen dataclass.
    """

    task: DelayedTask
    move: SettlingMove
    began: datetime | None = None
    error: str | None = None
    #: The time of the next run.
    expected_time: datetime | None = None
    #: The due time that a deferred task keeps. None means that `expected_time` becomes the due
    #: time.
    due_time: datetime | None = None
    result: str | None = None
    #: The processor has settled the row itself, in its own transaction.
    is_made: bool = False

    @property
    def target(self) -> Status:
        return MOVES[self.move].target

    @property
    def ending(self) -> Ending:
        ending = MOVES[self.move].ending
        assert ending is not None
        return ending


#: Writes settlements, and returns the ids that were accepted.
Settle = Callable[[Sequence[Settlement]], set[int]]


class CallerConnection(Protocol):
    """The caller's database connection, as the storage uses it."""

    def execute(self, statement: Any, parameters: Any = None, /) -> Any: ...

    def begin_nested(self) -> AbstractContextManager[Any]: ...

    def in_transaction(self) -> bool: ...


class Transaction(Protocol):
    """A transaction of the caller; its tasks are armed after the commit."""

    #: Whether a web framework counts the tasks that were scheduled, moved or cancelled, and reports
    #: them if the commit is missing: `after_commit` is then also called for those that need no
    #: arming.
    reports_changes: bool

    @property
    def connection(self) -> CallerConnection: ...

    @property
    def stands_alone(self) -> bool:
        """Whether each statement is committed by itself, because there is no transaction."""
        ...

    def after_commit(self, tasks: Sequence[Any], action: Callable[..., None]) -> None:
        """Call `action(tasks)` after the commit.

        If only the moment before it is known, call `action(tasks, is_committed=False)` then.
        """
        ...

    def guard(self, unknown_id: int | None = None) -> AbstractContextManager[CallerConnection]:
        """Return the connection; its errors become `SessionUnusableError`.

        If each statement stands alone, a lost answer becomes `OutcomeUnknownError` with this id.
        """
        ...


def connection_of(transaction: Transaction | None) -> CallerConnection | None:
    return None if transaction is None else transaction.connection


class Timer(Protocol):
    """Brings tasks that are due within the horizon to a worker, which waits until they are due.

    A timer may lose entries, since the sweep dispatches overdue rows, and it may deliver them more
    than once, since only one claim of a version succeeds. Any thread may call its methods.
    """

    @property
    def is_up(self) -> bool:
        """Whether the last use of the timer's server succeeded."""
        ...

    def arm(self, entries: Iterable[Entry]) -> bool:
        """Arm the entries. Return False if some may not be armed; the next sweep arms them then."""
        ...

    def disarm(self, entries: Iterable[Entry]) -> None:
        """Forget exactly these versions if possible.

        The claim refuses an entry that is sent nevertheless.
        """

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        """Ask workers to drain `queue`. Return False if no message could be sent."""
        ...
