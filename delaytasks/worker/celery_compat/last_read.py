"""Ends the last request of a stopped worker to a broker on Redis."""

from __future__ import annotations

from typing import Any

from delaytasks.worker.celery_compat.versions import brpop_s

#: Redis answers a pending BRPOP at most this long after its timeout.
BRPOP_ANSWER_S = 1.0


def stop_reading(consumer: Any) -> None:
    """On Redis, wait for the answer to the last BRPOP of a consumer that has stopped.

    The answer may be a message, possibly one that this worker has just sent back. The wait takes
    about a second at most. kombu returns the message to its queue, which is no longer consumed.
    """
    connection = getattr(consumer, "connection", None)
    if connection is None or connection.transport.driver_type != "redis":
        return
    for channel in connection.transport.channels or ():
        client = vars(channel).get("client")
        if client is None or client.connection is None:
            continue
        try:
            timeout_s = brpop_s(channel) + BRPOP_ANSWER_S
            if channel._in_poll and client.connection.can_read(timeout_s):
                channel._brpop_read()
        except Exception:
            pass  # Redis is down, or had no message
        client.connection.disconnect()
        channel._in_poll = None  # or closing the channel would wait for an answer that cannot come
