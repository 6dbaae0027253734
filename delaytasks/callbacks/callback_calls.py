"""The calls that schedule callbacks, `delays.callbacks`, and the messages to queues.

A task of the tag `delaytasks.message` sends a message to a queue or an exchange. `http` has the
tasks that POST to a URL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kombu import Connection

from delaytasks.broker.link import Outgoing
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import CALLBACK, MESSAGE, Delay
from delaytasks.model.moves import Done, Fail, Outcome
from delaytasks.model.task import DelayedTask, NewTask
from delaytasks.model.text import shown
from delaytasks.twins import CallGroup, twin

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.model.task import OnConflict, TaskOptions
    from delaytasks.runtime import Runtime


class CallbackCalls(CallGroup):
    """Callbacks to other systems, as `delays.callbacks`.

    Each method has an asynchronous twin for coroutines, such as `apost` for `post`.

    Examples
    --------
    >>> delays.callbacks.post("https://partner.example/paid", {"order": 7}, 60)
    >>> delays.callbacks.publish("invoices", {"order": 7}, 60)
    """

    def post(
        self,
        url: str,
        body: Any,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        headers: Mapping[str, str] | None = None,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayedTask:
        """Schedule a POST of `body` as JSON to `url`, repeated until the answer is 2xx.

        An attempt that fails is retried by `RetrySchedule.NOTIFY`, unless `retries` is given. The
        answer 410 ends the task.

        Parameters
        ----------
        url
            An https URL of a public host, or a URL that the setting `callback_allow` allows.
        body
            Any value that JSON can represent.
        delay
            Seconds, text such as `"30m"`, or a timedelta.
        at
            An aware datetime, instead of `delay`.
        headers
            Additional HTTP headers.
        on_conflict, session, **options
            See `DelayTasks.schedule_delay`. All callbacks share one set of keys.

        Returns
        -------
        DelayedTask
            The task as it is stored.

        Raises
        ------
        ForbiddenURLError
            If callbacks may not go to the URL.
        DelayTaskError
            The errors of `DelayTasks.schedule_delay`.

        Examples
        --------
        >>> delays.callbacks.post("https://partner.example/paid", {"order": 7}, 60)
        """
        content = self._runtime.http_callbacks.content(url, body, headers)
        return self._schedule(
            NewTask(CALLBACK, content, delay, at, **options), on_conflict, session
        )

    apost = twin(post)

    def publish(
        self,
        to: str,
        body: Any,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        exchange: str = "",
        headers: Mapping[str, str | int | float | bool] | None = None,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayedTask:
        """Schedule a message to a broker queue, repeated until the broker has accepted it.

        Parameters
        ----------
        to
            The queue, or with `exchange` the routing key.
        body, delay, at
            See `post`.
        exchange
            An AMQP exchange. By default the message goes directly to the queue.
        headers
            Message headers.
        on_conflict, session, **options
            See `DelayTasks.schedule_delay`; `queue` is the queue of the task itself. All messages
            share one set of keys.

        Returns
        -------
        DelayedTask
            The task as it is stored.

        Raises
        ------
        DelayTaskError
            The errors of `DelayTasks.schedule_delay`.

        See Also
        --------
        The setting `callback_broker_url` names another broker than that of the Celery app.

        Examples
        --------
        >>> delays.callbacks.publish("invoices", {"order": 7}, 60)
        """
        content = vars(Message(to, body, exchange, headers or {}))
        return self._schedule(NewTask(MESSAGE, content, delay, at, **options), on_conflict, session)

    apublish = twin(publish)

    def _schedule(self, new: NewTask, on_conflict: OnConflict, session: Any) -> DelayedTask:
        runtime = self._runtime
        return runtime.producer.schedule(new, on_conflict, runtime.transactions.of(session))


# -- Callbacks to queues --------------------------------------------------------------------------

#: The longest name of a queue or an exchange. This is the limit of AMQP's short strings.
MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class Message:
    """The body of a message to a queue. Another program may have written it."""

    #: The name of a queue; with an exchange the routing key.
    to: str
    body: Any = None
    exchange: str = ""
    headers: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for argument, name in (("exchange", self.exchange), ("to", self.to)):
            is_name = isinstance(name, str) and name.isprintable()
            if not is_name or len(name.encode()) > MAX_NAME_BYTES:
                raise InvalidInputError(
                    f"{argument} has at most {MAX_NAME_BYTES} printable bytes, not {shown(name)}",
                    argument,
                )
        if not (self.to or self.exchange):
            raise InvalidInputError(
                "a message goes to a queue or an exchange, and neither is named", "to"
            )
        if not isinstance(self.headers, Mapping):
            raise InvalidInputError(
                f"headers are a mapping, not {type(self.headers).__name__}", "headers"
            )


def send_message(runtime: Runtime, message: Message, task: DelayedTask) -> Outcome:
    """Send a message, and wait for the broker's confirmation.

    Raises the transport's exception if the broker refuses the message, does not confirm it, or has
    no queue for it.
    """
    if message.exchange:
        url = runtime.settings.callback_broker_url
        transport = (Connection(url) if url else runtime.celery.connection_for_write()).transport
        if transport.driver_type != "amqp":
            driver = transport.driver_name
            return Fail(f"{driver} has no exchanges: on it a message goes to a queue")
    outgoing = Outgoing(
        json.dumps(message.body, separators=(",", ":")),
        {
            "exchange": message.exchange,
            "routing_key": message.to,
            "headers": dict(message.headers),
            "content_type": "application/json",
            "content_encoding": "utf-8",
            "delivery_mode": 2,
            "message_id": str(task.id),
            # Otherwise the broker drops and confirms a message for which there is no queue.
            "mandatory": True,
        },
    )
    [error] = runtime.queue_links.publish([outgoing])
    if error is not None:
        raise error
    return Done()
