"""The delaytasks side with each timer: default settings, and its own tables and queues."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery

from benchmarks.notes import note, run
from benchmarks.settings import (
    NAMESPACES,
    TABLE_PREFIX,
    broker_url,
    data_dir,
    database_url,
    metrics_port,
    redis_url,
)
from delaytasks import DelayTasks

TAG = "bench.note"
#: Works for a number of seconds, then records the time.
WORK = "bench.work"
#: Runs as long as its body says, and records 1 at its begin and -1 at its end.
SLOW = "bench.slow"
#: Kills its process.
ABORT = "bench.abort"


def make(
    name: str, timer: str = "eta", database: str = "", **settings: Any
) -> tuple[Celery, DelayTasks]:
    made = Celery(name, broker=broker_url(), set_as_current=False)
    # The same settings as in the project's celeryconfig.py. Only one Celery task uses the queue.
    made.conf.update(
        task_ignore_result=True,
        worker_prefetch_multiplier=4,
        broker_connection_retry_on_startup=True,
        task_default_queue="bench_idle",
    )
    if timer == "redis":
        settings |= {"timer": redis_url()}
    if timer == "direct":
        settings |= {"timer": timer}
    found = DelayTasks(
        made,
        database or database_url(),
        namespace=NAMESPACES[timer],
        table_prefix=TABLE_PREFIX,
        callback_allow="127.0.0.1",
        data_dir=data_dir(),
        metrics=metrics_port(),
        **settings,
    )
    return made, found


app, delays = make("bench")
redis_app, redis_delays = make("bench_redis", timer="redis")
direct_app, direct_delays = make("bench_direct", timer="direct")


@delays.processor(TAG)
@redis_delays.processor(TAG)
@direct_delays.processor(TAG)
def note_task(body: Any) -> None:
    run(body["due"])


@app.task(name="bench.durable", durable_eta=True)
def note_celery_task(due: float) -> None:
    run(due)


@delays.processor(WORK)
def work(body: Any) -> None:
    if body["seconds"]:
        time.sleep(body["seconds"])
    note(body["due"])


@delays.processor(ABORT)
def abort(body: Any) -> None:
    os.abort()
