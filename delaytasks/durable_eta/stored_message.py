"""A Celery message as a row stores it.

`StoredMessage` has what kombu needs to publish a message that is serialized and compressed already.
The body is never deserialized here, so that the worker that publishes it need not accept its
content type. `new_task` returns the row of a message, and `StoredMessage.of_body` reads it back.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from kombu.entity import Exchange, Queue
from kombu.utils import json as kombu_json

from delaytasks.core.celery_calls import celery_key, celery_tag
from delaytasks.core.errors import BodyRefusedError
from delaytasks.core.task import NewTask
from delaytasks.core.text import shown

#: kombu's mark of values that have no JSON form, such as datetimes and bytes.
_TYPED = '"__type__"'


class StoredMessage(NamedTuple):
    """A serialized message and its destination."""

    body: str | bytes
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    #: AMQP properties, such as `correlation_id`, `reply_to`, `priority` and `delivery_mode`.
    properties: Mapping[str, Any]
    exchange: str
    routing_key: str
    #: The queue to declare before the message is published: its name if the Celery app defines it,
    #: else its definition. None if nothing is declared.
    queue: str | Mapping[str, Any] | None = None

    def as_body(self) -> dict[str, Any]:
        """Return the body of the row."""
        body: dict[str, Any] = {}
        if isinstance(self.body, str):
            body["body"] = self.body
        else:
            body["base64"] = base64.b64encode(self.body).decode()
        body |= {
            "type": self.content_type,
            "encoding": self.content_encoding,
            "headers": dict(self.headers),
            "properties": dict(self.properties),
            "exchange": self.exchange,
            "routing_key": self.routing_key,
            "queue": self.queue,
        }
        # kombu writes these values as text in its own form, and so do its transports.
        text = kombu_json.dumps(body)
        return {"typed": text} if _TYPED in text else json.loads(text)

    @classmethod
    def of_body(cls, body: Any) -> StoredMessage:
        """Return the message that the body of a row has.

        Raises
        ------
        BodyRefusedError
            If another program has stored something else.
        """
        try:
            if "typed" in body:
                body = kombu_json.loads(body["typed"])
            is_text = "body" in body
            return cls(
                body["body"] if is_text else base64.b64decode(body["base64"], validate=True),
                _text(body["type"]),
                _text(body["encoding"]),
                dict(body["headers"]),
                dict(body["properties"]),
                _text(body["exchange"]),
                _text(body["routing_key"]),
                body["queue"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BodyRefusedError(
                f"the body is not a Celery message ({type(error).__name__}: {error}); rows of "
                "this tag are written by apply_async"
            ) from None

    @classmethod
    def of_call(cls, task: str, task_id: str) -> StoredMessage:
        """Return what is known of the message of a call that is not prepared yet."""
        headers = {"task": task, "id": task_id}
        return cls("", "", "", headers, {"correlation_id": task_id}, "", "")


def new_task(
    name: str,
    task_id: str,
    message: StoredMessage,
    delay: float | timedelta | None = None,
    when: datetime | None = None,
) -> NewTask:
    """Return the row to schedule for a message of the Celery task `name`.

    The published message has no `eta`. Otherwise its worker would use its timer.
    """
    if message.headers.get("eta") is not None:
        message = message._replace(headers={**message.headers, "eta": None})
    return NewTask(celery_tag(name), message.as_body(), delay, when, key=celery_key(task_id))


def queue_definition(app: Any, queue: Queue) -> str | dict[str, Any]:
    """Return what a row stores about a queue: the name if `app` defines the queue by this name."""
    if app.amqp.queues.get(queue.name) is queue:
        return str(queue.name)
    defined = queue.as_dict(recurse=True)
    # More bindings than that to the exchange matter to other publishers only.
    return {
        name: value
        for name, value in defined.items()
        if value is not None and name not in ("bindings", "on_declared")
    }


def queue_of(app: Any, stored: str | Mapping[str, Any] | None) -> Queue | None:
    """Return the queue to declare; None if the message has none, or if `app` does not know it."""
    if stored is None:
        return None
    if isinstance(stored, str):
        try:
            found: Queue = app.amqp.queues[stored]
        except KeyError:  # with task_create_missing_queues=False
            return None
        return found
    exchange = stored.get("exchange")
    return Queue(**{**stored, "exchange": exchange and Exchange(**exchange)})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not a text")
    return value
