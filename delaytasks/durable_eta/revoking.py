"""What Celery's worker does with a message that is revoked, done without a worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from celery.app.task import Context
from celery.utils.functional import maybe_list
from kombu import compression as kombu_compression
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.serialization import loads, prepare_accept_content

from delaytasks.durable_eta.stored_message import StoredMessage

logger = logging.getLogger("delaytasks")


def stamps_of(headers: Mapping[str, Any] | Iterable[str]) -> dict[str, list[Any]]:
    """Return the values of each stamp that `revoke_by_stamped_headers` was given.

    The command line gives a list such as `["tenant=acme"]`.
    """
    pairs = (
        headers.items()
        if isinstance(headers, Mapping)
        else (header.partition("=")[::2] for header in headers)
    )
    return {stamp: list(maybe_list(values)) for stamp, values in pairs}


def has_stamp(message: StoredMessage, revoked: Mapping[str, list[Any]]) -> bool:
    """Return whether one of the message's stamps has one of these values."""
    stamps = message.headers.get("stamps") or {}
    return any(
        value in revoked.get(stamp, ())
        for stamp in message.headers.get("stamped_headers") or ()
        for value in maybe_list(stamps.get(stamp)) or ()
    )


def store_revoked(app: Any, message: StoredMessage) -> None:
    """Store the state REVOKED of a task, and let the chord of which it is a part fail."""
    properties, headers = message.properties, message.headers
    task_id = properties["correlation_id"]
    request = Context(
        {
            **headers,
            "id": task_id,
            "reply_to": properties.get("reply_to"),
            "correlation_id": task_id,
            "chord": _chord_of(app, message),
        }
    )
    task = app.tasks.get(headers.get("task"))
    ignores = headers.get("ignore_result")
    if ignores is None and task is not None:
        ignores = task.ignore_result
    is_stored = not ignores or getattr(task, "store_errors_even_if_ignored", False)
    backend = app.backend if task is None else task.backend
    backend.mark_as_revoked(task_id, "revoked", request=request, store_result=is_stored)


def _chord_of(app: Any, message: StoredMessage) -> Any:
    """Return the chord of which the task is a part; None if this process may not read the body."""
    if not message.headers.get("group"):
        return None
    body: Any = message.body
    try:
        if compression := message.headers.get("compression"):
            body = kombu_compression.decompress(body, compression)
        accept = prepare_accept_content(app.conf.accept_content)
        _, _, embedded = loads(body, message.content_type, message.content_encoding, accept)
        return embedded.get("chord")
    except (ContentDisallowed, DecodeError, KeyError, TypeError, ValueError, AttributeError):
        logger.warning(
            "delaytasks: the chord of the revoked Celery task %s cannot be read, and may wait "
            "for it",
            message.properties.get("correlation_id"),
            exc_info=True,
        )
        return None
