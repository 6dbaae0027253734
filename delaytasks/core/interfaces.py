"""What the engine needs of the rooms below it, said as types: the store, the timers, a caller's transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from delaytasks.core.bulk import AuditEntry, Filter
from delaytasks.core.capacity import WaitlistState
from delaytasks.core.ids import shard_of
from delaytasks.core.policies import Policies, Policy
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask

T = TypeVar("T")
OnConflict = Literal["reject", "keep", "replace"]
#: When tasks are due that are moved together: at an instant, so much later or earlier, or as they were.
To = datetime | timedelta | None


class Entry(NamedTuple):
    """A near task on its way: what a timer holds and a message names."""

    id: int
    version: int
    due_us: int
    queue: str = "default"
    priority: int = 0

    @classmethod
    def of(cls, task: DelayTask, to_us: Callable[[datetime], int]) -> Entry:
        return cls(task.id, task.version, to_us(task.expected_time), task.queue, task.priority)


def by_shard(entries: Sequence[Entry], shards: int) -> dict[int, Sequence[Entry]]:
    """The entries of each of so many shards. Of a shard that this process does not know yet, others take care."""
    if shards == 1:
        return {0: entries} if entries else {}
    parts: dict[int, list[Entry]] = {}
    for entry in entries:
        if (shard := shard_of(entry.id)) < shards:
            parts.setdefault(shard, []).append(entry)
    return dict(parts)


class Miss(NamedTuple):
    """A task that a message named and the claim did not get."""

    id: int
    version: int
    status: Status
    due_us: int
    lapses: int


class WaitlistsSeen(NamedTuple):
    """What a thread's claims met of limited tags: lines, by queue and tag, and how many tasks joined one."""

    lines: Set[tuple[str, str]] = frozenset()
    held: int = 0


class Pending(NamedTuple):
    """The tasks of one tag that are yet to run."""

    tag: str
    tasks: int
    first_due: datetime
    queues: tuple[str, ...] = ()


class Late(NamedTuple):
    """Tasks of one queue and tag that should have begun."""

    queue: str
    tag: str
    #: Why a worker has deferred them (`core/why.py` has the codes); None if nobody has.
    cause: str | None
    tasks: int
    oldest: datetime


class UntrustedInput(NamedTuple):
    """Rows of one tag that another program wrote, and that no worker will ever take as they are."""

    tag: str
    tasks: int
    first_due: datetime
    #: The first and the last one.
    ids: tuple[int, int]
    problem: str


class Level(NamedTuple):
    """A queue and a priority that have tasks waiting."""

    queue: str
    priority: int


class QueuePlace(NamedTuple):
    """Where a look at all queues, one part after another, has come to. None is the beginning."""

    tasks: str | None = None
    lines: str | None = None


class Seen(NamedTuple):
    """A row of a level that a walk has come to."""

    id: int
    tag: str
    due: datetime


class Lapsed(NamedTuple):
    """Rows whose worker died or lost its lease."""

    total: int
    #: Those of them that were given up, as they were left.
    given_up: Sequence[DelayTask]
    #: Id and tag of those whose time limit was over.
    timed_out: Sequence[tuple[int, str]] = ()
    #: Where those of them wait that can run again.
    levels: Set[Level] = frozenset()


class Step(NamedTuple):
    """What became of some hundreds of tasks."""

    #: As they are now.
    moved: list[Entry]
    #: They moved on before, or are none of those that were named any more.
    refused: int
    #: Somebody has them locked, or their keys.
    busy: list[int]
    #: Id and version of those that must have their keys again first.
    keyed: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Settlement:
    """How one run ended: the move that is to be made, fenced by the version that the claim gave."""

    task: DelayTask
    move: Literal["succeed", "fail", "schedule_retry", "snooze", "withdraw", "expire", "give_back"]
    began: datetime | None = None
    error: str | None = None
    due: datetime | None = None
    #: With `due`, of a deferral: when the task was due. None: `due` is its due time from now on.
    due_time: datetime | None = None
    result: str | None = None
    #: The processor made it itself, in a transaction of its own.
    is_made: bool = False


class Executor(Protocol):
    """The caller's database connection, as far as the store uses it."""

    def execute(self, statement: Any, parameters: Any = None, /) -> Any: ...

    def begin_nested(self) -> AbstractContextManager[Any]: ...

    def in_transaction(self) -> bool: ...


class Transaction(Protocol):
    """A transaction of the caller's, in which rows are written; arming waits for its commit."""

    @property
    def executor(self) -> Executor: ...

    @property
    def stands_alone(self) -> bool:
        """There is no transaction: what is written is committed by itself."""
        ...

    def after_commit(self, tasks: Sequence[DelayTask], action: Callable[..., None]) -> None:
        """Calls `action(tasks)` once others see the rows, or `action(tasks, is_committed=False)` just before."""
        ...

    def guard(self, unknown_id: int | None = None) -> AbstractContextManager[Executor]:
        """The executor, whose errors become `SessionUnusableError`; or `OutcomeUnknownError` with this id, where each
        of its statements stands alone."""
        ...


class TaskStore(Protocol):
    """Rows, as producers see them. `on` is the caller's connection, if there is one."""

    def together(self, work: Callable[[Executor], T], unknown_id: int) -> T: ...

    def insert(self, task: DelayTask, on: Executor | None = None) -> bool: ...
    def insert_many(self, tasks: Sequence[DelayTask], on: Executor | None = None) -> bool: ...
    def insert_keyed(
        self, task: DelayTask, on_conflict: OnConflict, on: Executor | None = None
    ) -> tuple[DelayTask, bool]: ...
    def get(self, id: int, on: Executor | None = None) -> DelayTask | None: ...


class LineStore(Protocol):
    """Rows of limited tags that wait until there is room."""

    def met(self) -> WaitlistsSeen: ...
    def of(self, queue: str) -> Set[tuple[str, str]]: ...
    def gather(self, queue: str, priority: int, tags: Collection[str]) -> bool: ...
    def admit(
        self, queue: str, tag: str, limit: int, at_once: int = ...
    ) -> tuple[Sequence[DelayTask], WaitlistState | None]: ...


class ClaimStore(Protocol):
    """Rows, as workers see them."""

    @property
    def lines(self) -> LineStore: ...

    def claim(self, entries: Sequence[Entry]) -> list[DelayTask]: ...
    def claim_alone(self, id: int, version: int) -> DelayTask | None: ...
    def claim_due(self, queue: str, priorities: Sequence[int], limit: int) -> list[DelayTask]: ...
    def claim_abandoned(self, queue: str, priorities: Sequence[int] = ...) -> DelayTask | None: ...
    def misses(self, ids: Iterable[int]) -> list[Miss]: ...
    def settle(self, settlements: Sequence[Settlement]) -> set[int]: ...
    def hand_over(
        self, settlements: Sequence[Settlement], queue: str, tag: str
    ) -> tuple[set[int], Sequence[DelayTask]]: ...
    def complete(self, task: DelayTask, result: str | None, on: Executor) -> bool: ...


class SweepStore(Protocol):
    """The table, as the sweep sees it."""

    def begin_sweep(self, house: int, houses: int, at_least_s: float) -> datetime | None: ...
    def mark_armed(self, house: int, houses: int, since: datetime, until: datetime) -> None: ...
    def near(
        self, since: datetime, until: datetime, house: int, houses: int, policies: Policies = ...
    ) -> Iterator[list[Entry]]: ...
    def levels_of(self, queues: Iterable[str], late_s: float) -> list[Level]: ...
    def next_queues(self, after: QueuePlace, most: int) -> tuple[set[str], QueuePlace]: ...
    def lapse(self, max_lost_leases: int, limit: int) -> Lapsed: ...
    def purge(self, older_than_s: float, limit: int) -> int: ...
    def purge_audit(self, older_than_s: float) -> None: ...
    def partitions_end(self) -> datetime | None: ...
    def stale_houses(self, houses: int, age_s: float) -> list[int]: ...
    def forget_armed(self) -> None: ...


class PolicyStore(Protocol):
    """The policies of one database."""

    def applied(self, policies: Sequence[Policy]) -> None: ...
    def forget(self) -> int: ...
    def held(self) -> dict[tuple[str, str], int]: ...


class HoldStore(Protocol):
    """Rows that are paused, and those that were."""

    def levels(self, status: Status, after: str | None) -> tuple[list[Level], str | None]: ...
    def look(
        self, status: Status, level: Level, since: datetime | None, until: datetime | None
    ) -> list[Seen]: ...
    def crowd(self, status: Status, level: Level, due: datetime, after: int) -> list[Seen]: ...
    def near(self, since: datetime, until: datetime) -> list[int]: ...
    def hold(self, ids: Sequence[int]) -> int: ...
    def release(self, ids: Sequence[int]) -> list[Entry]: ...
    def hold_claimed(self, tasks: Sequence[DelayTask]) -> set[int]: ...


class BulkStore(Protocol):
    """The table, as an operator moves many rows of it."""

    def now(self) -> datetime: ...
    def matching(self, which: Filter) -> Iterator[Sequence[tuple[int, Status]]]: ...
    def begin(self, entry: AuditEntry) -> None: ...
    def step(
        self, run: int, which: Filter, ids: Sequence[int], to: To, done: tuple[int, int]
    ) -> Step: ...
    def note(self, run: int, done: tuple[int, int]) -> None: ...
    def end(self, run: int, state: str, done: tuple[int, int] | None) -> None: ...


class WorkerStore(Protocol):
    """One row for each worker."""

    def seen(
        self,
        name: str,
        queues: Sequence[str],
        pool: str,
        concurrency: int,
        offset_us: int,
        tags: Collection[str] | None = None,
    ) -> None: ...
    def gone(self, name: str) -> None: ...
    def bury(self, silent_s: float) -> list[str]: ...
    def alive(self) -> list[dict[str, Any]]: ...


class NoticeChannel(Protocol):
    """What a transaction tells those who listen, at its commit."""

    @property
    def is_possible(self) -> bool: ...

    def tell(self, payloads: Iterable[str], on: Executor | None = None) -> None: ...


class Timer(Protocol):
    """Holds near tasks until they are due, and then brings them to a worker."""

    @property
    def is_up(self) -> bool: ...

    def arm(self, entries: Iterable[Entry]) -> bool: ...

    def disarm(self, entries: Iterable[Entry]) -> None:
        """Forgets exactly these versions where it can; what comes out all the same is refused by the claim."""

    def drain(
        self, queue: str, priorities: Sequence[int], tokens: int, expires_s: float, shard: int = 0
    ) -> bool: ...
