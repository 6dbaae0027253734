"""Wait for conditions with a deadline, instead of sleeping for a guessed time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

from delaytasks.loops import within as within

T = TypeVar("T")
#: What a test waits for, or a function that returns it.
What = str | Callable[[], str]

#: The tolerance that a busy test machine adds to a bound of docs/guarantees.md.
SLACK_S = 3.0
#: A worker of the tests that receives this signal logs the stacks of its threads.
STACKS = signal.SIGUSR2
#: With DELAYTASKS_TEST_LONG=1, some faults last for minutes, as in production, instead of seconds.
IS_LONG = os.environ.get("DELAYTASKS_TEST_LONG", "") not in ("", "0")


def in_child(work: Callable[[], object], meanwhile: Callable[[], object] = bool) -> bool:
    """Call `work` in a forked child; return whether it ends in time, without an error or False."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # without the alarm, a child that hangs would block the test forever
        try:
            os._exit(work() is False)
        finally:
            os._exit(1)
    meanwhile()
    return os.waitpid(child, 0)[1] == 0


def wait_until(check: Callable[[], T], deadline_s: float, what: What, every_s: float = 0.01) -> T:
    """Return the value of `check` as soon as it is true.

    If it stays false until the deadline, raise `AssertionError` with `what` and the last value.
    """
    ends = time.monotonic() + deadline_s
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() > ends:
            named = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {deadline_s:g} s for {named}; the last was {answer!r}")
        time.sleep(every_s)
