"""The seam to the package `limits`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import cached_property, partial
from typing import TYPE_CHECKING

from delaytasks.core.interfaces import Settle
from delaytasks.core.policies import Policy, WaitlistsSeen, WaitlistState
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask
from delaytasks.execution.chunk_runner import ChunkRunner
from delaytasks.execution.tally import Tally
from delaytasks.processors.registry import Registry

if TYPE_CHECKING:
    from delaytasks.limits.waitlist import Waitlist
    from delaytasks.limits.waitlist_runner import WaitlistRunner
    from delaytasks.storage.claims import Claims, HoldExcess
    from delaytasks.storage.store import Store


class LimitLoader:
    """Imports the package `limits` once a tag of a database has limits, or a queue a waitlist.

    `limited` returns the policies with limits, by tag, as this process knows them.
    """

    def __init__(self, store: Store, limited: Callable[[], Mapping[str, Policy]]) -> None:
        self._store = store
        self._limited = limited
        self.waitlists_in = store.waitlist_names.in_queue

    @cached_property
    def waitlist(self) -> Waitlist:
        from delaytasks.limits.waitlist import Waitlist

        return Waitlist(self._store.database, self._store.schema, self._limited)

    def hold_excess(self) -> HoldExcess | None:
        """Return what holds the rows beyond the limits; None while no tag has limits."""
        return self.waitlist.hold_excess if self._limited() else None


class Waitlists:
    """The waitlists of one database, in a process that runs their tasks.

    Without waitlists it does nothing, and does not import the package `limits`.
    """

    def __init__(
        self,
        limits: LimitLoader,
        settings: Settings,
        registry: Registry,
        claims: Claims,
        chunks: ChunkRunner,
    ) -> None:
        self._limits = limits
        self._settings = settings
        self._registry = registry
        self._claims = claims
        self._chunks = chunks
        self.in_queue = limits.waitlists_in

    @cached_property
    def runner(self) -> WaitlistRunner:
        from delaytasks.limits.admission import Admission
        from delaytasks.limits.waitlist_runner import WaitlistRunner

        waitlist = self._limits.waitlist
        admission = Admission(waitlist, self._claims)
        return WaitlistRunner(self._settings, self._registry, waitlist, admission)

    def hold_backlog(self, seen: WaitlistsSeen, asked: int, levels: Set[tuple[str, int]]) -> None:
        """Hold further overdue rows if a claim of `asked` rows held most of them."""
        if seen.waitlists:
            self.runner.hold_backlog(seen, asked, levels)

    def run(
        self, waitlists: Set[tuple[str, str]], limit: int, for_s: float, tally: Tally
    ) -> tuple[WaitlistState, ...]:
        """Run tasks of these waitlists for `for_s`, and return the waitlists to go on with."""
        if not waitlists:
            return ()
        return self.runner.run(waitlists, limit, for_s, self.counting(tally))

    def counting(self, tally: Tally) -> Callable[..., tuple[int, float]]:
        """Return the function that runs admitted tasks, and counts them in `tally`."""
        return partial(self._run_rows, tally)

    def _run_rows(
        self, tally: Tally, tasks: Sequence[DelayTask], claimed_at: float, settle: Settle
    ) -> tuple[int, float]:
        """Run a chunk of admitted tasks; return how many ended, and the time spent on them."""
        of_chunk = Tally()
        with self._chunks.opened(tasks, claimed_at, settle) as chunk:
            self._chunks.run(chunk, of_chunk, may_detach=False)
        of_chunk.add(*self._chunks.ended())
        tally.claimed += len(tasks)
        tally.add(of_chunk.ran, of_chunk.seconds)
        return of_chunk.ran, of_chunk.seconds
