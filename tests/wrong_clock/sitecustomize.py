"""Makes Python sleep by `select`, as it did before 3.11, in processes under libfaketime.

There, clock_nanosleep fails for the monotonic clock.
"""

import select
import time
from typing import Any


def sleep(seconds: Any) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], float(seconds))


time.sleep = sleep
