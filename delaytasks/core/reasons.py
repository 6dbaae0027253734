"""The reasons why a task has not run, or how it ended, and the facts from which they follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.core.policies import Policy
from delaytasks.core.registered_worker import RegisteredWorker
from delaytasks.core.task import DelayTask


class Reason(NamedTuple):
    """One reason, for people and for programs."""

    #: A name that programs compare, such as "paused".
    code: str
    #: The reason in one or two sentences.
    sentence: str
    #: The remedy for an operator; empty if none is needed.
    remedy: str = ""
    #: The values in the sentence, as JSON values.
    facts: Mapping[str, Any] = {}

    @property
    def text(self) -> str:
        """The sentence and the remedy."""
        return f"{self.sentence} {self.remedy}".rstrip()

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "facts": dict(self.facts)}


class ScheduleFacts(NamedTuple):
    """The recurring schedule that has made the task."""

    name: str
    timing: str
    is_paused: bool
    next_at: datetime | None


class AuditFacts(NamedTuple):
    """The audit entry of the action that has cancelled the task."""

    id: int
    actor: str


class TransportFacts(NamedTuple):
    """The errors of the servers that bring due tasks to the workers; None if they answer."""

    broker: str | None = None
    redis_timer: str | None = None


class Facts(NamedTuple):
    """The facts on which the reasons for one task depend."""

    task: DelayTask
    #: The time of the database, whose clock decides what is due.
    now: datetime
    #: Seconds by which the clock of this machine is ahead of the database's clock.
    clock_offset_s: float
    workers: Sequence[RegisteredWorker]
    #: The policies of the task's tag and queue.
    policies: Sequence[Policy] = ()
    #: Whether the task is in the waitlist of its tag's limit.
    is_in_waitlist: bool = False
    #: The number of tasks in the waitlist of the tag and queue, up to a bound.
    waitlist_tasks: int = 0
    #: Running tasks of the tag.
    running: int = 0
    #: Running tasks of the tag with the task's concurrency key.
    running_of_key: int = 0
    #: Seconds since the last sweep; None if there was none.
    swept_s: float | None = None
    #: Seconds after the due time from which the sweep takes care of a task.
    grace_s: float = 1.0
    #: Seconds after which a sweep is late.
    self_sweep_s: float = 10.0
    #: The prefix of the queues in the broker.
    namespace: str = "delaytasks"
    #: The names of the encryption keys that this process has.
    keys: Sequence[str] = ()
    schedule: ScheduleFacts | None = None
    cancelled_by: AuditFacts | None = None
    #: The state of broker and timer, if the task is due soon. Otherwise they are not asked.
    transport: TransportFacts = TransportFacts()

    @property
    def wait_s(self) -> float:
        """Seconds until the next try; negative if it should have begun."""
        return (self.task.expected_time - self.now).total_seconds()

    @property
    def late_s(self) -> float:
        """Seconds since the due time."""
        return (self.now - self.task.due).total_seconds()


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a task has not run, or how it ended.

    Attributes
    ----------
    id
        The id of the task. None if the task was named by its key and its database does not answer.
    task
        The task as it was read. None if its database does not answer.
    reasons
        The reasons, the most important one first. There is at least one.
    """

    id: int | None
    task: DelayTask | None
    reasons: Sequence[Reason]

    def __str__(self) -> str:
        return " ".join(reason.text for reason in self.reasons)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON value: the first reason, and all of them in `reasons`. It has no body."""
        task = self.task
        return {
            "id": None if self.id is None else str(self.id),
            "tag": task and task.tag,
            "key": task and task.key,
            "queue": task and task.queue,
            "status": task and task.status.name,
            **self.reasons[0].as_json(),
            "reasons": [reason.as_json() for reason in self.reasons],
        }


def instant_text(instant: datetime | None) -> str:
    if instant is None:
        return "(unknown)"
    return instant.isoformat(timespec="seconds").replace("+00:00", "Z")
