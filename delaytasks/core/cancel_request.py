"""Requests to cancel a running task, as the column `cancel_request` has them."""

from __future__ import annotations

#: The processor can see the request, and stops by itself.
STOP = 1
#: A process of a prefork pool is interrupted as well.
INTERRUPT = 2


def request_of(running: bool, terminate: bool) -> int | None:
    """Return what `cancel(running=…, terminate=…)` asks a running task for."""
    if terminate:
        return INTERRUPT
    return STOP if running else None
