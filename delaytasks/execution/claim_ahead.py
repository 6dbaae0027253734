"""Claims the next chunk of a backlog while the current one runs.

Otherwise a process would wait between two chunks for the database and for the worker's main
process. While the runner's thread runs a chunk, another thread settles the previous chunk and
claims the next one:

    runner's thread    claim 1 | run 1   | run 2             | run 3
    other thread               | claim 2 | settle 1, claim 3 | settle 2, claim 4

Each yield of `ClaimAhead.chunks` is one "run": the caller runs the chunk, and then asks for the
next one, which waits for the other thread. At most one chunk is claimed ahead. If that chunk has to
wait for a slow row, the thread of the time budget gives it back two time budgets after its claim.
Therefore the other thread waits with the claim if the tag of a row is known to take longer, until
the row has one time budget left.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from delaytasks.core.chunk_size import ChunkSize
from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events
from delaytasks.core.forks import reset_in_child
from delaytasks.core.interfaces import Claimed
from delaytasks.core.settings import Settings
from delaytasks.core.waitlists import WaitlistsSeen
from delaytasks.execution.chunk import Chunk
from delaytasks.execution.chunk_runner import ChunkRunner
from delaytasks.execution.tag_costs import TagCosts
from delaytasks.execution.tally import Tally
from delaytasks.processors.registry import Registry
from delaytasks.processors.thread_slots import MAX_SLOTS

#: The longest time from the claim of a row to its start, in time budgets. A chunk that is claimed
#: ahead waits for the budget of the current one, too.
MAX_BUDGETS = 2
#: Claims up to a number of rows.
Claim = Callable[[int], Claimed]


class ClaimedChunk(NamedTuple):
    """The result of one claim. `chunk` is None if there is no row that may run."""

    chunk: Chunk | None
    rows: int
    #: Whether the claim got as many rows as it asked for, so that there are probably more.
    is_full: bool
    seen: WaitlistsSeen
    #: Whether a row of the chunk has a time limit, which may end the process.
    may_end_process: bool


class ClaimAhead:
    """`has_others` returns whether other tasks than those of a backlog wait for this process."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        chunks: ChunkRunner,
        costs: TagCosts,
        events: Events,
        has_others: Callable[[], bool],
    ) -> None:
        self._budget_s = settings.chunk_time_budget_s
        self._chunk_max = settings.chunk_max
        self._registry = registry
        self._chunks = chunks
        self._costs = costs
        self._events = events
        self._has_others = has_others
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_SLOTS, "delaytasks-claim-ahead")

    def chunks(
        self, claim: Claim, most: int, for_s: float, tally: Tally
    ) -> Generator[ClaimedChunk, None, None]:
        """Yield a chunk of up to `most` rows to run and, in a backlog, further ones for `for_s`.

        Each chunk is closed here after it ran and was counted in `tally`. Close the generator, so
        that this happens also if running a chunk raises.
        """
        size, ended = ChunkSize(self._budget_s, self._chunk_max, most), None
        until = monotonic() + for_s
        current = self._claim(claim, most)
        while self._may_continue(current, until):
            has_run = threading.Event()
            wait = partial(self._wait, self._claim_time(current), has_run, until)
            beside = self._threads.submit(self._close_and_claim, ended, claim, size.rows, wait)
            before = tally.sample
            tally.claimed += current.rows
            try:
                yield current
                has_run.set()
                tally.add(*self._chunks.ended())
                rows, seconds = tally.sample
                size.learn(rows - before.rows, seconds - before.seconds, tally.wanted_next)
                ended, current = current.chunk, beside.result()
            except BaseException as error:
                has_run.set()
                self._give_up(current, beside, error)
                raise
        tally.claimed += current.rows
        try:
            self._close(ended)
            yield current
        finally:
            self._close(current.chunk)

    def _may_continue(self, current: ClaimedChunk, until: float) -> bool:
        if current.chunk is None or not current.is_full:
            return False
        # Rows that are claimed ahead would be lost with the process. Waitlists have their own
        # runner.
        if current.may_end_process or current.seen.waitlists:
            return False
        return monotonic() < until and not self._has_others()

    def _close_and_claim(
        self, ended: Chunk | None, claim: Claim, most: int, wait: Callable[[], bool]
    ) -> ClaimedChunk:
        """Run in another thread while a chunk runs. Claim nothing if `wait` returns False."""
        self._close(ended)
        return self._claim(claim, most if wait() else 0, self._budget_s)

    def _claim_time(self, current: ClaimedChunk) -> float:
        """Return when the next chunk is to be claimed, so that it is not given back again."""
        assert current.chunk is not None
        expected_s = self._costs.expected_s(current.chunk.waiting)
        is_slow = expected_s > MAX_BUDGETS * self._budget_s
        return monotonic() + expected_s - self._budget_s if is_slow else -math.inf

    def _wait(self, claim_time: float, has_run: threading.Event, until: float) -> bool:
        """Wait for `claim_time`, or until the chunk has run. Return whether to claim at all."""
        if claim_time == -math.inf:
            return True
        has_run.wait(max(claim_time - monotonic(), 0))
        return monotonic() < until and not self._has_others()

    def _claim(self, claim: Claim, most: int, waits_s: float = 0.0) -> ClaimedChunk:
        claimed_at = monotonic()
        claimed = claim(most) if most else Claimed()
        chunk = self._chunks.open(claimed, claimed_at, waits_s)
        is_full = len(claimed) + claimed.seen.held >= most
        may_end_process = any(task.tag in self._registry.time_limits for task in claimed)
        return ClaimedChunk(chunk, len(claimed), is_full, claimed.seen, may_end_process)

    def _close(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            self._chunks.close(chunk)

    def _give_up(
        self, current: ClaimedChunk, beside: Future[ClaimedChunk], raised: BaseException
    ) -> None:
        """Close the chunk that ran, and give back the one that was claimed meanwhile."""
        try:
            self._close(current.chunk)
        finally:
            error = beside.exception()
            if error is None:
                self._close(beside.result().chunk)
            elif error is not raised:
                self._events.failed("claim ahead", error)
