"""A task as callers and processors see it."""

from __future__ import annotations

import ipaddress
import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.core.current_run import Current, current_run
from delaytasks.core.encryption import decoded, is_encrypted, placeholder
from delaytasks.core.errors import InvalidScheduleError, NotRunningError
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import MAX_DEPTH
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.states import FINISHED, Status
from delaytasks.core.text import shown

#: Where rows wait that say nothing of a queue, as those of other programs.
DEFAULT_QUEUE = "default"


# Not frozen: a worker makes one for each row, and that would take five times as long.
@dataclass(slots=True, unsafe_hash=True)
class DelayTask:
    """A row of `yb_delay_task_message`, as it was when it was read. It is for reading only: a change does not reach the
    row, and takes a task that runs from its worker."""

    id: int
    tag: str
    body_json: str
    expected_time: datetime
    status: Status = Status.NOT_COMPLETE
    version: int = 0
    queue: str = DEFAULT_QUEUE
    priority: int = 0
    key: str | None = None
    delay_s: int = 0
    attempts: int = 0
    lapses: int = 0
    headers_json: str | None = None
    concurrency_key: str | None = None
    create_time: datetime | None = None
    #: When the task was due, if a deferral has moved `expected_time`; None if `expected_time` is the due time.
    due_time: datetime | None = None
    update_time: datetime | None = None
    execution_time: datetime | None = None
    lease_until: datetime | None = None
    worker: str | None = None
    ip: int | None = None
    error: str | None = None
    result_json: str | None = None
    #: The database that it is in, by its place in `delaytasks_database_url`.
    shard: int = 0

    @property
    def due(self) -> datetime:
        """When the task is due, or was. `expected_time` is later while the task waits for a worker that can run it;
        lateness and `expires` count from `due`."""
        return self.due_time or self.expected_time

    @property
    def body(self) -> Any:
        """The body, decoded; `ValueError` when another program stored something that is not JSON, and its subclass
        `BodyEncryptedError` when no key here opens it."""
        return decoded(self.body_json, f"the body of task {self.id}")

    def complete(self, session: Any = None, *, result: Any = None) -> None:
        """Called by the task's processor: makes the task DONE in the transaction of `session` (a SQLAlchemy Session or
        Connection; with Django that of the current connection), so that it commits together with what the processor
        wrote there, or not at all. Commit before you return."""
        self._run("complete").complete(self.id, session, result)

    def check_lease(self) -> None:
        """Called by the task's processor wherever it can break off: `LeaseLostError` if its lease could not be renewed
        and is about to end. Then the task runs elsewhere; let the error out."""
        self._run("check_lease").check_lease(self.id)

    def _run(self, what: str) -> Current:
        run = current_run.get()
        if run is None:
            raise NotRunningError(
                f"task {self.id} does not run here: {what}() is for its processor", self.id
            )
        return run

    @property
    def retry_schedule(self) -> RetrySchedule | None:
        """The task's own, which takes the place of its tag's."""
        retry_delays = self._headers().get("retry")
        try:
            return (
                None
                if retry_delays is None
                else RetrySchedule(retry_delays["rungs_s"], jitter=retry_delays["jitter"])
            )
        except (ValueError, TypeError, KeyError):  # another program's
            return None

    @property
    def expires_s(self) -> float | None:
        """Later than so it is not worth running any more."""
        return self._seconds("expires_s")

    @property
    def max_wait_s(self) -> float | None:
        """Replacing tasks puts them off for so long at most."""
        return self._seconds("max_wait_s")

    @property
    def result(self) -> Any:
        """What its processor returned, where the processor keeps that."""
        return (
            None
            if self.result_json is None
            else decoded(self.result_json, f"the result of task {self.id}")
        )

    def _seconds(self, header: str) -> float | None:
        seconds: Any = self._headers().get(header)
        # Else another program's; an integer may be longer than any float.
        return float(seconds) if type(seconds) in (int, float) and 0 <= seconds < 1e15 else None

    def _headers(self) -> dict[str, Any]:
        if self.headers_json is None:
            return {}
        headers = _lenient(self.headers_json)
        return headers if isinstance(headers, dict) else {}

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED

    @property
    def ip_address(self) -> str | None:
        """The executing host's IPv4 address in dotted form."""
        try:
            return None if self.ip is None else str(ipaddress.IPv4Address(self.ip))
        except ValueError:
            return str(self.ip)  # another program's

    def as_json(self) -> dict[str, Any]:
        """For `--json` and APIs. Ids are strings, since JavaScript rounds integers above 2^53."""
        return {
            "id": str(self.id),
            "tag": self.tag,
            "key": self.key,
            "status": self.status.name,
            "queue": self.queue,
            "priority": self.priority,
            "body": _shown(self.body_json),
            "due_time": _iso(self.due),
            "expected_time": _iso(self.expected_time),
            "execution_time": _iso(self.execution_time),
            "create_time": _iso(self.create_time),
            "update_time": _iso(self.update_time),
            "lease_until": _iso(self.lease_until),
            "delay_s": self.delay_s,
            "attempts": self.attempts,
            "lapses": self.lapses,
            "version": self.version,
            "worker": self.worker,
            "ip_address": self.ip_address,
            "error": self.error,
            "headers": _shown(self.headers_json) if self._headers() else {},
            "concurrency_key": self.concurrency_key,
            "result": None if self.result_json is None else _shown(self.result_json),
        }


class Attempt(NamedTuple):
    """A run that failed."""

    number: int
    began: datetime | None
    ended: datetime
    worker: str | None
    error: str | None

    def as_json(self) -> dict[str, Any]:
        return {**self._asdict(), "began": _iso(self.began), "ended": _iso(self.ended)}


# A tuple, and no frozen dataclass, which takes four times as long to make.
class NewTask(NamedTuple):
    """One task to schedule, for `schedule_many`: give `delay` or `when`."""

    tag: str
    body: Any
    delay: Any = None
    when: datetime | None = None
    key: str | None = None
    queue: str | None = None
    priority: int = 0
    id: int | None = None
    retry: RetrySchedule | str | int | None = None
    expires: Any = None
    max_wait: Any = None
    concurrency_key: str | None = None


def new_task_of(item: object) -> NewTask:
    """Return the task to schedule that `schedule_many` was given."""
    if isinstance(item, NewTask):
        return item
    if isinstance(item, tuple) and len(item) == 3:
        tag, body, at = item
        return NewTask(tag, body, when=at) if isinstance(at, datetime) else NewTask(tag, body, at)
    raise InvalidScheduleError(
        f"schedule_many takes NewTask, or (tag, body, delay or instant), not {shown(item)}"
    )


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the tasks that `find` was asked for; `cursor` gets the next ones, None at the end."""

    tasks: list[DelayTask]
    cursor: str | None
    #: The shards that could not be asked: their tasks are not among these.
    missing: tuple[int, ...] = ()

    def __iter__(self) -> Any:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


def id_of(name: object) -> int:
    """The id of a task that a call names by the task or by its id."""
    return name.id if isinstance(name, DelayTask) else check_id(name)


def _iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat()


def _shown(text: str | None) -> Any:
    """The value, if JSON can say it again; else its text. Python also reads NaN and 1e400, and any depth."""
    if text is not None and is_encrypted(text):
        return placeholder(text)
    value = _lenient(text or "null")
    return value if _can_be_said(value, MAX_DEPTH) else text


def _can_be_said(value: Any, depth: int) -> bool:
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_can_be_said(item, depth - 1) for item in inner)
    return not isinstance(value, float) or math.isfinite(value)


def _lenient(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
