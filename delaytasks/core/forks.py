"""Reset objects in forked children, which must not use sockets, locks and threads of the parent."""

from __future__ import annotations

import os
import weakref
from typing import Any

_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def reset_in_child(thing: Any) -> None:
    """Call `thing.after_fork()` in every child that is forked while `thing` exists."""
    _watched.add(thing)


def _reset_all() -> None:
    for thing in list(_watched):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
