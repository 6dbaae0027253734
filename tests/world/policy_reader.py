"""`PolicyReader`, a process that reads the policies which others change."""

from __future__ import annotations

from delaytasks import Policy
from delaytasks.model.policies import PolicyCache, PolicyRead, Stamp
from tests.world.world import World


class PolicyReader:
    """Reads policies as the processes of a worker do, and counts what each read returned."""

    def __init__(self, world: World) -> None:
        #: The number of policies that each read returned.
        self.read: list[int] = []
        self._table = world.store.policies
        self._cache = PolicyCache(self._changes)

    def _changes(self, known: Stamp | None) -> PolicyRead:
        found = self._table.unless_known(known)
        self.read.append(0 if found.policies is None else len(found.policies.all))
        return found

    def refresh(self) -> dict[str, Policy]:
        """Read the policies if they have changed, and return them."""
        self._cache.refresh()
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
