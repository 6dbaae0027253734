"""The steps of Celery's worker that start and stop delaytasks, and receive its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger

from delaytasks.broker.arming import read_message
from delaytasks.model.text import one_line
from delaytasks.run.time_limits import check_time_limits
from delaytasks.worker.broker_connection import bound_connections
from delaytasks.worker.celery_patches import (
    add_queues,
    end_chunks_on_cold_shutdown,
    let_threads_wake,
    obey_signals_without_output,
    pass_over_exited_processes,
    show_rows,
)
from delaytasks.worker.celery_tasks import processes_of
from delaytasks.worker.pool import freeze_loaded_objects
from delaytasks.worker.processes import logical_queues
from delaytasks.worker.worker_runtime import WorkerRuntime

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
        queues = add_queues(app, parts.queues.all(), parts.publisher)
        processes.queues = logical_queues(queues, parts.settings.namespace)
        bound_connections(app)
        let_threads_wake(worker.hub)
        obey_signals_without_output()
        worker.delays_runtime = runtime = WorkerRuntime(parts, processes, worker)
        end_chunks_on_cold_shutdown(worker)
        show_rows()
        # Before the pool forks: its processes inherit the policies and need not read them again.
        runtime.events.attempt("start", "policies", parts.policy_cache.refresh)
        freeze_loaded_objects()
        return self

    def start(self, worker: Any) -> None:
        runtime: WorkerRuntime = worker.delays_runtime
        parts = runtime.runtime
        parts.checks.check_ready()
        queues = runtime.processes.queues
        check_time_limits(runtime.registry, parts.queues, queues, worker.pool)
        log_tags((processor.tag for processor in runtime.registry), queues)
        warn_of_blocking_driver(worker.pool, runtime.store.database.url.drivername)
        pass_over_exited_processes(worker.pool)
        runtime.start()

    def stop(self, worker: Any) -> None:
        worker.delays_runtime.stop(is_warm=True)

    def terminate(self, worker: Any) -> None:
        worker.delays_runtime.stop()

    def info(self, worker: Any) -> dict[str, Any]:
        """Return what `celery inspect stats` shows."""
        return {"delaytasks": worker.delays_runtime.info()}


def warn_of_blocking_driver(celery_pool: Any, driver: str) -> None:
    """Warn if greenlets share a thread with psycopg2, which waits in C, where no greenlet runs."""
    if getattr(celery_pool, "is_green", False) and driver == "postgresql+psycopg2":
        logger.warning(
            "delaytasks: with psycopg2, each statement stops all greenlets of this worker until "
            "the database answers: begin delaytasks_database_url with postgresql+psycopg://"
        )


def log_tags(tags: Iterable[str], queues: Iterable[str]) -> None:
    """Log which tags this worker runs, since Celery's banner shows no tags."""
    tags = sorted(tags)
    more = f" and {len(tags) - MAX_LOGGED_NAMES} more" if len(tags) > MAX_LOGGED_NAMES else ""
    shown_tags = ", ".join(map(one_line, tags[:MAX_LOGGED_NAMES])) + more
    shown_queues = ", ".join(map(one_line, sorted(queues)[:MAX_LOGGED_NAMES]))
    if tags:
        logger.info(
            "delaytasks: %d tags have a processor here: %s; queues: %s",
            len(tags),
            shown_tags,
            shown_queues,
        )
    else:
        logger.warning(
            "delaytasks: no tag has a processor here, so that no task can run: name their modules "
            "in the setting `imports`; queues: %s",
            shown_queues,
        )


# -- Receives our messages, and refuses those of another form -------------------------------------

# Messages are acknowledged on receipt, since the database is the truth.


Handler = Callable[..., None]


def run_strategy(task: Any, app: Any, consumer: Any) -> Handler:
    """Return Celery's handler of messages with entries or drain messages."""
    runtime: WorkerRuntime = consumer.controller.delays_runtime
    prefix = runtime.settings.namespace + "."
    acknowledge = _acknowledger(app, consumer.connection_errors)

    def on_message(message: Any, body: Any, *_: Any, **__: Any) -> None:
        acknowledge(message)
        try:
            queue = ((message.delivery_info or {}).get("routing_key") or "").removeprefix(prefix)
            content = read_message(_arguments(message, body), queue)
            is_drain = content.priorities is not None
            is_expired = is_drain and _is_expired(message, runtime.clock.now())
            if is_drain and queue not in runtime.processes.queues:
                raise ValueError(f"a drain message for {queue!r:.100}, which is not served here")
        except Exception as error:  # untrusted input may cause any error
            runtime.events.refuse("run", error)
            return
        if content.entries:
            runtime.dispatcher.receive(content.entries)
        if content.priorities is not None and not is_expired:
            runtime.dispatcher.start_drain(queue, content.priorities)

    return on_message


def sweep_strategy(task: Any, app: Any, consumer: Any) -> Handler:
    """Return Celery's handler of beat's messages, which request a sweep."""
    runtime: WorkerRuntime = consumer.controller.delays_runtime
    acknowledge = _acknowledger(app, consumer.connection_errors)

    def on_message(message: Any, body: Any, *_: Any, **__: Any) -> None:
        acknowledge(message)
        try:
            args, settings = _arguments(message, body), runtime.settings
            sweep_partition = args[0] if args else None
            if sweep_partition is not None and not settings.has_sweep_partition(sweep_partition):
                count = settings.sweep_partitions
                raise ValueError(f"sweep partition {sweep_partition!r:.20} of {count}")
        except Exception as error:  # untrusted input may cause any error
            runtime.events.refuse("sweep", error)
            return
        runtime.service_watch.mark_beat()
        runtime.sweep_loop.request(sweep_partition)

    return on_message


def _acknowledger(app: Any, connection_errors: Any) -> Callable[[Any], None]:
    """Return a function that acknowledges a message, unless its queue is consumed without that."""
    unacknowledged = {name for name, queue in app.amqp.queues.items() if queue.no_ack}

    def acknowledge(message: Any) -> None:
        if (message.delivery_info or {}).get("routing_key") not in unacknowledged:
            message.ack_log_error(logger, connection_errors)

    return acknowledge


def _arguments(message: Any, body: Any) -> Any:
    payload = message.payload if body is None else body
    if isinstance(payload, dict):
        return payload["args"]  # protocol 1
    return payload[0]


def _is_expired(message: Any, now: datetime) -> bool:
    expires = message.headers.get("expires")
    return expires is not None and datetime.fromisoformat(expires) < now
