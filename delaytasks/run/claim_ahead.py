"""Claims the next chunk of a backlog while the current one runs.

Otherwise a process would wait between two chunks for the database and for the worker's main
process. While the runner's thread runs a chunk, another thread settles the previous chunk and
claims the next one:

    runner's thread    claim 1 | run 1   | run 2             | run 3
    other thread               | claim 2 | settle 1, claim 3 | settle 2, claim 4

Each yield of `ClaimAhead.chunks` is one "run": the caller runs the chunk, and then asks for the
next one, which waits for the other thread. At most one chunk is claimed ahead. If that chunk has to
wait for a slow row, the thread of the time budget gives it back two time budgets after its claim.
(It cannot while the slow row holds Python's GIL. The leases of the chunk are renewed meanwhile.)
Therefore the other thread waits with the claim if the tag of a row is known to take longer, until
the row has one time budget left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from delaytasks.model.clock import monotonic, reset_in_child
from delaytasks.model.task import Claimed
from delaytasks.model.workers import ChunkSize
from delaytasks.registry import MAX_SLOTS
from delaytasks.run.chunk import Chunk
from delaytasks.run.chunk_runner import ChunkRunner, TagCosts, Tally
from delaytasks.run.executor import Host

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

#: The longest time from the claim of a row to its start, in time budgets. A chunk that is claimed
#: ahead waits for the budget of the current one, too.
MAX_BUDGETS = 2
#: Claims up to a number of rows.
Claim = Callable[[int], Claimed]


class ClaimedChunk(NamedTuple):
    """The result of one claim. `chunk` is None if there is no row that may run."""

    chunk: Chunk | None
    claimed: Claimed
    #: Whether the claim got as many rows as it asked for, so that there are probably more.
    is_full: bool
    #: Whether a row of the chunk has a time limit, which may end the process.
    may_end_process: bool


class _Pause:
    """Lets a claim wait while a chunk runs."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = monotonic() + seconds
        self._has_ended = threading.Event()
        self._is_given_up = False

    def wait(self) -> bool:
        """Wait for the end of the pause. Return False if the chunk was given up meanwhile."""
        self._has_ended.wait(max(self._until - monotonic(), 0))
        return not self._is_given_up

    def end(self, is_given_up: bool = False) -> None:
        self._is_given_up = is_given_up
        self._has_ended.set()


class ClaimAhead:
    def __init__(self, runtime: Runtime, host: Host, chunks: ChunkRunner, costs: TagCosts) -> None:
        self._budget_s = runtime.settings.chunk_time_budget_s
        self._chunk_max = runtime.settings.chunk_max
        self._events = runtime.events
        self._registry, self._has_others = host.registry, host.has_others
        self._chunks, self._costs = chunks, costs
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
            pause = _Pause(self._pause_s(current))
            rows_to_claim = partial(self._rows_to_claim, pause, size, until)
            beside = self._threads.submit(self._close_and_claim, ended, claim, rows_to_claim)
            before = tally.sample
            tally.claimed += len(current.claimed)
            try:
                yield current
                tally.add(*self._chunks.ended())
                rows, seconds = tally.sample
                size.learn(rows - before.rows, seconds - before.seconds, tally.wanted_next)
                pause.end()
                ended, current = current.chunk, beside.result()
            except BaseException as error:
                pause.end(is_given_up=True)
                self._give_up(current, beside, error)
                raise
        tally.claimed += len(current.claimed)
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
        if current.may_end_process or current.claimed.seen.waitlists:
            return False
        return monotonic() < until and not self._has_others()

    def _close_and_claim(
        self, ended: Chunk | None, claim: Claim, rows_to_claim: Callable[[], int]
    ) -> ClaimedChunk:
        """Run in another thread while a chunk runs."""
        self._close(ended)
        return self._claim(claim, rows_to_claim(), self._budget_s)

    def _pause_s(self, current: ClaimedChunk) -> float:
        """Return how long to wait with the next claim, so that its chunk is not given back."""
        assert current.chunk is not None
        expected_s = self._costs.expected_s(current.chunk.waiting)
        return expected_s - self._budget_s if expected_s > MAX_BUDGETS * self._budget_s else 0.0

    def _rows_to_claim(self, pause: _Pause, size: ChunkSize, until: float) -> int:
        """Return the size of the next chunk after the pause; 0 if the process should report."""
        if pause.seconds == 0:
            return size.rows
        may_claim = pause.wait() and monotonic() < until and not self._has_others()
        return size.rows if may_claim else 0

    def _claim(self, claim: Claim, most: int, waits_s: float = 0.0) -> ClaimedChunk:
        claimed_at = monotonic()
        claimed = claim(most) if most else Claimed()
        chunk = self._chunks.open(claimed, claimed_at, waits_s)
        is_full = len(claimed) + claimed.seen.held >= most
        may_end_process = any(task.tag in self._registry.time_limits for task in claimed)
        return ClaimedChunk(chunk, claimed, is_full, may_end_process)

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
