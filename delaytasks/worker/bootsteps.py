"""The worker's bootstep, and the queues that a worker serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
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
from delaytasks.worker.celery_compat.broker_outage import bound_connections
from delaytasks.worker.celery_compat.inspect_rows import show_rows
from delaytasks.worker.celery_compat.versions import let_threads_wake
from delaytasks.worker.heap import keep_what_is_loaded
from delaytasks.worker.runtime import WorkerRuntime
from delaytasks.worker.time_limits import check_time_limits

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks


logger = get_logger(__name__)
#: Tags and queues in one line of the log.
MOST_TAGS = 50


class DelaysStep(bootsteps.StartStopStep):
    """Runs the desk while the worker runs: started after the pool has forked, stopped before it is joined."""

    label = "Delays"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        worker.delays_runtime = None

    def create(self, worker: Any) -> Any:
        delays: DelayTasks = worker.app.tasks[RUN].delays
        delays.processes.serve(worker.hostname, worker.pool)
        add_queues(worker.app, delays)
        bound_connections(worker.app)
        let_threads_wake(worker.hub)
        worker.delays_runtime = WorkerRuntime(delays, worker)
        worker.wait_for_soft_shutdown = partial(
            shut_down_coldly, worker, worker.wait_for_soft_shutdown
        )
        show_rows()
        # Before the pool forks: its processes have what is read here, and need not read it again.
        delays.events.attempt(
            "start", "policies", lambda: delays.routes.each(lambda shard: shard.policies.refresh())
        )
        keep_what_is_loaded()
        return self

    def start(self, worker: Any) -> None:
        delays: DelayTasks = worker.delays_runtime.delays
        delays.check_ready()
        check_time_limits(delays, worker.pool)
        tell_tags(delays)
        worker.delays_runtime.start()

    def stop(self, worker: Any) -> None:
        worker.delays_runtime.stop(is_warm=True)

    def terminate(self, worker: Any) -> None:
        worker.delays_runtime.stop()

    def info(self, worker: Any) -> dict[str, Any]:
        """For `celery inspect stats`."""
        return {"delaytasks": worker.delays_runtime.info()}


def tell_tags(delays: DelayTasks) -> None:
    """What this worker runs, since Celery's banner shows no tags."""
    tags = sorted(processor.tag for processor in delays.registry)
    more = f" and {len(tags) - MOST_TAGS} more" if len(tags) > MOST_TAGS else ""
    shown = ", ".join(map(one_line, tags[:MOST_TAGS])) + more
    queues = ", ".join(map(one_line, sorted(delays.processes.queues)[:MOST_TAGS]))
    if tags:
        logger.info(
            "delaytasks: %d tags have a processor here: %s; queues: %s", len(tags), shown, queues
        )
    else:
        logger.warning(
            "delaytasks: no tag has a processor here, so that no task can run: name their modules in the setting "
            "`imports`; queues: %s",
            queues,
        )


def shut_down_coldly(worker: Any, celerys_own: Callable[[], None]) -> None:
    """In place of `worker.wait_for_soft_shutdown`, which is how a cold shutdown begins, in a signal handler. Celery
    gives what runs the time that `worker_soft_shutdown_timeout` says and then ends it; but it does not know of our
    chunks, and would wait for them for ever. What they ran lapses."""
    runtime, conf = worker.delays_runtime, worker.app.conf
    # In a thread of its own: this one may be in the middle of what it waits for.
    Thread(target=runtime.stop, name="delaytasks-stop", daemon=True).start()
    seconds = conf.worker_soft_shutdown_timeout
    if state.active_requests or conf.worker_enable_soft_shutdown_on_idle:
        celerys_own()
    elif seconds > 0 and runtime.dispatcher.is_at_work:
        logger.warning("delaytasks: soft shutdown, what runs has %g seconds", seconds)
        time.sleep(seconds)
    for pid in runtime.dispatcher.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def add_queues(app: Any, delays: DelayTasks) -> None:
    """A worker started without -Q serves all our queues; one with -Q those that it names, with our prefix or without
    it. Without it Celery's own queue of that name is served as well, which we can not know to be unwanted."""
    queues = app.amqp.queues
    chosen = queues._consume_from
    # Redis: kombu writes down each message that is not acknowledged yet, two round trips and two fifths of what taking
    # in a message costs. Ours are acknowledged on receipt, and the row is the truth. Not so on AMQP, where what lies in
    # this worker's socket would be lost at every stop, instead of going to another worker.
    needs_no_acks = app.connection_for_read().transport.driver_type == "redis"
    # The app may declare queues of its own. Any other chosen name may be one that only calls name.
    declared = {app.conf.task_default_queue, *_names(app.conf.task_queues)}
    prefix = delays.settings.namespace + "."
    asked = {name.removeprefix(prefix) for name in chosen or () if name not in declared}
    for name in {DEFAULT_QUEUE, *delays.queues.all(), *filter(is_queue, asked)}:
        queue = delays.publisher.queue(name)
        if chosen is None or queue.name in chosen or name in chosen:
            queue.no_ack = needs_no_acks
            queues.select_add(queue)
    delays.processes.queues = delays.own_queues(queues.consume_from)


def _names(task_queues: Any) -> set[str]:
    """Return the names of the queues in Celery's setting, which is a mapping or an iterable."""
    return {getattr(queue, "name", queue) for queue in task_queues or ()}
