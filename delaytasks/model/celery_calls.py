"""Tasks that the library itself runs: Celery tasks and callbacks; the trace in their meta."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import TAG_LENGTH, check_key, decode_meta, encode_meta
from delaytasks.model.outcomes import RetrySchedule
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import shown

_forced_app: ContextVar[Any] = ContextVar("delaytasks_forced_app", default=None)


class CeleryCall(NamedTuple):
    """The first parameters of a Celery app's `send_task`, in their order."""

    name: str
    args: Any = None
    kwargs: Any = None
    countdown: Any = None
    eta: Any = None
    task_id: str | None = None
    producer: Any = None
    connection: Any = None


@contextmanager
def forced(app: Any) -> Iterator[None]:
    """Let each call of a task of `app` inside the block become a row."""
    token = _forced_app.set(app)
    try:
        yield
    finally:
        _forced_app.reset(token)


def is_forced(app: Any) -> bool:
    return _forced_app.get() is app


def called_task(body: object) -> str | None:
    """Return the Celery task that a row of a recurring schedule calls when it is due.

    The result is None for the body of another row, which has a prepared message. The id of the
    called task is the id of the row.
    """
    if isinstance(body, Mapping) and isinstance(body.get("task"), str):
        return str(body["task"])
    return None


# -- The tags and keys of rows that wait in place of Celery tasks ---------------------------------

# The row of the Celery task `shop.remind` has the tag `celery:shop.remind`, and its key is the id
# of the Celery task. So the rows are found, paused, limited and cancelled like those of any other
# tag.


CELERY_PREFIX = "celery:"
#: The tag under which the processor of all these rows is registered.
ANY_CELERY_TASK = "delaytasks.celery"
#: Hexadecimal digits that tell long names apart whose beginnings are equal.
_DIGITS = 16


def celery_tag(name: str) -> str:
    """Return the tag of a Celery task; a name that is too long for a tag is shortened."""
    tag = CELERY_PREFIX + name
    if len(tag) <= TAG_LENGTH:
        return tag
    return f"{tag[: TAG_LENGTH - _DIGITS - 1]}~{_digest(name)}"


def processor_tag(tag: str) -> str:
    """Return the tag under which the processor of `tag` may be registered as well."""
    return ANY_CELERY_TASK if tag.startswith(CELERY_PREFIX) else tag


def celery_key(task_id: str) -> str:
    """Return the key for the id of a Celery task, which may be any text."""
    try:
        return check_key(task_id)
    except InvalidInputError:
        return _digest(task_id)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]


# -- trace meta -----------------------------------------------------------------------------------

# The trace context that travels with a task in its meta, from the scheduling call to the run.
#
# Integrations with Sentry and OpenTelemetry add a source. The sources belong to the process, as
# the tracers of these libraries do. Without a source, scheduling a task costs nothing more.


#: Returns the pairs of meta for new tasks of one tag. The tasks are not written yet.
TraceSource = Callable[[str, Sequence[DelayedTask]], Mapping[str, str]]

#: The pairs of meta with the trace: the W3C Trace Context, and that of Sentry.
_TRACE_PAIRS = {
    "traceparent": re.compile("[0-9a-f]{2}-([0-9a-f]{32})-.*"),
    "sentry-trace": re.compile("([0-9a-f]{32})-.*"),
}

logger = logging.getLogger("delaytasks")
_sources: list[TraceSource] = []


def add_trace_source(source: TraceSource) -> None:
    """Call `source` for the tasks of each scheduling call from now on."""
    if source not in _sources:
        _sources.append(source)


def remove_trace_source(source: TraceSource) -> None:
    if source in _sources:
        _sources.remove(source)


def add_trace(tasks: Sequence[DelayedTask]) -> None:
    """Add the trace context of the caller to the meta of new tasks."""
    if not _sources:
        return
    by_tag: dict[str, list[DelayedTask]] = {}
    for task in tasks:
        by_tag.setdefault(task.tag, []).append(task)
    for tag, group in by_tag.items():
        for source in list(_sources):
            try:
                pairs = source(tag, group)
            except Exception:  # a tracer must not prevent the call that it traces
                logger.exception("the trace context of new tasks is not known")
                continue
            if pairs:
                _add(group, pairs)


def trace_id_of(meta: Mapping[str, str]) -> str | None:
    """Return the id of the trace of the call that scheduled a task, or None without a trace."""
    for name, pattern in _TRACE_PAIRS.items():
        found = pattern.fullmatch(meta.get(name, ""))
        if found is not None:
            return found[1]
    return None


def _add(tasks: Sequence[DelayedTask], pairs: Mapping[str, str]) -> None:
    """Add pairs to the meta. The caller's own pairs take precedence."""
    texts: dict[str | None, str | None] = {}
    for task in tasks:
        known = task.meta_json
        if known not in texts:
            try:
                texts[known] = encode_meta({**pairs, **decode_meta(known)})
            except InvalidInputError:  # there is no room for them
                texts[known] = known
        task.meta_json = texts[known]


# -- The bodies, tags and retry schedule of callbacks ---------------------------------------------

# Each app with delaytasks registers the two tags. The package `delaytasks.callbacks` sends
# callbacks, and is not needed for that.


#: The tag of HTTP callbacks.
CALLBACK = "delaytasks.callback"
#: The tag of messages to queues.
MESSAGE = "delaytasks.message"
#: The retry schedule of callbacks and messages that have none of their own.
RETRY_SCHEDULE = RetrySchedule.NOTIFY
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
            raise InvalidInputError(
                f"headers are a mapping of strings, not {type(headers).__name__}", "headers"
            )
        for name, value in headers.items():
            if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
                raise InvalidInputError(f"{shown(name)} cannot be the name of a header", "headers")
            lowered = name.lower()
            if lowered in _RESERVED_HEADERS or lowered.startswith(("webhook-", "proxy-")):
                raise InvalidInputError(f"the header {name} is reserved for the sender", "headers")
            if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
                # The message does not contain the value, which may be a secret.
                raise InvalidInputError(
                    f"the header {name} has a value that is not a line of printable ASCII",
                    "headers",
                )
        if len({name.lower() for name in headers}) < len(headers):
            raise InvalidInputError("a header is given twice", "headers")


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
