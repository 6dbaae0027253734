"""Prevents forks while a thread of this process uses SQLite.

SQLite records in the process which of its connections has which lock. A child that is forked in
the middle of a transaction inherits the record of a lock whose connection the child does not have,
and waits for it forever.
"""

from __future__ import annotations

import os
import threading
from typing import Any

#: A bound on the wait, since a thread that forks inside its own transaction would wait for itself.
MAX_WAIT_S = 5.0


class ForkGate:
    """Lets threads use connections while no thread forks, and lets a thread fork while no
    connection is used."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_forking = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self._after, after_in_child=self._in_child
            )

    def enter(self, *_: Any) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_forking, MAX_WAIT_S)
            self._inside += 1

    def leave(self, *_: Any) -> None:
        with self._changed:
            self._inside = max(self._inside - 1, 0)
            self._changed.notify_all()

    def _before(self) -> None:
        with self._changed:
            self._is_forking = True
            self._changed.wait_for(lambda: not self._inside, MAX_WAIT_S)

    def _after(self) -> None:
        with self._changed:
            self._is_forking = False
            self._changed.notify_all()

    def _in_child(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._is_forking = 0, False


gate = ForkGate()
