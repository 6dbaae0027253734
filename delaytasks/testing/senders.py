"""Take the place of the timer, the broker and HTTP in a test, and keep what would be sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kombu.compression import decompress
from kombu.serialization import loads

from delaytasks.core.celery_calls import Callback, Message
from delaytasks.core.interfaces import Entry
from delaytasks.core.task import DelayTask, Done, Outcome
from delaytasks.operations.callbacks import Callbacks


@dataclass(frozen=True)
class SentTask:
    """A Celery task that waited as a row and was published.

    Attributes
    ----------
    name, id
        The name and the id of the Celery task.
    args, kwargs
        Its arguments.
    queue
        The routing key of its message.
    headers
        The headers of its message.
    """

    name: str
    id: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str
    headers: Mapping[str, Any]


class NoTimer:
    """Arms nothing, since the test itself runs the tasks. Calls `on_armed` after each commit."""

    is_up = True

    def __init__(self, on_armed: Callable[[], None]) -> None:
        self._on_armed = on_armed

    def arm(self, entries: Iterable[Entry]) -> bool:
        self._on_armed()
        return True

    def disarm(self, entries: Iterable[Entry]) -> None: ...

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        return True


class RecordingPublisher:
    """Keeps the messages of Celery tasks."""

    def __init__(self, sent: list[SentTask]) -> None:
        self._sent = sent

    def publish(self, messages: Sequence[Any]) -> list[Exception | None]:
        self._sent += map(_sent_task, messages)
        return [None] * len(messages)

    def close(self) -> None: ...


def _sent_task(message: Any) -> SentTask:
    headers, body = message.headers, message.body
    if headers.get("compression"):
        body = decompress(body, headers["compression"])  # type: ignore[no-untyped-call]
    kind = message.content_type
    args, kwargs, _ = loads(  # type: ignore[no-untyped-call]
        body, kind, message.content_encoding, accept={kind}
    )
    return SentTask(
        headers["task"], headers["id"], list(args), dict(kwargs), message.routing_key, headers
    )


class RecordingCallbacks(Callbacks):
    """Checks callbacks and messages as in production, and keeps them instead of sending them."""

    def __init__(self, callbacks: list[Callback], messages: list[Message], *arguments: Any) -> None:
        super().__init__(*arguments)
        real_http, real_queue = Callbacks.http.func, Callbacks.queue.func  # type: ignore[attr-defined]
        self.http: Any = _Recorded(lambda: real_http(self), callbacks)
        self.queue: Any = _Recorded(lambda: real_queue(self), messages)


class _Recorded:
    """Has the methods of `HttpCallbacks` and `QueueMessages`."""

    def __init__(self, make_real: Callable[[], Any], sent: list[Any]) -> None:
        self._make_real = make_real
        self._sent = sent

    def content(self, *arguments: Any) -> Any:
        return self._make_real().content(*arguments)

    def __call__(self, content: Any, task: DelayTask) -> Outcome:
        self._sent.append(content)
        return Done()

    def close(self) -> None: ...
