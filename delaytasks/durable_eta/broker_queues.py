"""The queues of a Celery app in its broker: their messages and their consumers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from delaytasks.core.errors import ConfigError
from delaytasks.durable_eta.waiting_message import MessageSource

#: The seconds within which a worker answers. A worker whose main process is busy answers late.
ANSWER_S = 2.0


class QueueWorker(NamedTuple):
    """A worker that consumes some of the queues."""

    name: str
    queues: Sequence[str]
    #: The most messages that it keeps unacknowledged; None if that has no limit.
    prefetch_count: int | None


class BrokerQueues:
    """Queues of Redis or RabbitMQ.

    Parameters
    ----------
    app
        The Celery app.
    connection
        An open connection to its broker.
    names
        The queues, or none for all queues that the app knows.

    Raises
    ------
    ConfigError
        If the broker is of another kind.
    """

    def __init__(self, app: Any, connection: Any, names: Sequence[str]) -> None:
        self._app = app
        self._connection = connection
        kind = connection.transport.driver_type
        if kind not in ("amqp", "redis"):
            raise ConfigError(
                f"the broker {connection.as_uri()} is neither Redis nor RabbitMQ, from which "
                "messages can be adopted"
            )
        self._is_redis = kind == "redis"
        self.names = list(dict.fromkeys(names)) or self._of_app()
        #: The names without those that RabbitMQ does not have. Redis has no empty queues.
        self.present = [n for n in self.names if self._is_redis or self._state(n) is not None]

    def workers(self) -> list[QueueWorker]:
        """Return the workers that consume one of the queues and answer."""
        inspect = self._app.control.inspect(timeout=ANSWER_S)
        found = []
        for name, queues in (inspect.active_queues() or {}).items():
            shared = [queue["name"] for queue in queues if queue["name"] in self.names]
            if shared:
                stats = self._app.control.inspect([name], timeout=ANSWER_S).stats() or {}
                limit = stats.get(name, {}).get("prefetch_count")
                found.append(QueueWorker(name, shared, limit or None))
        return found

    def consumers(self) -> dict[str, int]:
        """Return the number of consumers of each queue that has some; RabbitMQ counts them."""
        if self._is_redis:
            return {}
        states = ((name, self._state(name)) for name in self.present)
        return {name: state.consumer_count for name, state in states if state.consumer_count}

    def sources(self, batch_size: int, has_unacked: bool) -> Iterator[MessageSource]:
        """Yield the places of the queues' messages.

        `has_unacked` says whether to include messages that workers have received and not
        acknowledged. RabbitMQ returns these to their queue when the worker stops.
        """
        if not self._is_redis:
            from delaytasks.durable_eta.amqp_source import AmqpQueue

            for name in self.present:
                yield AmqpQueue(self._connection, name, self._is_quorum(name), batch_size)
            return
        from delaytasks.durable_eta.redis_source import RedisList, RedisUnacked

        channel = self._connection.default_channel
        for name in self.names:
            if queue := self._app.amqp.queues.get(name):
                queue.exchange(channel).declare()  # its type says which queues a message is for
            for priority in channel.priority_steps:
                yield RedisList(channel, name, priority, batch_size)
        if has_unacked:
            yield RedisUnacked(channel, frozenset(self.names), batch_size)

    def _of_app(self) -> list[str]:
        """Return the queues that the app defines, and those to which its tasks are routed."""
        router, names = self._app.amqp.router, list(self._app.amqp.queues)
        for name, task in self._app.tasks.items():
            try:
                queue = router.route(dict(task._get_exec_options()), name).get("queue")
            except Exception as error:  # a router of the project, which may need arguments
                raise ConfigError(
                    f"the queue of the Celery task {name} is unknown, because its router raised "
                    f"{type(error).__name__}: {error}; name the queues with --queue"
                ) from error
            if queue is not None:
                names.append(queue.name)
        return list(dict.fromkeys(names))

    def _is_quorum(self, name: str) -> bool:
        """Return whether the app declares the queue as a quorum queue."""
        queue = self._app.amqp.queues.get(name)
        arguments = (queue.queue_arguments if queue is not None else None) or {}
        default = self._app.conf.task_default_queue_type
        return bool(arguments.get("x-queue-type", default) == "quorum")

    def _state(self, queue: str) -> Any:
        """Return RabbitMQ's numbers of messages and consumers, or None without the queue.

        RabbitMQ closes the channel if it does not have the queue.
        """
        channel = self._connection.channel()
        try:
            state = channel.queue_declare(queue, passive=True)
        except self._connection.channel_errors as error:
            if getattr(error, "code", None) != 404:
                raise
            return None
        channel.close()
        return state
