"""Tasks that the library itself runs: Celery tasks and callbacks; the trace in their meta."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence

from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import TAG_LENGTH, check_key, decode_meta, encode_meta
from delaytasks.model.outcomes import RetrySchedule
from delaytasks.model.task import DelayedTask

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


# -- The tags and the retry schedule of callbacks -------------------------------------------------

# Each app with delaytasks registers the two tags. The package `delaytasks.callbacks` has the bodies
# and sends callbacks, and is imported when there is one.


#: The tag of HTTP callbacks.
CALLBACK = "delaytasks.callback"
#: The tag of messages to queues.
MESSAGE = "delaytasks.message"
#: The retry schedule of callbacks and messages that have none of their own.
RETRY_SCHEDULE = RetrySchedule.NOTIFY
