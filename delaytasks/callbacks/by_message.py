"""Callbacks to queues: a task of the tag `delaytasks.message` sends a message to a queue or an
exchange.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kombu import Connection

from delaytasks.broker.link import Outgoing
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.outcomes import Done, Fail, Outcome
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import shown

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


#: The longest name of a queue or an exchange. This is the limit of AMQP's short strings.
MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Message:
    """The body of a message to a queue. Another program may have written it."""

    #: The name of a queue; with an exchange the routing key.
    to: str
    body: Any = None
    exchange: str = ""
    headers: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name(self.exchange, "exchange")
        _check_name(self.to, "to")
        if not (self.to or self.exchange):
            raise InvalidInputError(
                "a message goes to a queue or an exchange, and neither is named", "to"
            )
        if not isinstance(self.headers, Mapping):
            raise InvalidInputError(
                f"headers are a mapping, not {type(self.headers).__name__}", "headers"
            )
        for name, value in self.headers.items():
            if not isinstance(name, str) or not isinstance(value, (str, int, float)):
                raise InvalidInputError(
                    f"the header {shown(name)} is not a name with a string, number or bool",
                    "headers",
                )


def _check_name(name: object, argument: str) -> None:
    if not isinstance(name, str) or not (
        name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
    ):
        raise InvalidInputError(
            f"{argument} has at most {MAX_NAME_BYTES} printable bytes, not {shown(name)}", argument
        )


class QueueCallbacks:
    """Sends messages, and waits for the broker's confirmation of each."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def content(
        self, to: str, body: Any, exchange: str, headers: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the body of a message's task, after checking it."""
        Message(to, body, exchange, headers or {})
        more = {"exchange": exchange, "headers": dict(headers or {})}
        return {"to": to, "body": body, **{name: value for name, value in more.items() if value}}

    def __call__(self, message: Message, task: DelayedTask) -> Outcome:
        """Send `message`.

        Raises the transport's exception if the broker refuses the message, does not confirm it, or
        has no queue for it.
        """
        if message.exchange and (driver := self._driver_without_exchanges()):
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
        [error] = self._runtime.queue_links.publish([outgoing])
        if error is not None:
            raise error
        return Done()

    def _driver_without_exchanges(self) -> str | None:
        url = self._runtime.settings.callback_broker_url
        made = Connection(url) if url else self._runtime.celery.connection_for_write()
        return None if made.transport.driver_type == "amqp" else str(made.transport.driver_name)
