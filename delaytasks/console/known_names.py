"""The tags and queues that the fields of filters suggest."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import NamedTuple

from delaytasks.client import DelayTasks
from delaytasks.console.requests import state
from delaytasks.core.errors import StoreError
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.run_counts import OTHER_TAGS
from delaytasks.wiring import wiring_of

#: The most names of each kind, and the seconds for which all viewers see the same ones.
MOST_SUGGESTED, KNOWN_S = 200, 60.0


class KnownNames(NamedTuple):
    """Names in the order of the alphabet."""

    tags: list[str]
    queues: list[str]


def known_names() -> KnownNames:
    """Return the tags and queues of workers, policies and statistics.

    No task is read. If there are more than `MOST_SUGGESTED` tags, those with the most runs of the
    last day are returned.
    """
    shared = state()
    return shared.cache.get("known_names", KNOWN_S, lambda: _read(shared.delays))


def _read(delays: DelayTasks) -> KnownNames:
    """Read the names. Those of a database that does not answer are left out."""
    tags, queues = Counter[str](), Counter[str]([delays.settings.default_queue])
    now = wiring_of(delays).clock.now()
    for shard in wiring_of(delays).shards:
        with suppress(StoreError):
            for policy in shard.store.policies.read():
                (tags if policy.kind == "tag" else queues)[policy.name] += 1
            for worker in shard.store.workers.registered(now, delays.settings.silent_s):
                tags.update(worker.tags or ())
                queues.update(queue for queue in worker.queues if queue != ALL_QUEUES)
    with suppress(StoreError):
        for tag, total in delays.statistics.totals(since="1d").items():
            tags[tag] += total.started
    del tags[OTHER_TAGS]
    return KnownNames(_first(tags), _first(queues))


def _first(names: Counter[str]) -> list[str]:
    return sorted(name for name, _ in names.most_common(MOST_SUGGESTED))
