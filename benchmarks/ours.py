"""The delaytasks app: default settings, with the timer of BENCH_TIMER."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from benchmarks.bare import SETTINGS
from benchmarks.notes import broker_url, database_url, note, redis_url, run
from delaytasks import DelayTasks

NAMESPACE = "bench"
#: The queue of the app's own tasks; only durable Celery tasks use it.
QUEUE = "bench_celery"
TAG = "bench.note"
#: Works for a number of seconds, then records the time.
WORK = "bench.work"


def make(timer: str = "eta", **settings: Any) -> tuple[Celery, DelayTasks]:
    made = Celery(f"bench_{timer}", broker=broker_url(), set_as_current=False)
    made.conf.update(SETTINGS, task_default_queue=QUEUE)
    if timer != "eta":
        settings["timer"] = redis_url() if timer == "redis" else timer
    if folder := os.environ.get("BENCH_DATA_DIR"):
        # The folder in which the console finds its users.
        settings["data_dir"] = folder
    return made, DelayTasks(made, database_url(), namespace=NAMESPACE, **settings)


app, delays = make(os.environ.get("BENCH_TIMER", "eta"))


@delays.processor(TAG)
def note_task(body: Any) -> None:
    run(body["due"])


@app.task(name="bench.durable", durable_eta=True)
def note_celery_task(due: float) -> None:
    run(due)


@delays.processor(WORK)
def work(body: Any) -> None:
    time.sleep(body["seconds"])
    note(body["due"])
