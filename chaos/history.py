"""The recorded history of a run: calls, runs, published messages, row changes and faults.

All times are microseconds by the database's clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from delaytasks.model.moves import Status

#: "revoke" is Celery's call: it cancels a row that waits, and otherwise asks the workers.
Call = Literal["schedule", "reschedule", "cancel", "rerun", "revoke"]
#: "failed" means refused or rolled back, so nothing was done. "unknown" means that the answer was
#: lost.
Answer = Literal["ok", "failed", "unknown"]
#: The effect of a fault on key owners. "dead": they end immediately. "away": they cannot renew a
#: lease during the fault, because they are frozen or cannot reach the database. "ending": they are
#: asked to end, and finish their chunks.
Effect = Literal["none", "dead", "away", "ending"]
#: The value of `key_owners` that matches every owner.
ALL = ("",)
#: A crash of PostgreSQL may lose claims of this time before it: three times its default of
#: `wal_writer_delay`, and some tolerance.
NOT_ON_DISK_US = 1_000_000


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A producer's call and its answer."""

    id: int
    call: Call
    answer: Answer
    asked_us: int
    answered_us: int
    #: The requested due time; None if the call names no time.
    due_us: int | None = None
    #: The number of runs that the retry schedule allows.
    most_runs: int = 1
    #: The row has the message of a Celery task, which a worker publishes.
    is_celery: bool = False


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One call of a processor. It has no end if the process was killed or the run ended first."""

    id: int
    #: The version of the row's claim.
    version: int
    worker: str
    began_us: int
    ended_us: int | None = None


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """The message of a Celery task that a worker passes to the client of the broker."""

    #: The id of the row. In a notebook, the id of the Celery task.
    id: int
    at_us: int


@dataclass(frozen=True, slots=True)
class DeliveryRecord:
    """A Celery task that a worker begins to run."""

    #: As in `PublishRecord`.
    id: int
    at_us: int


@dataclass(frozen=True, slots=True)
class RowChange:
    """A row that was inserted or updated, as recorded by the database's trigger."""

    id: int
    at_us: int
    was: Status | None
    status: Status
    version_was: int | None
    version: int
    runs: int
    lapses: int
    due_us: int
    lease_until_us: int | None
    worker: str | None


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault, from its first effect to its last."""

    kind: str
    target: str
    from_us: int
    until_us: int
    #: The effect on the owners of leases.
    effect: Effect = "none"
    #: The affected lease owners: substrings of the names in the rows.
    key_owners: tuple[str, ...] = ()
    #: Messages that the broker or a worker had may be lost, as with bare Celery.
    loses_messages: bool = False
    #: The database may lose claims that were not on the disk yet.
    loses_claims: bool = False

    def may_lose_claim(self, at_us: int, later_us: int = 0) -> bool:
        """Return whether a claim of this time, or up to `later_us` before it, may be lost.

        The row of a lost claim waits again.
        """
        until_us = self.until_us + later_us
        return self.loses_claims and self.from_us - NOT_ON_DISK_US <= at_us <= until_us


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An occurrence of a recurring schedule that has a task."""

    #: The time of the occurrence in the key of the task.
    at_us: int
    #: When the row of the task was inserted.
    made_us: int
    #: When the task was finished; None if it is not.
    ended_us: int | None = None


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The occurrences of a recurring schedule, of which each has a task, ordered by time.

    The schedule is due at `first_us` and then after each interval, and was watched up to `last_us`.
    """

    name: str
    interval_us: int
    first_us: int
    last_us: int
    found: list[Occurrence]
    missed: Literal["all", "latest"] = "all"
    overlap: Literal["allow", "skip"] = "allow"


@dataclass
class History:
    call_records: list[CallRecord] = field(default_factory=list)
    run_records: list[RunRecord] = field(default_factory=list)
    changes: list[RowChange] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    occurrences: list[Occurrences] = field(default_factory=list)
    publications: list[PublishRecord] = field(default_factory=list)
    deliveries: list[DeliveryRecord] = field(default_factory=list)
    #: Processes that ran no task at the end, although there was enough work for all.
    hung: list[str] = field(default_factory=list)


Noted = CallRecord | RunRecord | PublishRecord | DeliveryRecord
_KINDS: dict[str, type[Noted]] = {
    "call": CallRecord,
    "run": RunRecord,
    "publish": PublishRecord,
    "deliver": DeliveryRecord,
}


class Notebook:
    """Append the records of one process to a file, one per line.

    A killed process loses no written line.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(
            folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def note(self, one: Noted) -> None:
        kind = next(name for name, type_ in _KINDS.items() if isinstance(one, type_))
        os.write(self._file, (json.dumps({"kind": kind, **asdict(one)}) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def read(folder: Path, changes: Iterable[RowChange]) -> History:
    """Read the records of all processes. The end of a run replaces its begin."""
    history = History(changes=list(changes))
    runs: dict[tuple[int, int, str, int], RunRecord] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            fields: dict[str, Any] = json.loads(line)
            one = _KINDS[fields.pop("kind")](**fields)
            if isinstance(one, RunRecord):
                runs[one.id, one.version, one.worker, one.began_us] = one
            elif isinstance(one, PublishRecord):
                history.publications.append(one)
            elif isinstance(one, DeliveryRecord):
                history.deliveries.append(one)
            else:
                history.call_records.append(one)
    history.run_records = sorted(runs.values(), key=lambda run: run.began_us)
    history.call_records.sort(key=lambda record: record.asked_us)
    history.publications.sort(key=lambda record: record.at_us)
    return history
