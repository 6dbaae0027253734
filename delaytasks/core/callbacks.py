"""The bodies, tags and retry schedule of callbacks.

Each app with delaytasks registers the two tags. The package `delaytasks.webhooks` sends callbacks,
and is not needed for that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from delaytasks.core.errors import InvalidHeaderError, InvalidQueueError
from delaytasks.core.retry_schedule import NOTIFY
from delaytasks.core.text import shown

#: The tag of HTTP callbacks.
CALLBACK = "delaytasks.callback"
#: The tag of messages to queues.
MESSAGE = "delaytasks.message"
#: The retry schedule of callbacks and messages that have none of their own.
RETRY_SCHEDULE = NOTIFY
#: The longest name of a queue or an exchange. This is the limit of AMQP's short strings.
MAX_NAME_BYTES = 255

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
#: Headers that frame the request, contain its destination, or describe the sender to the receiver.
_RESERVED_HEADERS = {
    "accept-encoding", "connection", "content-encoding", "content-length", "expect", "host",
    "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Callback:
    """The body of an HTTP callback. Another program may have written it."""

    url: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        headers = self.headers
        if not isinstance(headers, Mapping):
            raise InvalidHeaderError(
                f"headers are a mapping of strings, not {type(headers).__name__}"
            )
        for name, value in headers.items():
            if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
                raise InvalidHeaderError(f"{shown(name)} cannot be the name of a header")
            lowered = name.lower()
            if lowered in _RESERVED_HEADERS or lowered.startswith(("webhook-", "proxy-")):
                raise InvalidHeaderError(f"the header {name} is reserved for the sender")
            if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
                # The message does not contain the value, which may be a secret.
                raise InvalidHeaderError(
                    f"the header {name} has a value that is not a line of printable ASCII"
                )
        if len({name.lower() for name in headers}) < len(headers):
            raise InvalidHeaderError("a header is given twice")


@dataclass(frozen=True, slots=True)
class Message:
    """The body of a message to a queue. Another program may have written it."""

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
                    f"the header {shown(name)} is not a name with a string, number or bool"
                )


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not (
        name.isprintable() and len(name.encode()) <= MAX_NAME_BYTES
    ):
        raise InvalidQueueError(
            f"{what} is named by at most {MAX_NAME_BYTES} printable bytes, not {shown(name)}"
        )
