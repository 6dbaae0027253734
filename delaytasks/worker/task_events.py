"""Celery events for rows, so that Flower and other monitors show each row as a task of its own, named by its tag.

They look as a worker sends them, except that `clock` and `utcoffset` are left out: a monitor then orders them by
arrival, since the pool's processes have no common logical clock, and takes their times as they are.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery.events.event import get_exchange
from celery.utils.log import get_logger
from kombu.messaging import Producer

from delaytasks.core.availability import Availability
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown, storable
from delaytasks.timers.broker_link import bounded_connection

logger = get_logger(__name__)
#: As Celery cuts arguments.
LONGEST_REPR = 1024
#: The row has the whole traceback; monitors hold all that they get in memory.
LONGEST_TRACEBACK = 16 * 1024
#: Events in one message.
MOST_EVENTS = 300
#: After a failure nothing is sent, and nothing kept, for this long: tasks must not wait for a broker that is away.
REST_S = 5.0
HIDDEN = "(hidden: delaytasks_event_bodies, delaytasks_encryption_keys)"
LAPSED = "the worker's process died, or lost its lease, while this attempt ran"


def wants_row_events(consumer: Any) -> bool:
    """Whether the worker sends task events now: by -E, or switched on and off by remote control, as Flower does."""
    dispatcher = getattr(consumer, "event_dispatcher", None)
    return bool(
        dispatcher is not None
        and dispatcher.enabled
        and (not dispatcher.groups or "task" in dispatcher.groups)
    )


class TaskEvents:
    """A runner's `Watcher`. The events of a chunk travel together; a broker that is away harms nobody."""

    def __init__(self, app: Any, hostname: str, limit_s: float, shows_bodies: bool = True) -> None:
        self._app = app
        self._limit_s = limit_s
        self._shows_bodies = shows_bodies
        self._who = {"hostname": hostname, "pid": os.getpid()}
        self._pending: deque[dict[str, Any]] = deque()
        self._sending = threading.Lock()
        self._connection: Any = None
        self._producer: Any = None
        self._broker = Availability(
            lambda error: logger.warning("row events are not sent, tasks run on: %s", error),
            rest_s=REST_S,
        )

    # -- what the runner tells --------------------------------------------------------------------

    def started(self, task: DelayTask, claimed: datetime, began: datetime) -> None:
        self._received(task, claimed)
        self._add("task-started", task, began)
        if task.lapses:
            self.flush()  # it may kill this process too

    def ended(
        self, ending: Settlement, ended: datetime, error: BaseException | None = None
    ) -> None:
        task, runtime = ending.task, (ended - (ending.began or ended)).total_seconds()
        if ending.move == "succeed":
            result = (ending.result or "") if self._shows_bodies else HIDDEN
            self._add("task-succeeded", task, ended, runtime=runtime, result=result)
        elif ending.move == "withdraw":
            self._revoked(ending, ended, is_expired=False)
        else:
            kind = "task-failed" if ending.move == "fail" else "task-retried"
            why = ending.error or f"until {ending.due}"
            traceback = why if error is not None else ""
            said = _error(why if error is None else shown(error, LONGEST_REPR), traceback)
            self._add(kind, task, ended, runtime=runtime, **said)

    def expired(self, ending: Settlement, claimed: datetime) -> None:
        self._received(ending.task, claimed)
        self._revoked(ending, claimed, is_expired=True)

    def defer(self, task: DelayTask, claimed: datetime, why: str) -> None:
        self._received(task, claimed)
        self._add("task-retried", task, claimed, **_error(why))

    def gave_up(self, task: DelayTask) -> None:
        """The row failed without a process that could tell."""
        failed = task.update_time or task.expected_time
        self._add("task-failed", task, failed, **self._about(task), **_error(task.error or LAPSED))

    def _revoked(self, ending: Settlement, at: datetime, is_expired: bool) -> None:
        # `exception` is not Celery's here, and shown by monitors nonetheless.
        why = _error(ending.error or "")["exception"]
        self._add(
            "task-revoked",
            ending.task,
            at,
            terminated=False,
            signum=None,
            expired=is_expired,
            exception=why,
        )

    def flush(self) -> None:
        """Sends what has gathered. A thread that finds another one at it leaves its events to that one."""
        while self._pending and self._sending.acquire(blocking=False):
            try:
                self._send(
                    [self._pending.popleft() for _ in range(min(len(self._pending), MOST_EVENTS))]
                )
            finally:
                self._sending.release()

    # -- events -----------------------------------------------------------------------------------

    def _received(self, task: DelayTask, claimed: datetime) -> None:
        if task.lapses and task.attempts > 1:
            before = replace(task, attempts=task.attempts - 1)
            self._add("task-failed", before, claimed, **self._about(before), **_error(LAPSED))
        if task.version != 2 * task.attempts - 1:
            # More than claims and lapses happened to this row, and an operator's retry counts its attempts anew. Only
            # a retry takes a task out of the final state in which monitors keep it; `retried` itself is not shown.
            self._add("task-retried", task, claimed, exception=None, traceback=None, retried=None)
        self._add(
            "task-received",
            task,
            claimed,
            retries=task.attempts - 1,
            eta=task.due.isoformat(),
            routing_key=task.queue,
            root_id=f"{task.id}-1",
            parent_id=f"{task.id}-{task.attempts - 1}" if task.attempts > 1 else None,
            **self._about(task),
        )

    def _add(self, kind: str, task: DelayTask, at: datetime, **fields: Any) -> None:
        # The name is in each of them: a monitor that came after the first one shows, and counts, the tag as well.
        event = {
            "type": kind,
            "uuid": f"{task.id}-{task.attempts}",
            "name": task.tag,
            "timestamp": at.timestamp(),
        }
        self._pending.append({**event, **self._who, **fields})

    def _about(self, task: DelayTask) -> dict[str, str]:
        key = "" if task.key is None else f", 'key': {task.key!r}"
        body = task.body_json if self._shows_bodies else HIDDEN
        return {
            "args": body if len(body) <= LONGEST_REPR else body[:LONGEST_REPR] + "…",
            "kwargs": f"{{'id': '{task.id}', 'attempt': {task.attempts}{key}}}",
        }

    # -- sending ----------------------------------------------------------------------------------

    def _send(self, events: list[dict[str, Any]]) -> None:
        if self._broker.is_resting:
            return
        while True:
            is_new = self._producer is None
            try:
                if is_new:
                    self._connect()
                self._publish(events)
            except Exception as error:  # each transport has errors of its own
                self._close()
                if not is_new:
                    continue  # it may have died while it was idle: once more, on a new one
                self._broker.failed(f"{type(error).__name__}: {error}")
            else:
                self._broker.answered()
            return

    def _connect(self) -> None:
        self._connection = bounded_connection(self._app, self._limit_s)
        exchange = get_exchange(self._connection, name=self._app.conf.event_exchange)
        self._producer = Producer(self._connection.channel(), exchange, auto_declare=False)

    def _publish(self, events: list[dict[str, Any]]) -> None:
        self._producer.publish(
            events,
            routing_key="task.multi",
            serializer=self._app.conf.event_serializer,
            headers={"hostname": self._who["hostname"]},
            delivery_mode=1,
            declare=[self._producer.exchange],
            retry=False,
        )

    def _close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            try:
                connection.release()
            except Exception:
                pass  # it is broken: that is why it is closed


def _error(exception: str, traceback: str = "") -> dict[str, str | None]:
    """Texts that strangers made; a monitor's page must not fail on them."""
    return {
        "exception": storable(exception, 4 * LONGEST_REPR),
        "traceback": storable(traceback, LONGEST_TRACEBACK) or None,
    }
