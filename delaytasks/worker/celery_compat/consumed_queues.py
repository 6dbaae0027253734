"""The queues that Celery's worker consumes."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from delaytasks.core.inputs import is_queue
from delaytasks.core.task import DEFAULT_QUEUE

if TYPE_CHECKING:
    from delaytasks.timers.publisher import Publisher


def add_queues(app: Any, names: Collection[str], publisher: Publisher) -> Collection[str]:
    """Add our queues to those that the app's worker consumes, and return all queues of the worker.

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
