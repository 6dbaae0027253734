"""The bootstep of Celery's worker, which runs the worker runtime."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger

from delaytasks.core.text import one_line
from delaytasks.worker.broker_connection import bound_connections
from delaytasks.worker.celery_patches import (
    add_queues,
    end_chunks_on_cold_shutdown,
    let_threads_wake,
    obey_signals_without_output,
    show_rows,
)
from delaytasks.worker.celery_tasks import processes_of
from delaytasks.worker.pool import freeze_loaded_objects
from delaytasks.worker.processes import logical_queues
from delaytasks.worker.time_limits import check_time_limits
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
        runtime.events.attempt(
            "start",
            "policies",
            parts.policy_cache.refresh,
        )
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
