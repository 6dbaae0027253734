"""Messages of Celery tasks as rows: captured from Celery's producer, and revoked by the task's id.

`StoredMessage` has what kombu needs to publish a message that is serialized and compressed already.
The body is never deserialized here, so that the worker that publishes it need not accept its
content type. `new_task` returns the row of a message, and `StoredMessage.of_body` reads it back.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from celery.app.task import Context
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import compression as kombu_compression
from kombu.entity import Queue
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.messaging import Producer
from kombu.serialization import loads, prepare_accept_content
from kombu.utils import json as kombu_json

from delaytasks.broker.link import Outgoing
from delaytasks.model.clock import Clock
from delaytasks.model.errors import BodyRefusedError, InvalidInputError
from delaytasks.model.inputs import celery_key, celery_tag
from delaytasks.model.task import NewTask
from delaytasks.model.text import shown

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
    #: The app's queue to declare before the message is published; None if nothing is declared.
    queue: str | None = None

    def as_body(self) -> dict[str, Any]:
        """Return the body of the row."""
        # kombu writes values such as bytes and datetimes as text in its own form.
        text = kombu_json.dumps(self._asdict())
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
            found = cls(**(kombu_json.loads(body["typed"]) if "typed" in body else body))
            texts = found.content_type, found.content_encoding, found.exchange, found.routing_key
            if not (
                isinstance(found.body, (str, bytes))
                and isinstance(found.headers, dict)
                and isinstance(found.properties, dict)
                and all(isinstance(text, str) for text in (*texts, found.queue or ""))
            ):
                raise TypeError("a field is of another type")
        except (TypeError, ValueError) as error:
            raise BodyRefusedError(
                f"the body is not a Celery message ({type(error).__name__}: {error}); rows of "
                "this tag are written by apply_async",
                "body",
            ) from None
        return found

    def outgoing(self, app: Any, clock: Clock) -> Outgoing:
        """Return what the worker publishes."""
        properties = dict(self.properties)
        expiration = properties.pop("expiration", None)
        return Outgoing(
            self.body,
            {
                "routing_key": self.routing_key,
                "exchange": self.exchange,
                "content_type": self.content_type,
                "content_encoding": self.content_encoding,
                "headers": dict(self.headers),
                "expiration": _expiration_s(self.headers.get("expires"), expiration, clock),
                # Otherwise the broker drops and confirms a message for which there is no queue.
                "mandatory": True,
                **properties,
            },
            _queue_of(app, self.queue),
        )

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


def name_of(app: Any, queue: Queue) -> str:
    """Return the name by which `app` defines the queue.

    Raises
    ------
    InvalidInputError
        If only the call defines the queue.
    """
    if app.amqp.queues.get(queue.name) is not queue:
        raise InvalidInputError(
            f"the app does not define the queue {shown(queue.name)}: add it to task_queues, or "
            "call the task with durable_eta=False",
            "queue",
        )
    return str(queue.name)


def _queue_of(app: Any, name: str | None) -> Queue | None:
    """Return the queue to declare; None if the message has none, or if `app` does not know it."""
    try:
        found: Queue | None = None if name is None else app.amqp.queues[name]
    except KeyError:  # with task_create_missing_queues=False
        return None
    return found


def _expiration_s(expires: Any, expiration: Any, clock: Clock) -> float | None:
    """Return how long the broker keeps the message.

    Celery lets the broker's limit end at `expires`. A worker discards a message that has expired
    and stores its state, so such a message has no limit.
    """
    if not isinstance(expires, str):
        return None if expiration is None else float(expiration) / 1000
    left_s: float = (maybe_make_aware(maybe_iso8601(expires)) - clock.now()).total_seconds()
    return left_s if left_s > 0 else None


# -- A producer that gets the message of a Celery task in place of the broker ---------------------


#: Options of `publish` that say how a producer sends. The worker that publishes has its own ways.
_OF_SENDING = ("retry", "retry_policy", "timeout", "confirm_timeout", "mandatory", "immediate")


class CapturingProducer:
    """Lets kombu prepare what Celery publishes, and calls `store` with the message.

    It connects to no broker. All other attributes are those of `producer`, since a result backend
    may use the channel to declare the queue of its results.
    """

    def __init__(self, app: Any, producer: Any, store: Callable[[StoredMessage], None]) -> None:
        self._app = app
        self._producer = producer
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def publish(self, body: Any, declare: Sequence[Any] | None = None, **options: Any) -> None:
        """Store the message that `kombu.Producer.publish` would send with these arguments."""
        for name in _OF_SENDING:
            options.pop(name, None)
        channel, own = KeepingChannel(), self._producer
        Producer(
            channel, serializer=own.serializer, compression=own.compression, auto_declare=False
        ).publish(body, **options)
        queue = next((each for each in declare or () if isinstance(each, Queue)), None)
        declared = None if queue is None else name_of(self._app, queue)
        self._store(channel.published._replace(queue=declared))


class KeepingChannel:
    """The channel of a producer, which keeps the message."""

    published: StoredMessage

    def prepare_message(
        self,
        body: Any,
        priority: int,
        content_type: str,
        content_encoding: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
    ) -> StoredMessage:
        properties["priority"] = priority
        return StoredMessage(body, content_type, content_encoding, headers, properties, "", "")

    def basic_publish(
        self, message: StoredMessage, exchange: str, routing_key: str, **_: Any
    ) -> None:
        self.published = message._replace(exchange=exchange, routing_key=routing_key)


# -- What Celery's worker does with a message that is revoked, done without a worker --------------


logger = logging.getLogger("delaytasks")


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
