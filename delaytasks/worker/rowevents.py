"""Celery events for rows, so that Flower shows each row as a task of its own, named by its tag."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from delaytasks.core.task import DelayTask

#: Flower cuts longer arguments anyway.
REPR_LENGTH = 1000


class RowEvents:
    """A subscriber of `Events`. The events of a chunk travel together; the broker's absence harms nobody."""

    def __init__(self, app: Any, hostname: str) -> None:
        self._app = app
        self._hostname = hostname
        self._dispatcher: Any = None
        self.is_on = False

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        if not self.is_on:
            return
        if name == "chunk.claimed":
            for task in fields["tasks"]:
                self._receive(task)
        elif name == "task.started":
            self._send("task-started", fields["task"], timestamp=fields["began"].timestamp())
        elif name == "task.succeeded":
            self._finish("task-succeeded", fields["task"], fields["began"], fields["ended"], result="")
        elif name == "task.failed":
            task, began, ended, text = fields["failure"]
            error = repr(fields["error"])[:REPR_LENGTH]
            self._finish("task-failed", task, began, ended, exception=error, traceback=text)
        elif name == "chunk.settled":
            self.flush()

    def _receive(self, task: DelayTask) -> None:
        self._send(
            "task-received",
            task,
            name=task.tag,
            args=_shorten(task.body_json),
            kwargs=_describe(task),
            retries=task.attempts - 1,
            eta=task.expected_time.isoformat(),
            expires=None,
            root_id=str(task.id),
            parent_id=None,
        )

    def _finish(self, kind: str, task: DelayTask, began: datetime, ended: datetime, **more: Any) -> None:
        self._send(kind, task, runtime=(ended - began).total_seconds(), timestamp=ended.timestamp(), **more)

    def _send(self, kind: str, task: DelayTask, **fields: Any) -> None:
        try:
            if self._dispatcher is None:
                self._dispatcher = self._connect()
            self._dispatcher.send(kind, uuid=f"{task.id}-{task.attempts}", **fields)
        except Exception:
            self._dispatcher = None

    def flush(self) -> None:
        try:
            if self._dispatcher is not None:
                self._dispatcher.flush()
        except Exception:
            self._dispatcher = None

    def _connect(self) -> Any:
        connection = self._app.connection_for_write()
        connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0, timeout=1)
        return self._app.events.Dispatcher(
            connection, hostname=self._hostname, buffer_group=frozenset(["task"]), buffer_limit=100
        )


def _describe(task: DelayTask) -> str:
    key = "" if task.key is None else f", 'key': {task.key!r}"
    return f"{{'id': '{task.id}', 'attempt': {task.attempts}, 'queue': {task.queue!r}{key}}}"


def _shorten(text: str) -> str:
    return f"({text[:REPR_LENGTH]})" if len(text) <= REPR_LENGTH else f"({text[:REPR_LENGTH]}…)"
