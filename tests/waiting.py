"""Tests never sleep for a guess: they wait for a condition, with a deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: What a test machine that is busy with others adds to a bound of docs/reliability.md.
SLACK_S = 3.0
#: A worker of the tests that gets it writes to its log what each of its threads does.
STACKS = signal.SIGUSR2
#: With DELAYTASKS_TEST_LONG=1 some faults last as long as they do in bad days: minutes, where else seconds have to do.
IS_LONG = os.environ.get("DELAYTASKS_TEST_LONG", "") not in ("", "0")


def wait_until(
    condition: Callable[[], T],
    deadline_s: float,
    what: str | Callable[[], str],
    every_s: float = 0.01,
) -> T:
    """What `condition` answers as soon as it is true; `AssertionError` naming `what`, as it is then, when it stays
    false."""
    ends = time.monotonic() + deadline_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > ends:
            named = what if isinstance(what, str) else what()
            raise AssertionError(
                f"waited {deadline_s:g} s for {named}; the last answer was {answer!r}"
            )
        time.sleep(every_s)
