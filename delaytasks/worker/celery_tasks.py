"""The two Celery tasks. Their messages never reach Celery's own task machinery: a strategy takes them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery import Task

from delaytasks.core.interfaces import by_shard
from delaytasks.timers.eta import RUN, read_message

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks

SWEEP = "delaytasks.sweep"
#: Whatever the app's own configuration says: the row is the truth, so the message needs no care.
_OURS = {
    "shared": False,  # or every other Celery app of the process would have it, working for this instance
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


class Carrier(Task):
    """Monitors hear of rows, not of what carries them: with `task_send_sent_event` in the app's configuration beat's
    sweeps would fill their lists. Nor are our messages compressed when `task_compression` says so: workers refuse to
    decompress what anybody may have sent."""

    def apply_async(self, *args: Any, producer: Any = None, **options: Any) -> Any:
        with self.app.producer_or_acquire(producer) as sender:
            options |= {"event_dispatcher": _Silence, "producer": _Uncompressed(sender)}
            options["serializer"] = "json"
            if queue := options.get("queue"):
                # A route or an annotation of the app may name another exchange and key.
                options |= {"exchange": "", "routing_key": getattr(queue, "name", queue)}
            return super().apply_async(*args, **options)


class _Uncompressed:
    """A producer that does as it is told, except that it compresses nothing."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, *args: Any, **options: Any) -> Any:
        return self._producer.publish(*args, **{**options, "compression": ""})


class _Silence:
    @staticmethod
    def publish(*args: Any, **options: Any) -> None: ...


def register_tasks(delays: DelayTasks) -> None:
    """Puts our tasks on the instance's Celery app. Called without a worker (task_always_eager), they do their
    work on the spot."""

    def run(entries: list[Any], options: Any = None) -> None:
        args = [entries] if options is None else [entries, options]
        queue, shards = delays.settings.default_queue, delays.shards
        asked = read_message(args, queue)
        for number, some in by_shard(asked.entries, len(shards)).items():
            delays.runner(number).run(some)
        if asked.priorities and asked.shard < len(shards):
            delays.runner(asked.shard).drain(queue, asked.priorities, delays.settings.chunk_max)

    def sweep(house: int | None = None) -> None:
        for number in range(delays.settings.houses) if house is None else [house]:
            for shard in delays.shards:
                shard.sweeper.sweep(number)

    _register(delays, run, RUN, "delaytasks.worker.message_strategy:run_strategy")
    _register(delays, sweep, SWEEP, "delaytasks.worker.message_strategy:sweep_strategy")


def _register(delays: DelayTasks, function: Callable[..., None], name: str, strategy: str) -> None:
    task = delays.celery.task(function, name=name, base=Carrier, **_OURS)
    task.Strategy = strategy
    task.delays = delays
