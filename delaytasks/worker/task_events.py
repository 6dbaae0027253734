"""Celery events for rows, so that Flower and other monitors show each row as a task.

The task has the name of the tag. The events look like those of a Celery worker, except that `clock`
and `utcoffset` are left out. A monitor then orders them by arrival, since the pool's processes have
no common logical clock, and uses their times unchanged.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from celery import states
from celery.events.event import get_exchange
from celery.utils.log import get_logger
from kombu.entity import Exchange

from delaytasks.broker.link import BrokerLink, Outgoing
from delaytasks.loops import Availability
from delaytasks.model.task import DelayedTask, Settlement
from delaytasks.model.text import shown, storable
from delaytasks.run.observers import Observer

logger = get_logger(__name__)
#: The longest representation of arguments, as in Celery.
LONGEST_REPR = 1024
#: The row has the whole traceback. Monitors keep everything that they receive in memory.
LONGEST_TRACEBACK = 16 * 1024
#: How many events one message contains.
EVENTS_PER_MESSAGE = 300
#: After a failure no event is sent or kept for this long. Tasks must not wait for the broker.
FAILED_SEND_PAUSE_S = 5.0
HIDDEN = "(hidden: delaytasks_event_bodies, delaytasks_encryption_keys)"
RECOVERED = "the worker's process died, or lost its lease, while this attempt ran"


def wants_task_events(consumer: Any) -> bool:
    """Return whether the worker sends task events now.

    The option -E switches them on, and remote control switches them on and off. Flower does so.
    """
    dispatcher = getattr(consumer, "event_dispatcher", None)
    return bool(
        dispatcher is not None
        and dispatcher.enabled
        and (not dispatcher.groups or "task" in dispatcher.groups)
    )


class TaskEvents(Observer):
    """Observes runs. The events of a chunk are sent together; a failure only loses them."""

    def __init__(self, app: Any, hostname: str, limit_s: float, shows_bodies: bool = True) -> None:
        self._app = app
        self._link = BrokerLink(app, limit_s, connect_step_s=limit_s)
        self._shows_bodies = shows_bodies
        self._who = {"hostname": hostname, "pid": os.getpid()}
        self._pending: deque[dict[str, Any]] = deque()
        self._sending = threading.Lock()
        # Celery itself logs the lost broker with a traceback, so the text is enough here.
        self._broker = Availability(
            lambda error: logger.warning("row events are not sent, tasks run on: %s", error),
            rest_s=FAILED_SEND_PAUSE_S,
        )

    # -- called by the runner ---------------------------------------------------------------------

    def started(self, task: DelayedTask, claimed: datetime, began: datetime) -> None:
        self._received(task, claimed)
        self._add("task-started", task, began)
        if task.lapses:
            self.flush()  # first, since the task may kill this process, too

    def ended(
        self, settlement: Settlement, took_s: float, error: BaseException | None = None
    ) -> None:
        task, ended = (
            settlement.task,
            (settlement.began or settlement.task.due) + timedelta(seconds=took_s),
        )
        state = settlement.ending.celery_state
        if state == states.SUCCESS:
            result = (settlement.result or "") if self._shows_bodies else HIDDEN
            self._add("task-succeeded", task, ended, runtime=took_s, result=result)
        elif state == states.REVOKED:
            self._revoked(settlement, ended, is_expired=False)
        else:
            kind = "task-failed" if state == states.FAILURE else "task-retried"
            why = settlement.error or f"until {settlement.expected_time}"
            traceback = why if error is not None else ""
            fields = _error_fields(why if error is None else shown(error, LONGEST_REPR), traceback)
            self._add(kind, task, ended, runtime=took_s, **fields)

    def not_called(self, settlement: Settlement, claimed: datetime) -> None:
        self._received(settlement.task, claimed)
        if settlement.move == "expire":
            self._revoked(settlement, claimed, is_expired=True)
        else:
            fields = _error_fields(settlement.error or "")
            self._add("task-retried", settlement.task, claimed, **fields)

    def _revoked(self, settlement: Settlement, at: datetime, is_expired: bool) -> None:
        # Celery has no `exception` in this event, but monitors show it.
        why = _error_fields(settlement.error or "")["exception"]
        self._add(
            "task-revoked",
            settlement.task,
            at,
            terminated=False,
            signum=None,
            expired=is_expired,
            exception=why,
        )

    def flush(self) -> None:
        """Send all events. If another thread is sending, it sends those of this thread, too."""
        while self._pending and self._sending.acquire(blocking=False):
            try:
                self._send(
                    [
                        self._pending.popleft()
                        for _ in range(min(len(self._pending), EVENTS_PER_MESSAGE))
                    ]
                )
            finally:
                self._sending.release()

    # -- events -----------------------------------------------------------------------------------

    def _received(self, task: DelayedTask, claimed: datetime) -> None:
        if task.lapses and task.runs > 1:
            before = replace(task, runs=task.runs - 1)
            self._add(
                "task-failed", before, claimed, **self._about(before), **_error_fields(RECOVERED)
            )
        if _may_have_run(task):
            # Only this event ends the state of an earlier run with the same number in monitors.
            self._add("task-retried", task, claimed, exception=None, traceback=None, retried=None)
        self._add(
            "task-received",
            task,
            claimed,
            retries=task.runs - 1,
            eta=task.due.isoformat(),
            routing_key=task.queue,
            root_id=f"{task.id}-1",
            parent_id=f"{task.id}-{task.runs - 1}" if task.runs > 1 else None,
            **self._about(task),
        )

    def _add(self, kind: str, task: DelayedTask, at: datetime, **fields: Any) -> None:
        # Each event has the name, so that a monitor that starts later shows and counts the tag.
        event = {
            "type": kind,
            "uuid": f"{task.id}-{task.runs}",
            "name": task.tag,
            "timestamp": at.timestamp(),
        }
        self._pending.append({**event, **self._who, **fields})

    def _about(self, task: DelayedTask) -> dict[str, str]:
        key = "" if task.key is None else f", 'key': {task.key!r}"
        body = task.body_json if self._shows_bodies else HIDDEN
        return {
            "args": body if len(body) <= LONGEST_REPR else body[:LONGEST_REPR] + "…",
            "kwargs": f"{{'id': '{task.id}', 'attempt': {task.runs}{key}}}",
        }

    # -- sending ----------------------------------------------------------------------------------

    def _send(self, events: list[dict[str, Any]]) -> None:
        if self._broker.is_resting:
            return
        options = {
            "exchange": self._exchange,
            "routing_key": "task.multi",
            "serializer": self._app.conf.event_serializer,
            "headers": {"hostname": self._who["hostname"]},
            "delivery_mode": 1,
        }
        [error] = self._link.publish([Outgoing(events, options, self._exchange)])
        if error is not None:
            self._broker.failed(str(error))
        else:
            self._broker.answered()

    @cached_property
    def _exchange(self) -> Exchange:
        connection, name = self._app.connection_for_write(), self._app.conf.event_exchange
        exchange: Exchange = get_exchange(connection, name=name)
        return exchange


def _error_fields(exception: str, traceback: str = "") -> dict[str, str | None]:
    """Return the fields of an error, as text on which no monitor's page fails."""
    return {
        "exception": storable(exception, 4 * LONGEST_REPR),
        "traceback": storable(traceback, LONGEST_TRACEBACK) or None,
    }


def _may_have_run(task: DelayedTask) -> bool:
    """Return whether an earlier run may have had the number of this attempt.

    An operator who runs a task again resets its attempts, and gives it a later due time than the
    one for which it was scheduled. A first attempt that was given back has the time of its next
    try.
    """
    if task.runs == 1 and task.due_time is not None:
        return True
    created = task.create_time
    return created is not None and task.due > created + timedelta(seconds=task.delay_s)
