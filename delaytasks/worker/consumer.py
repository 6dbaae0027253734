"""The steps of Celery's worker that start and stop delaytasks, and receive its messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.utils.log import get_logger

from delaytasks.broker.arming import read_message
from delaytasks.model.inputs import is_queue
from delaytasks.model.task import DEFAULT_QUEUE
from delaytasks.model.text import one_line
from delaytasks.worker.patches import (
    bound_connections,
    end_chunks_on_cold_shutdown,
    let_calls_wake,
    pass_over_exited_processes,
)
from delaytasks.worker.pool import freeze_loaded_objects
from delaytasks.worker.processes import logical_queues, processes_of
from delaytasks.worker.worker_runtime import WorkerRuntime

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

logger = get_logger(__name__)
#: The first log line names at most this many tags and queues.
MAX_LOGGED_NAMES = 50


class DelaysStep(bootsteps.StartStopStep):
    """Runs the worker runtime. It starts after the pool has forked, and stops before the pool."""

    label = "Delays"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        worker.delays_runtime = None

    def create(self, worker: Any) -> Any:
        app = worker.app
        processes = processes_of(app)
        processes.serve(worker.hostname, worker.pool)
        parts = processes.runtime
        processes.queues = logical_queues(add_queues(parts), parts.settings.namespace)
        bound_connections(app)
        let_calls_wake(worker.hub)
        worker.delays_runtime = runtime = WorkerRuntime(parts, processes, worker)
        end_chunks_on_cold_shutdown(worker)
        # Before the pool forks: its processes inherit the policies and need not read them again.
        runtime.events.attempt("start", "policies", parts.policy_cache.refresh)
        freeze_loaded_objects()
        return self

    def start(self, worker: Any) -> None:
        runtime: WorkerRuntime = worker.delays_runtime
        runtime.check()
        log_tags([processor.tag for processor in runtime.registry], runtime.processes.queues)
        pass_over_exited_processes(worker.pool)
        runtime.start()

    def stop(self, worker: Any) -> None:
        worker.delays_runtime.stop(is_warm=True)

    def terminate(self, worker: Any) -> None:
        worker.delays_runtime.stop()

    def info(self, worker: Any) -> dict[str, Any]:
        """Return what `celery inspect stats` shows."""
        return {"delaytasks": worker.delays_runtime.info()}


def add_queues(runtime: Runtime) -> Collection[str]:
    """Add our queues to those that the app's worker consumes, and return all queues of the worker.

    A worker that was started without -Q serves all our queues. Otherwise it serves those that -Q
    names, with our prefix or without it. Without the prefix it also serves Celery's queue of that
    name, which may be intended.
    """
    app, publisher = runtime.celery, runtime.publisher
    queues = app.amqp.queues
    chosen = queues._consume_from
    # On Redis, kombu stores each message that is not acknowledged yet. This costs two round trips,
    # and two fifths of the time to receive a message. Ours are acknowledged on receipt. On AMQP,
    # the messages in this worker's socket would be lost at every stop without acknowledgements.
    needs_no_acks = app.connection_for_read().transport.driver_type == "redis"
    # The app may declare queues of its own. Any other chosen name may be one that only calls name.
    task_queues = app.conf.task_queues or ()  # a mapping or an iterable
    declared = {app.conf.task_default_queue, *(getattr(q, "name", q) for q in task_queues)}
    prefix = publisher.namespace + "."
    asked = {name.removeprefix(prefix) for name in chosen or () if name not in declared}
    for name in {DEFAULT_QUEUE, *runtime.queues.all(), *filter(is_queue, asked)}:
        queue = publisher.queue(name)
        if chosen is None or queue.name in chosen or name in chosen:
            queue.no_ack = needs_no_acks
            queues.select_add(queue)
    consumed: Collection[str] = queues.consume_from
    return consumed


def log_tags(tags: Collection[str], queues: Collection[str]) -> None:
    """Log which tags this worker runs, since Celery's banner shows no tags."""
    shown = [", ".join(map(one_line, sorted(names)[:MAX_LOGGED_NAMES])) for names in (tags, queues)]
    if tags:
        text = "delaytasks: %d tags have a processor here: %s; queues: %s"
        logger.info(text, len(tags), *shown)
    else:
        logger.warning(
            "delaytasks: no tag has a processor here, so that no task can run: name their modules "
            "in the setting `imports`; queues: %s",
            shown[1],
        )


# -- Receives our messages, and refuses those of another form -------------------------------------

# Messages are acknowledged on receipt, since the database is the truth.


Handler = Callable[..., None]
#: Checks a message, whose arguments it also gets, and returns what the message asks for.
Read = Callable[[WorkerRuntime, Any, Any], Callable[[], None]]


def run_strategy(task: Any, app: Any, consumer: Any) -> Handler:
    """Return Celery's handler of messages with entries or drain messages."""
    return _handler(app, consumer, "run", _read_run)


def sweep_strategy(task: Any, app: Any, consumer: Any) -> Handler:
    """Return Celery's handler of beat's messages, which request a sweep."""
    return _handler(app, consumer, "sweep", _read_sweep)


def _handler(app: Any, consumer: Any, kind: str, read: Read) -> Handler:
    runtime: WorkerRuntime = consumer.controller.delays_runtime
    without_acks = {name for name, queue in app.amqp.queues.items() if queue.no_ack}

    def on_message(message: Any, body: Any, *_: Any, **__: Any) -> None:
        if (message.delivery_info or {}).get("routing_key") not in without_acks:
            message.ack_log_error(logger, consumer.connection_errors)
        try:
            payload = message.payload if body is None else body
            # Protocol 1 of Celery has a mapping.
            args = payload["args"] if isinstance(payload, dict) else payload[0]
            act = read(runtime, message, args)
        except Exception as error:  # untrusted input may cause any error
            runtime.events.refuse(kind, error)
            return
        act()

    return on_message


def _read_run(runtime: WorkerRuntime, message: Any, args: Any) -> Callable[[], None]:
    key = (message.delivery_info or {}).get("routing_key") or ""
    queue = key.removeprefix(runtime.settings.namespace + ".")
    content = read_message(args, queue)
    priorities = content.priorities
    if priorities is not None:
        expires = message.headers.get("expires")
        if expires is not None and datetime.fromisoformat(expires) < runtime.clock.now():
            priorities = None
        if queue not in runtime.processes.queues:
            raise ValueError(f"a drain message for {queue!r:.100}, which is not served here")

    def act() -> None:
        if content.entries:
            runtime.dispatcher.receive(content.entries)
        if priorities is not None:
            runtime.dispatcher.start_drain(queue, priorities)

    return act


def _read_sweep(runtime: WorkerRuntime, message: Any, args: Any) -> Callable[[], None]:
    sweep_partition, settings = args[0] if args else None, runtime.settings
    if sweep_partition is not None and not settings.has_sweep_partition(sweep_partition):
        count = settings.sweep_partitions
        raise ValueError(f"sweep partition {sweep_partition!r:.20} of {count}")

    def act() -> None:
        runtime.service_watch.mark_beat()
        runtime.sweep_loop.request(sweep_partition)

    return act
