"""A deployment with the database of BENCH_DATABASE_URL."""

from __future__ import annotations

import os

from benchmarks import ours

app, delays = ours.make("bench_growing", database=os.environ["BENCH_DATABASE_URL"])
delays.processor(ours.WORK)(ours.work)
