"""A deployment with the databases that BENCH_DATABASE_URLS lists, separated by blanks."""

from __future__ import annotations

import os

from benchmarks import ours

app, delays = ours.make("bench_growing", databases=os.environ["BENCH_DATABASE_URLS"].split())
delays.processor(ours.WORK)(ours.work)
