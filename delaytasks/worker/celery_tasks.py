"""The two Celery tasks. A strategy receives their messages in place of Celery's own machinery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery import Task

from delaytasks.broker.arming import RUN, SWEEP, read_message

if TYPE_CHECKING:
    from delaytasks.worker.processes import Processes

#: These override the app's configuration. The row is the truth, so a message may get lost.
_TASK_OPTIONS = {
    "shared": False,  # or all Celery apps of the process would have a task of this instance
    "ignore_result": True,
    "acks_late": False,
    "serializer": "json",
    "send_events": False,
    "store_errors_even_if_ignored": False,
    "autoretry_for": (),
    "rate_limit": None,
    "time_limit": None,
    "soft_time_limit": None,
    "typing": False,
    "durable_eta": False,
}


class CarrierTask(Task):
    """Sends its messages without an event and without compression.

    Monitors show rows. With `task_send_sent_event` in the app's configuration they would list the
    sweeps of beat as well. `task_compression` has no effect either, since workers refuse to
    decompress untrusted input.
    """

    def apply_async(self, *args: Any, producer: Any = None, **options: Any) -> Any:
        with self.app.producer_or_acquire(producer) as sender:
            options |= {"event_dispatcher": _NoEvents, "producer": _Uncompressed(sender)}
            options["serializer"] = "json"
            if queue := options.get("queue"):
                # A route or an annotation of the app may name another exchange and key.
                options |= {"exchange": "", "routing_key": getattr(queue, "name", queue)}
            return super().apply_async(*args, **options)


class _Uncompressed:
    """A producer that compresses nothing."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, *args: Any, **options: Any) -> Any:
        return self._producer.publish(*args, **{**options, "compression": ""})


class _NoEvents:
    @staticmethod
    def publish(*args: Any, **options: Any) -> None: ...


def processes_of(celery_app: Any) -> Processes:
    """Return the processes that `register_tasks` was called with."""
    processes: Processes = celery_app.tasks[RUN].processes
    return processes


def register_tasks(celery_app: Any, processes: Processes) -> None:
    """Add our tasks to a Celery app.

    If they are called without a worker (task_always_eager), they do their work within the call.
    """

    def run(entries: list[Any], options: Any = None) -> None:
        args = [entries] if options is None else [entries, options]
        settings = processes.runtime.settings
        queue = settings.default_queue
        content = read_message(args, queue)
        if content.entries:
            processes.runner().run(content.entries)
        if content.priorities:
            processes.runner().run_due(queue, content.priorities, settings.chunk_max)

    def sweep(partition: int | None = None) -> None:
        every = range(processes.runtime.settings.sweep_partitions)
        for number in every if partition is None else [partition]:
            processes.runtime.sweeper.sweep(number)

    strategies = "delaytasks.worker.consumer"
    for function, name, strategy in (
        (run, RUN, f"{strategies}:run_strategy"),
        (sweep, SWEEP, f"{strategies}:sweep_strategy"),
    ):
        task = celery_app.task(function, name=name, base=CarrierTask, **_TASK_OPTIONS)
        task.Strategy, task.processes = strategy, processes
