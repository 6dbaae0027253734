"""Keeps a worker running if Redis refuses a command of kombu, which would end a Celery worker.

Reasons are a key of another type, a missing permission, full memory, and a server that is a
replica. The worker runs its tasks from the table, and tries again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty
from typing import Any

from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import ResponseError

from delaytasks.core.clock import monotonic
from delaytasks.timers.broker_link import WRONG_TYPE
from delaytasks.worker.celery_compat.broker_errors import is_broker_error
from delaytasks.worker.celery_compat.read_ahead import ReadAhead
from delaytasks.worker.celery_compat.redis_acknowledgements import guard_acknowledgements
from delaytasks.worker.celery_compat.versions import brpop_s
from delaytasks.worker.refused_messages import MAX_MESSAGE_BYTES

#: A key that Redis refused is not read for this time.
BLOCKED_KEY_REST_S = 2.0
#: A longer message of a queue of delaytasks is not decoded. Its body is base64, and its headers are
#: short.
MAX_RAW_BYTES = 2 * MAX_MESSAGE_BYTES
WRONG_TYPE_REMEDY = "delete or rename this key, which does not contain what Celery keeps there"
REFUSED_REMEDY = (
    "check that the broker's user may read and write this key, that Redis has memory, and that it "
    "is a primary"
)
UNTIL_REPAIRED = "; until then workers run what is due from the table"


class RedisGuard:
    """Guards the channels of one connection of a worker's consumer, in the consumer's thread."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer
        #: The keys that are not read now, each with its queue, by channel.
        self._blocked: dict[Any, dict[str, str]] = {}
        #: When reading began again, by key that was blocked.
        self._retried: dict[str, float] = {}
        self._asked_at = 0.0
        #: Redis has this before each key (`global_keyprefix`).
        self._prefix = ""

    def guard(self, channel: Any) -> None:
        """Replace the functions with which kombu reads this channel.

        `BRPOP` reads queues, and `LISTEN` reads broadcasts. Several broadcasts may arrive together.
        After one that fails, the rest is read immediately, since kombu reads again only when the
        next one arrives.
        """

        def has_more() -> bool:
            connection = channel.subclient.connection
            return connection is not None and bool(connection.can_read(timeout=0))

        self._prefix = channel.global_keyprefix
        namespace = self._runtime.settings.namespace
        ahead = ReadAhead(channel, f"{namespace}.", partial(self._deliver, channel))
        handlers = channel.handlers
        handlers["BRPOP"] = partial(self._read_queues, channel, ahead, handlers["BRPOP"])
        handlers["LISTEN"] = partial(self.read, handlers["LISTEN"], has_more)
        channel._brpop_start = partial(self._ask, channel, ahead, channel._brpop_start)
        client = channel.client
        client.parse_response = partial(self._parse, channel, ahead, client.parse_response)
        # A worker needs neither: only producers that use an exchange read bindings, and Celery
        # ignores the length that a declaration returns.
        channel._queue_bind = partial(
            self._attempt, f"{self._prefix}_kombu.binding.*", channel._queue_bind
        )
        channel._size = partial(self._attempt, "", channel._size, fallback=0)
        guard_acknowledgements(channel, self._prefix, self._attempt)

    # -- messages ---------------------------------------------------------------------------------

    def _parse(
        self,
        channel: Any,
        ahead: ReadAhead,
        parse: Callable[..., Any],
        connection: Any,
        command: str,
        **options: Any,
    ) -> Any:
        """Refuse a message that is too long for a queue of delaytasks before it is decoded."""
        if command == "BRPOP":
            ahead.read()  # a channel that closes reads its last BRPOP without the handler
        answer = parse(connection, command, **options)
        if command != "BRPOP" or not answer:
            return answer
        queue = bytes_to_str(answer[0]).rsplit(channel.sep, 1)[0]
        return None if self._is_too_long(queue, answer[1]) else answer

    def _is_too_long(self, queue: str, message: bytes) -> bool:
        is_ours = queue.startswith(self._runtime.settings.namespace + ".")
        if not is_ours or len(message) <= MAX_RAW_BYTES:
            return False
        error = ValueError(f"{len(message)} bytes are too long")
        self._runtime.refused_messages.refuse("message", error)
        return True

    def _deliver(self, channel: Any, queue: str, message: bytes) -> None:
        """Deliver a message as kombu does."""
        if not self._is_too_long(queue, message):
            deliver = channel.connection._deliver
            self.read(lambda: deliver(loads(bytes_to_str(message)), queue), lambda: False)

    def read(
        self, read: Callable[..., Any], has_more: Callable[[], bool], *args: Any, **options: Any
    ) -> Any:
        """Refuse a message that cannot be read. Redis has already removed it from its list."""
        passed_on = self._consumer.connection_errors + self._consumer.channel_errors
        while True:
            try:
                return read(*args, **options)
            except Empty:
                if not has_more():
                    raise
            except ResponseError as error:
                self._report("", error)
                return None
            except Exception as error:
                if is_broker_error(error, passed_on):
                    raise
                self._runtime.refused_messages.refuse("message", error)
                if not has_more():
                    return None

    def _read_queues(
        self, channel: Any, ahead: ReadAhead, read: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        if ahead.read():
            return None

        def read_or_block(*args: Any, **options: Any) -> Any:
            try:
                return read(*args, **options)
            except ResponseError as error:
                self._block(channel, error)
                return None

        try:
            return self.read(read_or_block, lambda: False, *args, **options)
        finally:
            for key, since in list(self._retried.items()):
                if self._asked_at > since and key not in self._blocked.get(channel, ()):
                    del self._retried[key]
                    self._runtime.events.emit("queue.unblocked", key=self._prefix + key)

    # -- queues -----------------------------------------------------------------------------------

    def _ask(
        self,
        channel: Any,
        ahead: ReadAhead,
        start: Callable[..., None],
        timeout: float | None = None,
    ) -> None:
        """Ask for the next message as kombu does, but leave out the keys that are blocked."""
        self._asked_at = monotonic()
        blocked = self._blocked.get(channel)
        ahead.ask(() if blocked else channel.active_queues)
        if not blocked:
            # Before kombu 5.6 a timeout of None would wait forever.
            start() if timeout is None else start(timeout)
            return
        queues = channel._queue_cycle.consume(len(channel.active_queues))
        keys = [
            channel._q_for_pri(queue, step) for step in channel.priority_steps for queue in queues
        ]
        keys = [key for key in keys if key not in blocked]
        if keys:
            command = ["BRPOP", *keys, timeout or brpop_s(channel)]
            if channel.global_keyprefix:
                command = channel.client._prefix_args(command)
            channel._in_poll = channel.client.connection
            channel._brpop_sent_at = self._asked_at
            channel.client.connection.send_command(*command)

    def _block(self, channel: Any, error: ResponseError) -> None:
        """Find the keys that made Redis refuse the command, and leave them out of the next
        commands.

        If Redis refuses no key by itself, all of them are left out.
        """
        keys = self._keys(channel)
        wrong = self._wrong(channel, keys)
        if not wrong:
            wrong = dict.fromkeys(keys, str(error))
            # A former primary answers as a replica, and its address may lead to another server now.
            channel.client.connection.disconnect()
        if not self._blocked.get(channel):
            self._schedule_retry(channel)
        self._blocked.setdefault(channel, {}).update({key: keys[key] for key in wrong})
        for key, reason in wrong.items():
            self._retried.pop(key, None)
            self._report_blocked(key, keys[key], reason)

    def _retry(self, channel: Any) -> None:
        blocked = self._blocked.pop(channel, {})
        if channel.closed or channel.connection is None:
            return  # the consumer has another connection now
        try:
            wrong = self._wrong(channel, blocked)
        except self._consumer.connection_errors:
            wrong = {}  # reading has this error too
        for key, queue in blocked.items():
            if key in wrong:
                self._blocked.setdefault(channel, {})[key] = queue
                self._report_blocked(key, queue, wrong[key])
            else:
                self._retried[key] = monotonic()
        if wrong:
            self._schedule_retry(channel)

    def _schedule_retry(self, channel: Any) -> None:
        self._consumer.timer.call_after(BLOCKED_KEY_REST_S, self._retry, (channel,))

    @staticmethod
    def _keys(channel: Any) -> dict[str, str]:
        """Return each key that is read, with its queue. A queue has one list for each priority."""
        return {
            channel._q_for_pri(queue, step): queue
            for step in channel.priority_steps
            for queue in channel.active_queues
        }

    @staticmethod
    def _wrong(channel: Any, keys: Iterable[str]) -> dict[str, str]:
        """Return the keys that Redis refuses to read as lists, each with its error."""
        keys = list(keys)
        with channel.conn_or_acquire() as client, client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.llen(key)
            answers = pipe.execute(raise_on_error=False)
        pairs = zip(keys, answers, strict=True)
        return {key: str(answer) for key, answer in pairs if isinstance(answer, ResponseError)}

    # -- refused commands -------------------------------------------------------------------------

    def _attempt(
        self,
        key: str,
        work: Callable[..., Any],
        *args: Any,
        fallback: Any = None,
        instead: Callable[[], Any] | None = None,
        **options: Any,
    ) -> Any:
        try:
            return work(*args, **options)
        except ResponseError as error:
            self._report(key, error)
            return fallback if instead is None else instead()

    # -- events -----------------------------------------------------------------------------------

    @property
    def _runtime(self) -> Any:
        return self._consumer.controller.delays_runtime

    def _report(self, key: str, error: object) -> None:
        remedy = (
            WRONG_TYPE_REMEDY if WRONG_TYPE in str(error) else REFUSED_REMEDY
        ) + UNTIL_REPAIRED
        self._runtime.events.emit("queue.blocked", key=key, error=str(error), remedy=remedy)

    def _report_blocked(self, key: str, queue: str, reason: str) -> None:
        self._report(self._prefix + key, reason)
        runtime = self._runtime
        prefix = runtime.settings.namespace + "."
        if key == queue and queue.startswith(prefix):
            # Drain messages would stay there unread. A sweep that cannot send them drains the queue
            # in its own worker.
            runtime.publisher.rest(queue.removeprefix(prefix), 2 * BLOCKED_KEY_REST_S)
