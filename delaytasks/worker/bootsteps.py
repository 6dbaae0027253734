"""The bootstep of Celery's worker, and the queues that a worker serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.utils.log import get_logger
from celery.worker import state

from delaytasks.core.inputs import is_queue
from delaytasks.core.task import DEFAULT_QUEUE
from delaytasks.core.text import one_line
from delaytasks.timers.eta import RUN
from delaytasks.wiring import wiring_of
from delaytasks.worker.building import build_runtime
from delaytasks.worker.celery_compat.broker_outage import bound_connections
from delaytasks.worker.celery_compat.inspect_rows import show_rows
from delaytasks.worker.celery_compat.versions import let_threads_wake
from delaytasks.worker.pool import freeze_loaded_objects
from delaytasks.worker.processes import logical_queues
from delaytasks.worker.time_limits import check_time_limits

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.timers.publisher import Publisher
    from delaytasks.worker.runtime import WorkerRuntime

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
        self._delays: DelayTasks = app.tasks[RUN].delays
        processes = wiring_of(self._delays).processes
        processes.serve(worker.hostname, worker.pool)
        queues = add_queues(
            app, wiring_of(self._delays).queues.all(), wiring_of(self._delays).publisher
        )
        processes.queues = logical_queues(queues, self._delays.settings.namespace)
        bound_connections(app)
        let_threads_wake(worker.hub)
        worker.delays_runtime = runtime = build_runtime(self._delays, worker)
        worker.wait_for_soft_shutdown = partial(
            shut_down_coldly, worker, worker.wait_for_soft_shutdown
        )
        show_rows()
        # Before the pool forks: its processes inherit the policies and need not read them again.
        runtime.events.attempt(
            "start",
            "policies",
            lambda: runtime.router.each(lambda shard: shard.policies.refresh()),
        )
        freeze_loaded_objects()
        return self

    def start(self, worker: Any) -> None:
        runtime: WorkerRuntime = worker.delays_runtime
        wiring_of(self._delays).checks.check_ready()
        queues = runtime.processes.queues
        check_time_limits(runtime.registry, wiring_of(self._delays).queues, queues, worker.pool)
        log_tags((processor.tag for processor in runtime.registry), queues)
        runtime.start()

    def stop(self, worker: Any) -> None:
        worker.delays_runtime.stop(is_warm=True)

    def terminate(self, worker: Any) -> None:
        worker.delays_runtime.stop()

    def info(self, worker: Any) -> dict[str, Any]:
        """Return what `celery inspect stats` shows."""
        return {"delaytasks": worker.delays_runtime.info()}


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


def shut_down_coldly(worker: Any, wait_for_soft_shutdown: Callable[[], None]) -> None:
    """Replace `worker.wait_for_soft_shutdown`, the signal handler that begins a cold shutdown.

    Celery gives running tasks the time of `worker_soft_shutdown_timeout` and then ends them. It
    does not know our chunks and would wait for them forever, so their processes are killed here.
    Other workers recover the rows.
    """
    runtime: WorkerRuntime = worker.delays_runtime
    conf = worker.app.conf
    # In a thread of its own, since this one may hold what `stop` waits for.
    Thread(target=runtime.stop, name="delaytasks-stop", daemon=True).start()
    seconds = conf.worker_soft_shutdown_timeout
    if state.active_requests or conf.worker_enable_soft_shutdown_on_idle:
        wait_for_soft_shutdown()
    elif seconds > 0 and runtime.dispatcher.is_at_work:
        logger.warning("delaytasks: soft shutdown, running tasks have %g seconds", seconds)
        time.sleep(seconds)
    for pid in runtime.dispatcher.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def add_queues(app: Any, names: Collection[str], publisher: Publisher) -> Collection[str]:
    """Add our queues to those that the app's worker consumes; return all of its queues.

    A worker that was started without -Q serves all our queues. Otherwise it serves those that -Q
    names, with our prefix or without it. Without the prefix it also serves Celery's queue of that
    name, which may be intended.
    """
    queues = app.amqp.queues
    chosen = queues._consume_from
    # On Redis, kombu stores each message that is not acknowledged yet. This costs two round trips,
    # and two fifths of the time to receive a message. Ours are acknowledged on receipt. On AMQP,
    # the messages in this worker's socket would be lost at every stop without acknowledgements.
    needs_no_acks = app.connection_for_read().transport.driver_type == "redis"
    # The app may declare queues of its own. Any other chosen name may be one that only calls name.
    declared = {app.conf.task_default_queue, *_names(app.conf.task_queues)}
    prefix = publisher.namespace + "."
    asked = {name.removeprefix(prefix) for name in chosen or () if name not in declared}
    for name in {DEFAULT_QUEUE, *names, *filter(is_queue, asked)}:
        queue = publisher.queue(name)
        if chosen is None or queue.name in chosen or name in chosen:
            queue.no_ack = needs_no_acks
            queues.select_add(queue)
    consumed: Collection[str] = queues.consume_from
    return consumed


def _names(task_queues: Any) -> set[str]:
    """Return the names of the queues in Celery's setting, which is a mapping or an iterable."""
    return {getattr(queue, "name", queue) for queue in task_queues or ()}
