"""Queue callbacks: a task of the tag `delaytasks.message` is a message to a queue or exchange of somebody else's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kombu.messaging import Producer

from delaytasks.core.errors import InvalidHeaderError, InvalidQueueError
from delaytasks.core.forks import reset_in_child
from delaytasks.core.outcomes import Done, Fail, Outcome
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown

MESSAGE = "delaytasks.message"
#: Of AMQP's short strings, in bytes.
NAME_MAX_BYTES = 255


@dataclass(frozen=True, slots=True)
class Message:
    """What a row of the tag says, which may be another program's."""

    #: The name of a queue; with an exchange the routing key.
    to: str
    body: Any = None
    exchange: str = ""
    headers: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_name(self.exchange, "an exchange")
        _check_name(self.to, "a routing key" if self.exchange else "a queue")
        if not (self.to or self.exchange):
            raise InvalidQueueError(
                "a message goes to a queue or an exchange, and neither is named"
            )
        if not isinstance(self.headers, Mapping):
            raise InvalidHeaderError(f"headers are a mapping, not {type(self.headers).__name__}")
        for name, value in self.headers.items():
            if not isinstance(name, str) or not isinstance(value, (str, int, float)):
                raise InvalidHeaderError(
                    f"the header {shown(name)} is no name with a string, number or bool"
                )


class _Link(NamedTuple):
    connection: Any
    producer: Producer

    def close(self) -> None:
        try:
            self.connection.release()
        except Exception:
            pass  # it is broken: that is why it is closed


class QueueMessages:
    """Thread-safe; each process has connections of its own, as many as it sends messages at a time.

    `connect` opens one on which each publish waits for the broker's confirmation, where the broker can confirm.
    """

    def __init__(self, connect: Callable[[], Any], confirm_s: float) -> None:
        self._connect = connect
        self._confirm_s = confirm_s
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._idle: list[_Link] = []

    def content(
        self, to: str, body: Any, exchange: str, headers: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The body of a message's task, checked."""
        Message(to, body, exchange, headers or {})
        more = {"exchange": exchange, "headers": dict(headers or {})}
        return {"to": to, "body": body, **{name: value for name, value in more.items() if value}}

    def __call__(self, message: Message, task: DelayTask) -> Outcome:
        """Raises what the transport raises when the message is refused, leads nowhere, or is not confirmed."""
        while True:
            link, is_new = self._link()
            try:
                outcome = self._publish(link, message, task)
            except Exception as error:
                link.close()  # or what the broker says of this message later would be taken for the next one's answer
                # One that was kept may have died meanwhile; only a new one can tell what the broker says.
                is_dead = isinstance(error, link.connection.connection_errors) and not isinstance(
                    error, TimeoutError
                )
                if is_new or not is_dead:
                    raise
            else:
                self._idle.append(link)
                return outcome

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _link(self) -> tuple[_Link, bool]:
        """A connection, and whether it is new."""
        try:
            return self._idle.pop(), False
        except IndexError:
            connection = self._connect()
            return _Link(connection, Producer(connection.channel(), auto_declare=False)), True

    def _publish(self, link: _Link, message: Message, task: DelayTask) -> Outcome:
        transport = link.connection.transport
        if message.exchange and transport.driver_type != "amqp":
            return Fail(
                f"exchanges are AMQP's: on {transport.driver_name} a message goes to a queue"
            )
        link.producer.publish(
            json.dumps(message.body, separators=(",", ":")),
            exchange=message.exchange,
            routing_key=message.to,
            headers=dict(message.headers),
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=2,
            message_id=str(task.id),
            # Else the broker drops what no queue is there for, and confirms it all the same.
            mandatory=True,
            confirm_timeout=self._confirm_s,
            retry=False,
        )
        return Done()


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not (
        name.isprintable() and len(name.encode()) <= NAME_MAX_BYTES
    ):
        raise InvalidQueueError(
            f"{what} is named by at most {NAME_MAX_BYTES} printable bytes, not {shown(name)}"
        )
