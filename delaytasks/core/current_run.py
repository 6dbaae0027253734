"""The current run, for `task.complete` and `task.check_lease`. A task itself is a plain value."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class Current(Protocol):
    def complete(self, id: int, session: Any, result: Any) -> None: ...
    def check_lease(self, id: int) -> None: ...
    def is_cancelled(self, id: int) -> bool: ...


current_run: ContextVar[Current | None] = ContextVar("delaytasks_run", default=None)
