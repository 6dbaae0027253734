"""Which queue the tasks of a tag wait in."""

from __future__ import annotations

import re
from fnmatch import translate

from delaytasks.core.settings import Settings
from delaytasks.processors.registry import Registry

_WILDCARD = re.compile(r"\[.*?\]|[*?]")


class QueueRouting:
    """That of the tag's processor, if this process knows it; else what the setting `queues` says of the tag itself;
    else of the pattern that says most of it, in letters that are no wildcards; else the default one."""

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
        """Those that some tag may have."""
        return {self._default, *self._named.values(), *self._registry.queues()}
