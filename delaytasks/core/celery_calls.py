"""Calls of Celery tasks, and the app whose calls become rows in any case."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

_forced_app: ContextVar[Any] = ContextVar("delaytasks_forced_app", default=None)


class CeleryCall(NamedTuple):
    """The first parameters of a Celery app's `send_task`, in their order."""

    name: str
    args: Any = None
    kwargs: Any = None
    countdown: Any = None
    eta: Any = None
    task_id: str | None = None
    producer: Any = None
    connection: Any = None


@contextmanager
def forced(app: Any) -> Iterator[None]:
    """Let each call of a task of `app` inside the block become a row."""
    token = _forced_app.set(app)
    try:
        yield
    finally:
        _forced_app.reset(token)


def is_forced(app: Any) -> bool:
    return _forced_app.get() is app


def called_task(body: object) -> str | None:
    """Return the Celery task that a row of a recurring schedule calls when it is due.

    The result is None for the body of another row, which has a prepared message. The id of the
    called task is the id of the row.
    """
    if isinstance(body, Mapping) and isinstance(body.get("task"), str):
        return str(body["task"])
    return None
