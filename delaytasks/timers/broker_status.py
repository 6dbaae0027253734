"""Asks the broker whether it answers. A timer knows only about its own last message."""

from __future__ import annotations

from typing import Any

from kombu.entity import Queue

from delaytasks.timers.broker_link import bounded_connection, is_home_node_down


def broker_error(app: Any, queue: Queue, limit_s: float) -> str | None:
    """Return the error of the broker, or of the node that has the queue; None if both answer."""
    try:
        with bounded_connection(app, limit_s) as connection:
            return _lost_queue(queue, connection)
    except Exception as reason:  # each transport has its own errors, and all mean the same
        return f"{type(reason).__name__}: {reason}"


def _lost_queue(queue: Queue, connection: Any) -> str | None:
    """Return the broker's error if the node of the queue is down."""
    try:
        connection.default_channel.queue_declare(queue=queue.name, passive=True)
    except connection.channel_errors as reason:  # usually: the queue is not declared yet
        return f"{type(reason).__name__}: {reason}" if is_home_node_down(reason) else None
    return None
