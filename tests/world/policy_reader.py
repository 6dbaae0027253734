"""`PolicyReader`, a process that reads the policies which others change."""

from __future__ import annotations

from collections.abc import Callable

from delaytasks import Policy
from delaytasks.model.policies import Changes, PolicyCache, Stamp
from tests.world.world import World


class PolicyReader:
    """Reads policies as the processes of a worker do, and counts what each read returned."""

    def __init__(self, world: World) -> None:
        #: The number of policies that each read returned, and the number of reads of all policies.
        self.read: list[int] = []
        self.whole_reads = 0
        #: Called after each read, before its result is used.
        self.after_read: Callable[[], object] = lambda: None
        self._table = world.store.policies
        self._cache = PolicyCache(self._changes)

    def _changes(self, since: int | None, checks: bool) -> Changes:
        found = self._table.changes(since, checks)
        self.read.append(len(found.policies))
        self.whole_reads += found.is_whole
        self.after_read()
        return found

    def refresh(self, checks: bool = False) -> dict[str, Policy]:
        """Read the changes, or compare the whole table with what is known; return all policies."""
        self._cache.refresh(checks)
        return self.known

    def follow(self, stamp: Stamp | None) -> dict[str, Policy]:
        """Read the policies unless they have the stamp that came from the main process."""
        self._cache.follow(stamp)
        return self.known

    @property
    def known(self) -> dict[str, Policy]:
        return {policy.name: policy for policy in self._cache.known.all}

    @property
    def paused(self) -> set[str]:
        return self._cache.known.paused_tags

    @property
    def stamp(self) -> Stamp | None:
        return self._cache.stamp
