"""The time limits that the connections to the broker and to the timer's Redis have in common."""

from __future__ import annotations

#: The limit for each step of connecting. A healthy server may be far away, and the process may be
#: busy with imports.
CONNECT_STEP_S = 2.0
#: A step that takes less than this part of its time limit is quick.
_QUICK_PART = 0.1


def is_quick(took_s: float, limit_s: float, steps: int = 1) -> bool:
    """Return whether `steps` steps were quick enough that callers may take the next ones
    themselves.

    Otherwise a thread takes them, so that callers wait no longer than `limit_s`.
    """
    return took_s < limit_s * _QUICK_PART * steps
