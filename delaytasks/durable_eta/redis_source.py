"""Messages that wait in Redis: in the lists of a queue, and delivered to workers.

kombu has a list for each priority of a queue. A message that a worker has received is in the hash
`unacked` until the worker acknowledges it. Each message has a `delivery_tag` of its own, so its
text names it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import redis

from delaytasks.durable_eta.stored_message import StoredMessage
from delaytasks.durable_eta.waiting_message import FoundMessage


def _client_of(channel: Any) -> Any:
    """Return a client that adds no prefix to keys, because kombu's knows some commands only."""
    return redis.Redis(connection_pool=channel.pool)


class RedisList:
    """The messages of a queue with one priority.

    Workers take the last element of the list, and producers add to its beginning. So the messages
    are read from the end.
    """

    def __init__(self, channel: Any, queue: str, priority: int, batch_size: int) -> None:
        self._queue = queue
        self._client = _client_of(channel)
        self._key = channel.global_keyprefix + channel._q_for_pri(queue, priority)
        self._batch_size = batch_size
        #: The messages at the end that were read and stay.
        self._kept = 0

    def count(self) -> int:
        return int(self._client.llen(self._key))

    def batch(self) -> Sequence[FoundMessage]:
        kept = self._kept
        texts = self._client.lrange(self._key, -(kept + self._batch_size), -(kept + 1))
        self._kept += len(texts)
        return [FoundMessage(read_text(text), self._queue, text) for text in reversed(texts)]

    def remove(self, found: Sequence[FoundMessage]) -> int:
        with self._client.pipeline() as pipe:
            for each in found:
                pipe.lrem(self._key, -1, each.handle)
            removed = sum(pipe.execute())
        self._kept -= removed
        return int(removed)

    def close(self) -> None: ...


class RedisUnacked:
    """The messages of some queues that workers have received and not acknowledged."""

    def __init__(self, channel: Any, queues: Collection[str], batch_size: int) -> None:
        self._channel = channel
        self._client = _client_of(channel)
        self._key = channel.global_keyprefix + channel.unacked_key
        self._queues = queues
        self._batch_size = batch_size
        self._pages = self._read_pages()

    def count(self) -> int:
        return int(self._client.hlen(self._key))

    def batch(self) -> Sequence[FoundMessage]:
        return next(self._pages, ())

    def remove(self, found: Sequence[FoundMessage]) -> int:
        with self._channel.qos.pipe_or_acquire() as pipe:
            for each in found:
                self._channel.qos._remove_from_indices(each.handle, pipe)
            # Two answers for each message: of the index, and of the hash.
            return sum(pipe.execute()[1::2])

    def close(self) -> None: ...

    def _read_pages(self) -> Iterator[Sequence[FoundMessage]]:
        cursor = None
        while cursor != 0:
            cursor, page = self._client.hscan(self._key, cursor or 0, count=self._batch_size)
            each = (self._found(tag, text) for tag, text in page.items())
            if found := [message for message in each if message is not None]:
                yield found

    def _found(self, tag: bytes, text: bytes) -> FoundMessage | None:
        """Return the message if kombu would restore it to one of the queues."""
        try:
            raw, exchange, routing_key = json.loads(text)
            queues = self._channel._lookup(exchange, routing_key)
            queue = next(name for name in queues if name in self._queues)
        except (ValueError, TypeError, RecursionError, StopIteration):
            return None
        return FoundMessage(_of_virtual(raw), queue, tag)


def read_text(text: str | bytes) -> StoredMessage | None:
    """Return the message of an element of a list, or None if kombu did not write it."""
    try:
        return _of_virtual(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _of_virtual(raw: Any) -> StoredMessage | None:
    try:
        return StoredMessage.of_virtual(raw)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
