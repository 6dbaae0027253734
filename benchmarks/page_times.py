"""The durations of pages that are read in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable


def page_times(
    names: Iterable[str], turns: int, read: Callable[[str], None], pause_s: float = 0
) -> dict[str, list[float]]:
    """Call `read` with each name in each turn, and return the milliseconds by name.

    One more turn comes first and is not measured, since it loads code. `pause_s` is the pause
    before each turn.
    """
    took: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):
        time.sleep(pause_s)
        for name, each in took.items():
            began = time.perf_counter()
            read(name)
            if turn:
                each.append((time.perf_counter() - began) * 1000)
    return took
