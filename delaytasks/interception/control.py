"""Celery's remote control, which cancels the rows of tasks that are revoked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery.app.control import Control
from celery.utils.functional import maybe_list

from delaytasks.operations.revocations import Revocations


class RevokesRows:
    """Cancels waiting rows before workers are told to revoke the tasks."""

    app: Any

    @property
    def _revocations(self) -> Revocations:
        revocations: Revocations = self.app.delaytasks._runtime.revocations
        return revocations

    def broadcast(
        self, command: str, arguments: Mapping[str, Any] | None = None, *args: Any, **options: Any
    ) -> Any:
        given = {**options, **(arguments or {})}
        try:
            if command in ("revoke", "terminate"):
                self._revocations.revoke(maybe_list(given["task_id"]))
            elif command == "revoke_by_stamped_headers":
                self._revocations.revoke_by_stamped_headers(given["headers"])
        finally:
            # Also if the database is unavailable, since a worker may have the message already.
            replies = super().broadcast(command, arguments, *args, **options)  # type: ignore[misc]
        return replies


class DurableControl(RevokesRows, Control):  # type: ignore[misc]
    """The class of `app.control`."""
