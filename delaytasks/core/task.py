"""A task as callers and processors read it."""

from __future__ import annotations

import ipaddress
import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from delaytasks.core.body_json import MAX_DEPTH
from delaytasks.core.current_run import Current, current_run
from delaytasks.core.encryption import decoded, is_encrypted, placeholder
from delaytasks.core.errors import NotRunningError
from delaytasks.core.ids import check_id
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.states import FINISHED, Status

#: The queue of rows without one, such as rows of other programs.
DEFAULT_QUEUE = "default"


# Not frozen: workers make one for each row, and a frozen one takes five times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class DelayTask:
    """A row of `yb_delay_task_message` as it was when it was read.

    The object is for reading only. A changed attribute does not change the row, and a processor
    that changes its task loses the lease.

    Attributes
    ----------
    id
        The id.
    tag
        The tag, which names the processor.
    body_json
        The body as it is stored. `body` decodes it.
    expected_time
        The time of the next run.
    status
        The status.
    version
        The number of changes of the row.
    queue, priority
        The queue and the priority, 0 to 9.
    key
        The key, or None.
    delay_s
        The delay in seconds when the task was scheduled.
    attempts
        The number of runs that have started.
    lapses
        The number of leases that were lost, because a worker died or hung.
    headers_json
        The options that differ from the processor's, as they are stored.
    concurrency_key
        The concurrency key, or None.
    create_time, update_time, execution_time
        The times of the first call, the last change and the start of the last run.
    due_time
        The due time, if a deferral has moved `expected_time`; else None. `due` is always set.
    lease_until, worker, ip
        The end of the lease, the name of the worker and its IPv4 address as a number.
    error
        The traceback of the last failed attempt, or the reason of the status.
    result_json
        The result as it is stored. `result` decodes it.
    shard
        The number of the database in `delaytasks_database_url`.

    Examples
    --------
    >>> task = delays.get(tag="order.close", key="7")
    >>> task.status, task.body
    (<Status.NOT_COMPLETE: 0>, {'order': 7})
    """

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
    due_time: datetime | None = None
    update_time: datetime | None = None
    execution_time: datetime | None = None
    lease_until: datetime | None = None
    worker: str | None = None
    ip: int | None = None
    error: str | None = None
    result_json: str | None = None
    shard: int = 0

    @property
    def due(self) -> datetime:
        """The due time. Lateness and `expires` count from it.

        `expected_time` is later while the task is deferred until a worker can run it.
        """
        return self.due_time or self.expected_time

    @property
    def body(self) -> Any:
        """The decoded body.

        Raises
        ------
        BodyEncryptedError
            If no encryption key of this process decrypts the body.
        ValueError
            If another program stored a body that is not JSON.
        """
        return decoded(self.body_json, f"the body of task {self.id}")

    def complete(self, session: Any = None, *, result: Any = None) -> None:
        """Make the task DONE in a transaction of its processor, which must commit it.

        The status and the processor's own changes are then committed together or not at all.

        Parameters
        ----------
        session
            A SQLAlchemy Session or Connection. With Django, the current connection by default.
        result
            A JSON value to store, as in `Done`.

        Raises
        ------
        NotRunningError
            If the call is not made by the processor of this task.
        LeaseLostError
            If the worker has lost the task's lease. The transaction must be rolled back.

        Examples
        --------
        >>> with Session.begin() as session:
        ...     session.add(Payment(order=task.body["order"]))
        ...     task.complete(session)
        """
        self._run("complete").complete(self.id, session, result)

    def check_lease(self) -> None:
        """Check, in a long run of the processor, that this worker still has the task's lease.

        The check sends no query. It compares the times of the worker's renewals.

        Raises
        ------
        LeaseLostError
            If the lease could not be renewed, and is about to end or has ended. The task will run
            on another worker, so the processor must not catch the error.
        NotRunningError
            If the call is not made by the processor of this task.

        Examples
        --------
        >>> for page in pages:
        ...     task.check_lease()
        ...     export(page)
        """
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
        """The task's own retry schedule, which replaces the one of its tag; None without one."""
        retry_delays = self._headers().get("retry")
        try:
            return (
                None
                if retry_delays is None
                else RetrySchedule(retry_delays["retry_delays_s"], jitter=retry_delays["jitter"])
            )
        except (ValueError, TypeError, KeyError):  # written by another program
            return None

    @property
    def expires_s(self) -> float | None:
        """The lateness in seconds after which the task is CANCELLED instead of run."""
        return self._seconds("expires_s")

    @property
    def max_wait_s(self) -> float | None:
        """The longest time in seconds for which replacements may postpone the task."""
        return self._seconds("max_wait_s")

    @property
    def result(self) -> Any:
        """The result of the processor, if it was registered with `keep_result=True`."""
        return (
            None
            if self.result_json is None
            else decoded(self.result_json, f"the result of task {self.id}")
        )

    def _seconds(self, header: str) -> float | None:
        seconds: Any = self._headers().get(header)
        # Other programs may write any value, also an integer that no float can represent.
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
            return str(self.ip)  # written by another program

    def as_json(self) -> dict[str, Any]:
        """Return a JSON value. Ids are strings, since JavaScript rounds integers above 2^53."""
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


def id_of(name: object) -> int:
    """Return the id of a task that was given as a task or as an id."""
    return name.id if isinstance(name, DelayTask) else check_id(name)


def _iso(instant: datetime | None) -> str | None:
    return None if instant is None else instant.isoformat()


def _shown(text: str | None) -> Any:
    """Return the decoded value if JSON can represent it, else the text.

    Python also decodes NaN, 1e400 and values of any depth.
    """
    if text is not None and is_encrypted(text):
        return placeholder(text)
    value = _lenient(text or "null")
    return value if _is_json(value, MAX_DEPTH) else text


def _is_json(value: Any, depth: int) -> bool:
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_json(item, depth - 1) for item in inner)
    return not isinstance(value, float) or math.isfinite(value)


def _lenient(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
