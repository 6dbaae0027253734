"""A deployment with as many databases as BENCH_DATABASE_URLS names, separated by blanks."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks import ours
from benchmarks.notes import note

app, delays = ours.make("bench_growing", databases=os.environ["BENCH_DATABASE_URLS"].split())


@delays.processor(ours.WORK)
def work(body: Any) -> None:
    if body["seconds"]:
        time.sleep(body["seconds"])
    note(body["due"])
