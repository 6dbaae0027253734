"""In a Python process under libfaketime, whose clock_nanosleep fails for the monotonic clock: Python sleeps by
`select`, as it did before 3.11."""

import select
import time
from typing import Any


def sleep(seconds: Any) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], float(seconds))


time.sleep = sleep
