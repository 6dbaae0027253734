"""Handles messages of Celery's own queues although Redis refuses to record them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kombu.transport import virtual


def guard_acknowledgements(channel: Any, prefix: str, attempt_at: Callable[..., Any]) -> None:
    """Replace the functions with which kombu records the messages of this channel.

    kombu records each message in Redis until it is acknowledged. A message that is not recorded is
    lost if the worker is killed, since it has left its queue. `attempt_at` takes the names of the
    keys and the function to call.
    """
    qos = channel.qos
    if not hasattr(qos, "restore_by_tag"):
        return  # ack_emulation is off
    keys = [prefix + key for key in (channel.unacked_key, channel.unacked_index_key)]
    attempt = partial(attempt_at, ", ".join(keys))
    base = virtual.QoS
    append, ack, reject, by_tag = qos.append, qos.ack, qos.reject, qos.restore_by_tag

    def put_back(tag: Any, client: Any = None, leftmost: bool = False) -> None:
        message = qos._delivered.get(tag)
        if message is not None:
            info = message.delivery_info
            with channel.conn_or_acquire(client) as connected, connected.pipeline() as pipe:
                channel._do_restore_message(
                    message._raw, info["exchange"], info["routing_key"], pipe, leftmost
                )
                pipe.execute()

    qos.append = lambda message, tag: attempt(
        append, message, tag, instead=partial(base.append, qos, message, tag)
    )
    qos.ack = lambda tag: attempt(ack, tag, instead=partial(base.ack, qos, tag))
    qos.reject = lambda tag, requeue=False: attempt(
        reject, tag, requeue, instead=partial(base.ack, qos, tag)
    )
    qos.restore_by_tag = lambda tag, client=None, leftmost=False: attempt(
        by_tag, tag, client, leftmost, instead=partial(put_back, tag, client, leftmost)
    )
    qos.restore_visible = partial(attempt, qos.restore_visible)
