"""The trace context that travels with a task in its meta, from the scheduling call to the run.

Integrations with Sentry and OpenTelemetry add a source. The sources belong to the process, as the
tracers of these libraries do. Without a source, scheduling a task costs nothing more.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence

from delaytasks.core.errors import InvalidMetaError
from delaytasks.core.meta import decode_meta, encode_meta
from delaytasks.core.task import DelayTask

#: Returns the pairs of meta for new tasks of one tag. The tasks are not written yet.
TraceSource = Callable[[str, Sequence[DelayTask]], Mapping[str, str]]

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


def add_trace(tasks: Sequence[DelayTask]) -> None:
    """Add the trace context of the caller to the meta of new tasks."""
    if not _sources:
        return
    by_tag: dict[str, list[DelayTask]] = {}
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


def _add(tasks: Sequence[DelayTask], pairs: Mapping[str, str]) -> None:
    """Add pairs to the meta. The caller's own pairs take precedence."""
    texts: dict[str | None, str | None] = {}
    for task in tasks:
        known = task.meta_json
        if known not in texts:
            try:
                texts[known] = encode_meta({**pairs, **decode_meta(known)})
            except InvalidMetaError:  # there is no room for them
                texts[known] = known
        task.meta_json = texts[known]
