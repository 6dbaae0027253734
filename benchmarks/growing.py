"""A deployment with as many databases as BENCH_DATABASE_URLS names, separated by blanks."""

from __future__ import annotations

import os

from benchmarks import ours

app, delays = ours.make("bench_growing", databases=os.environ["BENCH_DATABASE_URLS"].split())
delays.processor(ours.WORK)(ours.work)
