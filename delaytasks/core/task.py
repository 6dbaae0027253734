"""A task as callers and processors read it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from delaytasks.core.body_versions import FIRST_VERSION, MAX_VERSION
from delaytasks.core.current_run import Current, current_run
from delaytasks.core.encryption import decoded
from delaytasks.core.errors import NotRunningError
from delaytasks.core.ids import check_id
from delaytasks.core.meta import decode_meta
from delaytasks.core.number_checks import is_integer
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.states import FINISHED, Status
from delaytasks.core.task_json import lenient, task_json

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
        A number that each move of the row increases.
    queue, priority
        The queue and the priority, 0 to 9.
    key
        The key, or None.
    delay_s
        The delay in seconds when the task was scheduled.
    attempts
        The number of runs that have started, except those that snoozed or gave the task back.
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
    meta_json
        The meta as it is stored. `meta` decodes it.
    cancel_request
        1 if the running task was asked to stop; else None.
    lease_until, worker, ip
        The end of the lease, the name of the worker and its IPv4 address as a number.
    error
        The traceback of the last failed attempt, or the reason of the status.
    result_json
        The result as it is stored. `result` decodes it.

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
    meta_json: str | None = None
    cancel_request: int | None = None
    update_time: datetime | None = None
    execution_time: datetime | None = None
    lease_until: datetime | None = None
    worker: str | None = None
    ip: int | None = None
    error: str | None = None
    result_json: str | None = None

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

    @property
    def meta(self) -> dict[str, str]:
        """The pairs of strings that the caller gave to the task, such as a tenant."""
        return decode_meta(self.meta_json)

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

    @property
    def is_cancelled(self) -> bool:
        """Whether the task is CANCELLED. In its processor: whether a caller asked it to stop.

        A long processor reads this, or calls `check_lease`, from time to time. Neither sends a
        query.
        """
        run = current_run.get()
        return self.status is Status.CANCELLED or (run is not None and run.is_cancelled(self.id))

    def check_lease(self) -> None:
        """Check, in a long run of the processor, that this worker still has the task's lease.

        The check sends no query. It compares the times of the worker's renewals.

        Raises
        ------
        TaskCancelledError
            If a caller has cancelled the task by `cancel(running=True)`. If the processor does not
            catch it, the task is CANCELLED.
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
        retry = self.headers.get("retry")
        if retry is None:
            return None
        try:
            return RetrySchedule(retry["retry_delays_s"], jitter=retry["jitter"])
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
    def body_version(self) -> int:
        """The version of the body; 1 if it was stored without a version."""
        version: Any = self.headers.get("body_version")
        return version if is_integer(version, FIRST_VERSION, MAX_VERSION) else FIRST_VERSION

    @property
    def result(self) -> Any:
        """The result of the processor, if it was registered with `keep_result=True`."""
        if self.result_json is None:
            return None
        return decoded(self.result_json, f"the result of task {self.id}")

    def _seconds(self, header: str) -> float | None:
        seconds: Any = self.headers.get(header)
        # Other programs may write any value, also an integer that no float can represent.
        return float(seconds) if type(seconds) in (int, float) and 0 <= seconds < 1e15 else None

    @property
    def headers(self) -> dict[str, Any]:
        """The decoded `headers_json`; empty if another program stored something else."""
        if self.headers_json is None:
            return {}
        headers = lenient(self.headers_json)
        return headers if isinstance(headers, dict) else {}

    @property
    def event_fields(self) -> dict[str, Any]:
        """The fields of each event about this task, and the task itself for subscribers."""
        fields: dict[str, Any] = {"id": self.id, "tag": self.tag, "task": self}
        if self.meta_json is not None:
            fields["meta"] = self.meta
        return fields

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
        return task_json(self)


def id_of(name: object) -> int:
    """Return the id of a task that was given as a task or as an id."""
    return name.id if isinstance(name, DelayTask) else check_id(name)
