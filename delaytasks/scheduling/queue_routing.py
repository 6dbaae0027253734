"""Selects the queue of a tag."""

from __future__ import annotations

import re
from fnmatch import translate

from delaytasks.core.settings import Settings
from delaytasks.processors.registry import Registry

_WILDCARD = re.compile(r"\[.*?\]|[*?]")


class QueueRouting:
    """The queue of the tag's processor, else of the setting `queues`, else the default queue.

    The setting maps tags and patterns to queues. A tag goes before patterns, and a pattern with
    more characters that are no wildcards goes before one with fewer.
    """

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._registry = registry
        self._default = settings.default_queue
        self._named = settings.queues
        patterns = sorted(
            filter(_WILDCARD.search, self._named), key=lambda p: -len(_WILDCARD.sub("", p))
        )
        self._patterns = [
            (re.compile(translate(pattern)), self._named[pattern]) for pattern in patterns
        ]

    def of(self, tag: str) -> str:
        queue = self._registry.queue_of(tag) or self._named.get(tag)
        if queue is not None:
            return queue
        return next(
            (queue for pattern, queue in self._patterns if pattern.match(tag)), self._default
        )

    def all(self) -> set[str]:
        """Return the queues that a tag can have."""
        return {self._default, *self._named.values(), *self._registry.queues()}
