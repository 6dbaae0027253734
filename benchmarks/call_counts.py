"""Counts function calls, which do not depend on the load of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable


def count_calls(work: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, `work` calls in this thread."""
    count = 0

    def observe(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(observe)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
