"""A Celery message with an eta that waits in a broker, and the row that takes its place."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from delaytasks.core.new_task import NewTask
from delaytasks.core.text import shown
from delaytasks.durable_eta.etas import instant_of
from delaytasks.durable_eta.stored_message import StoredMessage, new_task

#: Headers that brokers add to a message that was delivered before.
_BROKER_HEADERS = ("redelivered", "x-acquired-count", "x-delivery-count")


class UnreadableMessageError(Exception):
    """The message is not one of Celery's message protocol 2."""


class FoundMessage(NamedTuple):
    """A message in a broker."""

    #: The message, or None if it is not in the form in which kombu writes messages.
    message: StoredMessage | None
    queue: str
    #: Names the message to its source.
    handle: Any


class MessageSource(Protocol):
    """A place in a broker where messages wait."""

    def count(self) -> int:
        """Return the number of messages."""

    def batch(self) -> Sequence[FoundMessage]:
        """Return the next messages; at the end, none. Messages that are not removed stay."""

    def remove(self, found: Sequence[FoundMessage]) -> int:
        """Remove messages of the last batch; return how many of them were still there."""

    def close(self) -> None:
        """Give back the messages that were not removed."""


class WaitingMessage(NamedTuple):
    """A message with an eta."""

    task: str
    task_id: str
    #: The text in the message.
    eta: str
    due: datetime
    message: StoredMessage

    def as_row(self) -> NewTask:
        """Return the row to schedule.

        Its body has the eta, so that two calls with the same id and different times have different
        rows.

        Raises
        ------
        UnreadableMessageError
            If a header has no form in JSON.
        """
        try:
            new = new_task(self.task, self.task_id, self.message, when=self.due)
        except (TypeError, ValueError, RecursionError) as error:
            raise UnreadableMessageError(f"{type(error).__name__}: {error}") from None
        return new._replace(body={**new.body, "adopted_eta": self.eta})


def read(message: StoredMessage | None, app: Any, queue: str | None) -> WaitingMessage | None:
    """Return the message if it has an eta, else None.

    Parameters
    ----------
    message
        The message as it is in the broker. Its body is not deserialized.
    app
        The Celery app, which has the time zone for `maybe_make_aware`.
    queue
        The queue to declare before the message is published.

    Raises
    ------
    UnreadableMessageError
        If the message is not one of Celery's message protocol 2.
    """
    if message is None:
        raise UnreadableMessageError("it is not a message of Celery")
    task, task_id = message.headers.get("task"), message.headers.get("id")
    if not (isinstance(task, str) and isinstance(task_id, str) and task and task_id):
        raise UnreadableMessageError(
            "its headers name no task and id; messages of Celery's protocol 1 have them in the body"
        )
    eta = message.headers.get("eta")
    if not eta:
        return None
    try:
        due = instant_of(eta, app)
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise UnreadableMessageError(f"its eta is {shown(eta)}") from None
    headers = {key: value for key, value in message.headers.items() if key not in _BROKER_HEADERS}
    own = message._replace(headers=headers, queue=queue)
    return WaitingMessage(task, task_id, str(eta), due, own)
