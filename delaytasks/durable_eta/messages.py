"""Celery calls with a delay become rows, rows become messages again, and a revoke cancels them.

`StoredMessage` has what kombu needs to publish a message that is serialized and compressed already.
The body is never deserialized here, so that the worker that publishes it need not accept its
content type. `new_task` returns the row of a message, and `StoredMessage.of_body` reads it back.
`CeleryTasks` schedules, publishes and revokes. See docs/move-from-eta.md.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery.app.task import Context, extract_exec_options
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import compression as kombu_compression
from kombu.entity import Queue
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.messaging import Producer
from kombu.serialization import loads, prepare_accept_content
from kombu.utils import json as kombu_json
from kombu.utils.uuid import uuid

from delaytasks.broker.link import UNWRITABLE, OutageError, Outgoing, check_headers
from delaytasks.model.clock import MAX_ID, Clock
from delaytasks.model.errors import BodyRefusedError, ConfigError, DelayTaskError, InvalidInputError
from delaytasks.model.inputs import celery_key, celery_tag
from delaytasks.model.moves import Done, Fail, Outcome, Retry, Snooze
from delaytasks.model.task import DelayedTask, NewTask, Transaction, connection_of
from delaytasks.model.text import shown
from delaytasks.operate.task_calls import cancel_task

if TYPE_CHECKING:
    from delaytasks.attachment import CeleryCall
    from delaytasks.runtime import Runtime

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


# -- Schedules the messages, and publishes them when they are due ----------------------------------

_ID = re.compile(r"[0-9]{1,19}")
#: Messages that the broker has not confirmed are published again after this time.
OUTAGE_S = 5.0

Send = Callable[..., Any]


def called_task(body: object) -> str | None:
    """Return the Celery task that a row of a recurring schedule calls when it is due.

    The result is None for the body of another row, which has a prepared message. The id of the
    called task is the id of the row.
    """
    if isinstance(body, Mapping) and isinstance(body.get("task"), str):
        return str(body["task"])
    return None


class CeleryTasks:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._app = runtime.celery
        self._transactions = runtime.transactions
        self._clock = runtime.clock
        self._events = runtime.events

    # -- schedule ---------------------------------------------------------------------------------

    def send(self, send: Send, call: CeleryCall, *more: Any, **options: Any) -> Any:
        """Write the message as a row that `send`, the app's `send_task`, would send to the broker.

        `send` is called without a due time and with a producer that stores the message. It routes
        and serializes the message, sends Celery's signals and returns the result.
        """
        own_producer = call.producer or options.get("publisher")
        connection = call.connection or getattr(own_producer, "connection", None)
        self._refuse_other_broker(call.name, connection)
        call = call._replace(task_id=call.task_id or uuid())
        is_retry = self._is_retry(call, options)
        # An exception ends a task that is retried, and so may roll back its transaction.
        transaction = None if is_retry else self._transactions.of(None)
        store = partial(self._schedule, call, transaction)
        try:
            with self._app.producer_or_acquire(own_producer) as producer:
                captured = call._replace(
                    countdown=None,
                    eta=None,
                    producer=CapturingProducer(self._app, producer, store),
                    connection=None,
                )
                silent = {**options, "event_dispatcher": _NoTaskSentEvents}
                return send(*captured, *more, **silent)
        except DelayTaskError as error:
            if not is_retry:
                raise
            # Celery would drop the task: it rejects a task whose retry cannot be sent.
            self._events.emit(
                "celery_task.not_stored", id=call.task_id, task=call.name, error=error
            )
            return send(*call, *more, **options)

    def _schedule(
        self, call: CeleryCall, transaction: Transaction | None, message: StoredMessage
    ) -> None:
        delay = when = None
        if call.eta and not call.countdown:
            when = self._instant(call.eta)
        else:
            delay = max(call.countdown or 0, 0)
        new = new_task(call.name, str(call.task_id), message, delay, when)
        try:
            self._check_headers(message)
            self._runtime.producer.schedule(new, "take", transaction)
        except InvalidInputError as error:
            if error.argument not in ("body", "headers"):
                raise
            raise InvalidInputError(
                f"the Celery task {call.name} cannot wait as a row: {error}; pass the name of "
                "stored data, or call the task with durable_eta=False",
                error.argument,
            ) from None

    def _check_headers(self, message: StoredMessage) -> None:
        if self._app.connection_for_write().transport.driver_type == "amqp":
            try:
                check_headers(message.headers)
            except UNWRITABLE as error:
                raise InvalidInputError(str(error), "headers") from None

    def _refuse_other_broker(self, name: str, connection: Any) -> None:
        """Raise an error if the caller's connection is not to the broker of the app."""
        if connection is None or connection.as_uri() == self._app.connection_for_write().as_uri():
            return
        raise ConfigError(
            f"the connection for the Celery task {name} is to {connection.as_uri()}, and the row "
            "will be published to the broker of the app: call the task with durable_eta=False"
        )

    def _is_retry(self, call: CeleryCall, options: Mapping[str, Any]) -> bool:
        """Return whether the running Celery task sends itself again."""
        task = self._app.current_worker_task
        return bool(options.get("retries")) and task is not None and task.request.id == call.task_id

    def delay_s(self, call: CeleryCall) -> float:
        """Return in how many seconds a call is due."""
        if call.countdown:
            return float(call.countdown)
        return (self._instant(call.eta) - self._clock.certain_now()).total_seconds()

    def _instant(self, eta: Any) -> datetime:
        """Return the instant that Celery's worker reads from an eta."""
        instant: datetime = maybe_make_aware(maybe_iso8601(eta), self._app.conf.timezone)
        return instant

    # -- publish ----------------------------------------------------------------------------------

    def publish(self, bodies: Sequence[Any], tasks: Sequence[DelayedTask]) -> list[Outcome]:
        """Publish the messages of rows that are due; the processor of all `celery:` tags."""
        outcomes: list[Outcome] = [Done()] * len(bodies)
        numbers, messages = list[int](), list[Outgoing]()
        for number, (body, task) in enumerate(zip(bodies, tasks, strict=True)):
            try:
                messages.append(self._message(body, task).outgoing(self._app, self._clock))
            except BodyRefusedError as error:
                outcomes[number] = Fail(str(error))
            except Exception as error:  # for example of a router that reads a database
                outcomes[number] = Retry(reason=f"{type(error).__name__}: {error}")
            else:
                numbers.append(number)
        outage = None
        results = self._runtime.confirming_links.publish(messages) if messages else ()
        for number, reason in zip(numbers, results, strict=True):
            if isinstance(reason, OutageError):
                outcomes[number], outage = Snooze(OUTAGE_S), reason
            elif reason is not None:
                outcomes[number] = Retry(reason=f"{type(reason).__name__}: {reason}")
        if outage is not None:
            count = sum(isinstance(outcome, Snooze) for outcome in outcomes)
            self._events.emit("celery_task.not_published", count, error=outage)
        return outcomes

    def _message(self, body: Any, task: DelayedTask) -> StoredMessage:
        """Return the message of a row. That of a recurring task is prepared now: its row has the
        call, and the id of the Celery task is the id of the row."""
        name = called_task(body)
        if name is None:
            return StoredMessage.of_body(body)
        id, prepared = str(task.id), list[StoredMessage]()
        with self._app.producer_or_acquire() as producer:
            options = {
                **self._own_options(name),
                **(body.get("options") or {}),
                "task_id": id,
                "producer": CapturingProducer(self._app, producer, prepared.append),
                "event_dispatcher": _NoTaskSentEvents,
                "add_to_parent": False,
            }
            self._app.send_task(name, body.get("args"), body.get("kwargs"), **options)
        [message] = prepared
        # Celery takes the task that publishes for the parent.
        return message._replace(headers={**message.headers, "root_id": id, "parent_id": None})

    def _own_options(self, name: str) -> dict[str, Any]:
        """Return the options that `@app.task` gives to the messages of a task.

        Before Celery 5.7, `send_task` does not read them.
        """
        if name not in self._app.tasks:
            return {}
        task = self._app.tasks[name]
        own = extract_exec_options(task)
        given = {option: value for option, value in own.items() if value is not None}
        return {"ignore_result": task.ignore_result, **given}

    # -- revoke -----------------------------------------------------------------------------------

    def revoke(self, task_ids: Iterable[str]) -> None:
        """Cancel the waiting rows of these Celery tasks, and store the state REVOKED of each.

        A row that is being published is asked to stop. If its worker dies before it has published
        the message, no other worker publishes it.
        """
        names = [str(task_id) for task_id in task_ids]
        keys = {celery_key(name) for name in names}
        # The id of a recurring Celery task is the id of its row.
        ids = [int(name) for name in names if _ID.fullmatch(name) and int(name) <= MAX_ID]
        with self._transactions.guard(None) as transaction:
            on = connection_of(transaction)
            live = self._runtime.store.tasks.celery_rows(sorted(keys), ids, on)
            revoked = [row for row in live if row.key in keys or self._called_task(row)]
            self._cancel(revoked, transaction)

    def _cancel(self, live: Iterable[DelayedTask], transaction: Transaction | None) -> None:
        cancelled = [task for task in live if cancel_task(self._runtime, task.id, running=True)]
        if cancelled and transaction is not None:
            transaction.after_commit(cancelled, self._store_revoked)
        else:
            self._store_revoked(cancelled)

    def _store_revoked(self, tasks: Sequence[DelayedTask], is_committed: bool = True) -> None:
        for task in tasks:
            if message := self._readable(task):
                store_revoked(self._app, message)

    def _readable(self, task: DelayedTask) -> StoredMessage | None:
        """Return the message of a row; None if another program wrote it, or without its key."""
        try:
            name = called_task(task.body)
            of_call = StoredMessage.of_call(name, str(task.id)) if name else None
            return of_call or StoredMessage.of_body(task.body)
        except (DelayTaskError, ValueError):
            return None

    def _called_task(self, task: DelayedTask) -> str | None:
        """Return the Celery task that a row of a recurring schedule will call, else None."""
        try:
            return called_task(task.body)
        except (DelayTaskError, ValueError):
            return None


class _NoTaskSentEvents:
    """The event `task-sent` is not sent before the message is."""

    @staticmethod
    def publish(*args: Any, **options: Any) -> None: ...
