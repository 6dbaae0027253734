"""The bare Celery app for comparison, and a task with an eta."""

from __future__ import annotations

from celery import Celery

from benchmarks.notes import broker_url, run

#: The settings of the project's celeryconfig.py, for both apps.
SETTINGS = {
    "task_ignore_result": True,
    "worker_prefetch_multiplier": 4,
    "broker_connection_retry_on_startup": True,
}
QUEUE = "bench_bare"

app = Celery("bench_bare", broker=broker_url(), set_as_current=False)
app.conf.update(SETTINGS, task_default_queue=QUEUE)


@app.task(name="bench.note")
def note_task(due: float) -> None:
    run(due)
