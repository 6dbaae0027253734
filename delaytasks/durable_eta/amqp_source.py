"""Messages that wait in a queue of RabbitMQ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delaytasks.durable_eta.stored_message import StoredMessage
from delaytasks.durable_eta.waiting_message import FoundMessage

#: Properties that `StoredMessage` has as fields of its own.
_OWN_FIELDS = ("application_headers", "content_type", "content_encoding")


class AmqpQueue:
    """Gets the messages of a queue one by one.

    RabbitMQ keeps each of them until it is acknowledged. If this process dies, the others return to
    their places in a classic queue, and to the beginning of a quorum queue in any order.

    Parameters
    ----------
    connection
        A connection to RabbitMQ.
    name
        The queue, which exists.
    is_quorum
        Whether the queue is a quorum queue.
    batch_size
        The number of messages in a batch.
    """

    def __init__(self, connection: Any, name: str, is_quorum: bool, batch_size: int) -> None:
        self._name = name
        self._channel = connection.channel()
        self._is_quorum = is_quorum
        self._batch_size = batch_size
        # Messages that arrive from now on are not read. Otherwise this might never end.
        self._unread = self.count()
        #: The delivery tags of messages that were not removed, in their order.
        self._held: dict[int, None] = {}

    def count(self) -> int:
        return int(self._channel.queue_declare(self._name, passive=True).message_count)

    def batch(self) -> Sequence[FoundMessage]:
        found: list[FoundMessage] = []
        while self._unread and len(found) < self._batch_size:
            raw = self._channel.basic_get(self._name)
            if raw is None:
                self._unread = 0
                break
            self._unread -= 1
            tag = raw.delivery_info["delivery_tag"]
            self._held[tag] = None
            found.append(FoundMessage(_stored(raw), self._name, tag))
        return found

    def remove(self, found: Sequence[FoundMessage]) -> int:
        for each in found:
            self._channel.basic_ack(each.handle)
            del self._held[each.handle]
        return len(found)

    def close(self) -> None:
        # Messages that a quorum queue takes back together change their order. A classic queue would
        # search the place of each single message, which takes minutes for 100,000 messages.
        for tag in self._held if self._is_quorum else ():
            self._channel.basic_reject(tag, requeue=True)
        self._channel.close()


def _stored(raw: Any) -> StoredMessage | None:
    properties = dict(raw.properties)
    headers, content_type, encoding = (properties.pop(name, None) for name in _OWN_FIELDS)
    try:
        return StoredMessage.of_delivery(
            raw.body, content_type, encoding, headers, properties, raw.delivery_info
        )
    except TypeError:
        return None
