"""The tags and queues that the fields of filters suggest."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from delaytasks.client import DelayTasks
from delaytasks.console.requests import state
from delaytasks.console.tag_runs import read_tags
from delaytasks.core.errors import StoreError
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.run_counts import OTHER_TAGS
from delaytasks.runtime import runtime_of

#: The most names of each kind, and the seconds for which all viewers see the same ones.
MOST_SUGGESTED, KNOWN_S = 200, 60.0


class KnownNames(NamedTuple):
    """Names in the order of the alphabet."""

    tags: list[str]
    queues: list[str]


def known_names() -> KnownNames:
    """Return the tags and queues of workers, policies and statistics.

    No task is read. Of more than `MOST_SUGGESTED` tags, those of policies and workers come first,
    and then those with the most runs of the last hour.
    """
    shared = state()
    return shared.history.get("known_names", KNOWN_S, lambda: _read(shared.delays))


def _read(delays: DelayTasks) -> KnownNames:
    """Read the names. Those of a database that does not answer are left out."""
    tags, queues = dict[str, None](), {delays.settings.default_queue: None}
    now = runtime_of(delays).clock.now()
    for shard in runtime_of(delays).shards:
        with suppress(StoreError):
            for policy in shard.store.policies.read():
                (tags if policy.kind == "tag" else queues)[policy.name] = None
            for worker in shard.store.workers.registered(now, delays.settings.silent_s):
                tags.update(dict.fromkeys(worker.tags or ()))
                queues.update(dict.fromkeys(worker.queues))
    with suppress(StoreError):
        tags.update(dict.fromkeys(each.tag for each in read_tags("hour").tags))
    tags.pop(OTHER_TAGS, None)
    queues.pop(ALL_QUEUES, None)
    return KnownNames(_first(tags), _first(queues))


def _first(names: Iterable[str]) -> list[str]:
    return sorted(islice(names, MOST_SUGGESTED))
