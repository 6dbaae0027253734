"""The recorded history of a run: calls, runs, published messages, row changes and faults.

All times are microseconds by the database's clock.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from delaytasks.model.clock import to_us
from delaytasks.model.inputs import CELERY_PREFIX
from delaytasks.model.moves import FINISHED, Status

#: "revoke" is Celery's call: it cancels a row that waits, and otherwise asks the workers.
Call = Literal["schedule", "reschedule", "cancel", "rerun", "revoke"]
#: "failed" means refused or rolled back, so nothing was done. "unknown" means that the answer was
#: lost, or that the caller died before it.
Answer = Literal["ok", "failed", "unknown"]
#: The effect of a fault on key owners. "dead": they end immediately. "away": they cannot renew a
#: lease during the fault, because they are frozen or cannot reach the database. "ending": they are
#: asked to end, and finish their chunks.
Effect = Literal["none", "dead", "away", "ending"]
#: The value of `key_owners` that matches every owner.
ALL = ("",)
#: The retries of the tags that fail at first, and the number of runs that these allow.
RETRIES = "0.3s 0.3s"
MOST_RUNS = {"shaky": 3}
#: A crash of PostgreSQL may lose claims of this time before it: three times its default of
#: `wal_writer_delay`, and some tolerance.
NOT_ON_DISK_US = 1_000_000
#: The kind of a pause of the whole machine, which nobody injected.
STALL = "the machine stalled"
#: Part of the kinds of all kills.
KILL = "kill"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A producer's call. The record with its answer replaces the one that was noted before it."""

    id: int
    call: Call
    answer: Answer
    asked_us: int
    answered_us: int
    #: The requested due time; None if the call names no time.
    due_us: int | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One call of a processor. The record with its end replaces the one of its begin.

    It has no end if the process was killed or the history ended first.
    """

    id: int
    #: The version of the row's claim.
    version: int
    worker: str
    began_us: int
    ended_us: int | None = None


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """A step of the message of a Celery task.

    A worker passes it to the client of the broker, or a worker begins to run the Celery task.
    """

    #: The id of the row. In a notebook, the id of the Celery task.
    id: int
    step: Literal["published", "begun"]
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
    tag: str = ""
    key: str | None = None


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
    #: In how many seconds after the fault each due task has to run: one that waited, and one that
    #: has lost a lease.
    bounds_s: tuple[float, float] | None = None

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


@dataclass(slots=True)
class Recurs:
    """A recurring schedule, and its occurrences that have a task.

    It is due at `first_us` and then after each interval, and was watched up to `last_us`.
    """

    name: str
    interval_us: int
    first_us: int = 0
    last_us: int = 0
    missed: Literal["all", "latest"] = "all"
    overlap: Literal["allow", "skip"] = "allow"
    #: How many seconds each of its tasks takes.
    takes_s: float = 0
    found: list[Occurrence] = field(default_factory=list)


@dataclass(frozen=True)
class Claim:
    """A claim of a row, with its last renewal and its end. A renewal does not end a claim."""

    change: RowChange
    renewed: RowChange
    end: RowChange | None

    @property
    def is_lost(self) -> bool:
        """Whether it was never settled."""
        return self.end is not None and self.end.lapses > self.change.lapses

    @property
    def held_until_us(self) -> int:
        """The end of its lease, or the time when the lease was taken away earlier."""
        ends = (self.renewed.lease_until_us, None if self.end is None else self.end.at_us)
        return min((at_us for at_us in ends if at_us is not None), default=self.change.at_us)


@dataclass
class TaskRecord:
    """The complete record of one task, joined from all sources."""

    calls: dict[tuple[str, int], CallRecord] = field(default_factory=dict)
    runs: dict[tuple[int, str, int], RunRecord] = field(default_factory=dict)
    published_us: list[int] = field(default_factory=list)
    begun_us: list[int] = field(default_factory=list)
    changes: list[RowChange] = field(default_factory=list)

    def answered(self, call: str, *answers: Answer) -> list[CallRecord]:
        return [
            record
            for record in self.calls.values()
            if record.call == call and record.answer in answers
        ]

    @property
    def last(self) -> RowChange | None:
        return self.changes[-1] if self.changes else None

    def at(self, us: int) -> RowChange | None:
        """Return the last change until then."""
        return next((change for change in reversed(self.changes) if change.at_us <= us), None)

    @cached_property
    def claims(self) -> list[Claim]:
        found = []
        for change in self.changes:
            if change.status is not Status.RUNNING or change.version == change.version_was:
                continue
            leases = [
                c for c in self.changes if c.version == change.version and c.lease_until_us
            ] or [change]
            renewed = max(leases, key=lambda c: c.lease_until_us or 0)
            ends = (c for c in self.changes if c.version_was == change.version != c.version)
            found.append(Claim(change, renewed, next(ends, None)))
        return found

    def claim_of(self, version: int) -> Claim | None:
        return next((claim for claim in self.claims if claim.change.version == version), None)

    def claim_before(self, us: int) -> Claim | None:
        """Return the last claim until then."""
        return next((claim for claim in reversed(self.claims) if claim.change.at_us <= us), None)

    def has_run(self, claim: Claim) -> bool:
        return any(run.version == claim.change.version for run in self.runs.values())

    def story(self, faults: Iterable[Fault]) -> str:
        """Return all recorded facts about the task, ordered by time."""
        lines = [(us, "worker: publishes the message") for us in self.published_us]
        lines += [(us, "Celery task: begins") for us in self.begun_us]
        for record in self.calls.values():
            due = "" if record.due_us is None else f", due {_clock(record.due_us)}"
            lines.append((record.answered_us, f"producer: {record.call}{due}: {record.answer}"))
        for run in self.runs.values():
            text = f"processor: version {run.version}"
            lines.append((run.began_us, f"{text} begins in {run.worker}"))
            lines += [] if run.ended_us is None else [(run.ended_us, f"{text} ends")]
        for c in self.changes:
            was = "new" if c.was is None else f"{c.was} {c.version_was}"
            row = f"row: {was} -> {c.status} {c.version}, due {_clock(c.due_us)}, lapses {c.lapses}"
            row += f", {c.worker}" if c.worker else ""
            row += f", lease until {_clock(c.lease_until_us)}" if c.lease_until_us else ""
            lines.append((c.at_us, row))
        times = [us for us, _ in lines] or [0]
        lines += [
            (fault.from_us, f"fault: {fault.kind} of {fault.target} until {_clock(fault.until_us)}")
            for fault in faults
            if fault.until_us >= min(times) and fault.from_us <= max(times)
        ]
        return "\n".join(f"  {_clock(us)} {text}" for us, text in sorted(lines))


def _clock(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, timezone.utc).strftime("%H:%M:%S.%f")


Noted = CallRecord | RunRecord | MessageRecord | RowChange | Fault


@dataclass
class History:
    tasks: dict[int, TaskRecord] = field(default_factory=lambda: defaultdict(TaskRecord))
    faults: list[Fault] = field(default_factory=list)
    recurring: list[Recurs] = field(default_factory=list)
    #: Processes that ran no task at the end, although there was enough work for all.
    hung: list[str] = field(default_factory=list)

    def note(self, one: Noted) -> None:
        if isinstance(one, Fault):
            self.faults.append(one)
            return
        task = self.tasks[one.id]
        if isinstance(one, CallRecord):
            task.calls[one.call, one.asked_us] = one
        elif isinstance(one, RunRecord):
            task.runs[one.version, one.worker, one.began_us] = one
        elif isinstance(one, RowChange):
            task.changes.append(one)
        else:
            (task.published_us if one.step == "published" else task.begun_us).append(one.at_us)

    def join(self, recurring: Iterable[Recurs] = ()) -> None:
        """Use the keys of rows: move the records of Celery tasks to their rows, and the tasks of
        occurrences to the schedules that made them. Each of these counts as an acknowledged call.
        """
        self.recurring += recurring
        by_name = {each.name: each for each in self.recurring}
        for id, task in list(self.tasks.items()):
            if not task.changes or not (key := task.changes[0].key):
                continue
            made, last = task.changes[0], task.changes[-1]
            name, _, at = key.partition("@")
            if at:
                at_us = to_us(datetime.fromisoformat(at.replace("Z", "+00:00")))
                self.note(CallRecord(id, "schedule", "ok", made.at_us, made.at_us, at_us))
                if last.status is Status.CANCELLED:  # by a pause of the schedule
                    self.note(CallRecord(id, "cancel", "unknown", last.at_us, last.at_us))
                ended_us = last.at_us if last.status in FINISHED else None
                if name in by_name:
                    by_name[name].found.append(Occurrence(at_us, made.at_us, ended_us))
            elif made.tag.startswith(CELERY_PREFIX) and key.isdigit() and int(key) != id:
                of_message = self.tasks.pop(int(key), TaskRecord())
                task.calls |= of_message.calls
                task.published_us += of_message.published_us
                task.begun_us += of_message.begun_us
        for each in self.recurring:
            each.found.sort(key=lambda occurrence: occurrence.at_us)


# -- the notes of real processes ------------------------------------------------------------------

#: The environment variables with the folder of the notes, and with the time by which the database's
#: clock is ahead of the host's monotonic one, for processes with a wrong wall clock.
NOTES, AHEAD = "CHAOS_NOTES", "CHAOS_AHEAD_US"
_KINDS: dict[str, type[Noted]] = {
    kind.__name__: kind for kind in (CallRecord, RunRecord, MessageRecord, Fault)
}
_ahead_us = int(os.environ.get(AHEAD) or time.time_ns() // 1000 - time.monotonic_ns() // 1000)


def now_us() -> int:
    """Return the database's time: the host's wall clock at the begin of the run, continued
    monotonically.
    """
    return time.monotonic_ns() // 1000 + _ahead_us


def own_environment(folder: Path, ahead_s: int = 0) -> dict[str, str]:
    """Return the environment of processes that write notes in `folder`, and use the time of this
    process, or of a database that is `ahead_s` ahead.
    """
    return {NOTES: str(folder), AHEAD: str(_ahead_us + ahead_s * 1_000_000)}


class Notebook:
    """Append the records of one process to a file, one per line.

    A killed process loses no written line.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"{os.getpid()}.jsonl", flags)

    def note(self, one: Noted) -> None:
        line = json.dumps({"record": type(one).__name__, **asdict(one)}) + "\n"
        os.write(self._file, line.encode())


@lru_cache
def _notebook(_pid: int) -> Notebook:
    return Notebook(Path(os.environ[NOTES]))


def notebook() -> Notebook:
    """Return the notebook of this process."""
    return _notebook(os.getpid())


def read(folder: Path, changes: Iterable[RowChange] = ()) -> History:
    """Return what all processes have noted, and the changes of rows in the order of their writes.

    The history has yet to be joined.
    """
    history = History()
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            fields: dict[str, Any] = json.loads(line)
            history.note(_KINDS[fields.pop("record")](**fields))
    for change in changes:
        history.note(change)
    return history
