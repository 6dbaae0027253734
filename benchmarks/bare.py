"""The bare Celery app for comparison, and a task with an eta."""

from __future__ import annotations

from celery import Celery

from benchmarks.notes import run
from benchmarks.settings import BARE_QUEUE, broker_url

app = Celery("bench_bare", broker=broker_url(), set_as_current=False)
app.conf.update(
    task_ignore_result=True,
    worker_prefetch_multiplier=4,
    broker_connection_retry_on_startup=True,
    task_default_queue=BARE_QUEUE,
)


@app.task(name="bench.note")
def note_task(due: float) -> None:
    run(due)
