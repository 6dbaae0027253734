"""The two Celery tasks. A strategy receives their messages in place of Celery's own machinery."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import Task

from delaytasks.core.interfaces import by_shard
from delaytasks.timers.eta import RUN, read_message

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks

SWEEP = "delaytasks.sweep"
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


def register_tasks(delays: DelayTasks) -> None:
    """Add our tasks to the instance's Celery app.

    If they are called without a worker (task_always_eager), they do their work within the call.
    """

    def run(entries: list[Any], options: Any = None) -> None:
        args = [entries] if options is None else [entries, options]
        queue, shards = delays.settings.default_queue, delays.shards
        content = read_message(args, queue)
        for number, some in by_shard(content.entries, len(shards)).items():
            delays.runner(number).run(some)
        if content.priorities and content.shard < len(shards):
            runner = delays.runner(content.shard)
            runner.drain(queue, content.priorities, delays.settings.chunk_max)

    def sweep(partition: int | None = None) -> None:
        every = range(delays.settings.sweep_partitions)
        for number in every if partition is None else [partition]:
            for shard in delays.shards:
                shard.sweeper.sweep(number)

    _register(delays, run, RUN, "delaytasks.worker.message_strategy:run_strategy")
    _register(delays, sweep, SWEEP, "delaytasks.worker.message_strategy:sweep_strategy")


def _register(delays: DelayTasks, function: Callable[..., None], name: str, strategy: str) -> None:
    task = delays._celery.task(function, name=name, base=CarrierTask, **_TASK_OPTIONS)
    task.Strategy = strategy
    task.delays = delays
