"""Claims rows and runs them as chunks: from NOT_COMPLETE by RUNNING to DONE or FAILED."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from delaytasks.limits.admission import Admission
from delaytasks.limits.waitlist_runner import RunRows, WaitlistRunner
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.model.moves import Status
from delaytasks.model.policies import NO_WAITLISTS, WaitlistsSeen, WaitlistState
from delaytasks.model.task import Claimed, DelayedTask, Entry, Settle
from delaytasks.run.chunk_runner import ChunkRunner, SizeSample, TagCosts, Tally
from delaytasks.run.claim_ahead import MAX_BUDGETS, ClaimAhead
from delaytasks.run.executor import Host, Lease, TaskExecutor
from delaytasks.run.run_counts import RunStatistics
from delaytasks.run.settlement import RunCounter, Settler

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


#: A message that is early by less than this is waited for: clocks differ by a fraction of it.
CLOCK_TOLERANCE_US = 50_000
#: The additional wait, since some databases return the time in whole milliseconds.
CLOCK_TOLERANCE_SLACK_US = 2_000
#: During a backlog, recovered rows are looked for again after this time, and after the look's
#: duration times `RECOVERED_SHARE`, since a look reads the whole backlog. They get at most half of
#: the time of a queue.
RECOVERED_S, RECOVERED_SHARE = 1.0, 20

#: If the rows of a chunk take less time on average, no other thread settles them: it would compete
#: with the next rows for the interpreter, which made bursts of empty tasks slower by a sixth.
SLOW_ROW_S = 0.0005


class FailureReason(Enum):
    """The reason decides which work waits."""

    #: The pool process died. The other processes continue with the queue.
    PROCESS_LOST = "process lost"
    #: The database cannot be reached or cannot work. Only this pauses all chunks.
    UNAVAILABLE = "unavailable"
    #: The database answers and refuses a statement, for example because a table is missing.
    REFUSED = "refused"
    #: Anything else: a bug, a row that cannot be read, or a process that a processor has broken.
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, error: BaseException) -> FailureReason:
        """Classify what a chunk raised in its process; `storage` has typed the driver's errors."""
        if isinstance(error, (StoreUnavailableError, OutcomeUnknownError)):
            return cls.UNAVAILABLE
        return cls.REFUSED if isinstance(error, StoreError) else cls.UNKNOWN


class Report(NamedTuple):
    """The result of a chunk for the worker's main process."""

    claimed: int = 0
    ran: int = 0
    seconds: float = 0.0
    early: tuple[Entry, ...] = ()
    is_full: bool = False
    #: The versions with which a drain has claimed rows, by their ids.
    drained: Mapping[int, int] = {}
    #: The least number of rows for the next chunk, as this chunk's processors require it.
    wanted: int = 0
    #: This process, and its rows that still run although their chunk is over.
    pid: int = 0
    detached: tuple[int, ...] = ()
    #: The text and the kind of the error with which the chunk failed as a whole.
    error: str = ""
    reason: FailureReason = FailureReason.UNKNOWN
    #: The waitlists that a process should go on with.
    waitlists: tuple[WaitlistState, ...] = ()
    #: Events, tags and numbers, if the job asked for counts.
    counts: tuple[tuple[str, str, int], ...] = ()
    #: What the process has counted since its last report.
    statistics: RunStatistics = RunStatistics()
    #: From what the size of the next chunk is learned, if it is not `ran` and `seconds`.
    sample: SizeSample | None = None


class Runner:
    """Runs chunks in one process, which is its `host`."""

    def __init__(self, runtime: Runtime, host: Host) -> None:
        self._settings = settings = runtime.settings
        self._clock, self._events = runtime.clock, runtime.events
        self._claims, waitlist = host.claims, host.waitlist
        self._may_detach, self._has_others = host.may_detach, host.has_others
        self._counter = RunCounter(host.registry) if settings.statistics else None
        max_wait_s = MAX_BUDGETS * settings.chunk_time_budget_s
        lease = Lease(settings.lease_s, max_wait_s, host.last_renewal, host.is_asked_to_stop)
        executor = TaskExecutor(runtime, host, lease, self._counter)
        settler = Settler(runtime, host.claims, self._counter)
        costs = TagCosts(settings.chunk_time_budget_s)
        self._chunks = ChunkRunner(runtime, host, executor, settler, costs)
        self._ahead = ClaimAhead(runtime, host, self._chunks, costs)
        self._waitlists_in = waitlist.in_queue
        admission = Admission(waitlist, host.claims)
        self._waitlists = WaitlistRunner(settings, host.registry, waitlist, admission)
        self._recovered_at: dict[str, float] = {}  # the next time for them, by queue

    def run(self, entries: Sequence[Entry], for_s: float = 0) -> Report:
        """Run the entries of messages that fell due, and then their waitlists for `for_s`."""
        claimed_at, tally = monotonic(), Tally()
        claimed = self._claims.claim(entries)
        # If others wait, the process takes its next chunk while another thread settles this one. A
        # waitlist needs the slots of the rows that have ended.
        is_settled_here = not self._may_detach or claimed.seen.waitlists
        settles_in_background = (
            None if is_settled_here else partial(self._settles_in_background, tally)
        )
        with self._chunks.opened(
            claimed, claimed_at, settles_in_background=settles_in_background
        ) as chunk:
            self._chunks.run(chunk, tally, self._may_detach)
        early, seen = tuple[Entry, ...](), claimed.seen
        if len(claimed) + seen.held < len(entries):
            got = {task.id for task in claimed}
            missing = {(one.id, one.version): one for one in entries if one.id not in got}
            early, more_seen = self._run_missing(missing, tally)
            seen = WaitlistsSeen(seen.waitlists | more_seen.waitlists, seen.held)
        levels = {(entry.queue, entry.priority) for entry in entries}
        self._waitlists.hold_backlog(claimed.seen, len(entries), levels)
        states = self._waitlists.run(seen.waitlists, len(entries), for_s, self._counting(tally))
        return self._report(tally, len(claimed), early, waitlists=states)

    def run_due(
        self,
        queue: str,
        priorities: Sequence[int],
        limit: int,
        for_s: float = 0,
        continue_s: float = 0,
    ) -> Report:
        """Run due rows straight from the table, a recovered row, and the queue's waitlists.

        This is one chunk of a drain. In a backlog, further chunks follow for `continue_s`.
        """
        began, tally = monotonic(), Tally()
        is_turn_of_recovered = began >= self._recovered_at.setdefault(queue, began + RECOVERED_S)
        most = limit - 1 if is_turn_of_recovered else limit
        claim = partial(self._claims.claim_due, queue, priorities)
        drained = dict[int, int]()
        with closing(self._ahead.chunks(claim, most, continue_s, tally)) as chunks:
            for last in chunks:
                drained.update((task.id, task.version) for task in last.claimed)
                self._chunks.run(last.chunk, tally, self._may_detach)
        is_full, seen = last.is_full, last.claimed.seen
        if is_turn_of_recovered or not is_full:
            recovered = self._run_recovered(queue, priorities, tally)
            is_full = bool(recovered) or is_full
            # Held recovered rows are no sign of a backlog.
            seen = WaitlistsSeen(seen.waitlists | recovered.seen.waitlists, seen.held)
        levels = {(queue, priority) for priority in priorities}
        self._waitlists.hold_backlog(seen, limit, levels)
        waitlists = seen.waitlists
        if not is_full or is_turn_of_recovered:
            waitlists = waitlists | self._waitlists_in(queue)
        # During a backlog, waitlists that no claim has seen get chunks of their own, or they would
        # delay the backlog.
        later = waitlists - seen.waitlists if is_full else set()
        states = self._waitlists.run(waitlists - later, limit, for_s, self._counting(tally))
        states += tuple(WaitlistState(*waitlist, None) for waitlist in sorted(later))
        return self._report(
            tally, tally.claimed, is_full=is_full, drained=drained, waitlists=states
        )

    def _settles_in_background(self, tally: Tally) -> bool:
        """Whether another thread should settle a chunk that has run."""
        return tally.seconds >= SLOW_ROW_S * tally.ran and self._has_others()

    def _run_recovered(self, queue: str, priorities: Sequence[int], tally: Tally) -> Claimed:
        """Claim and run one recovered row; it runs alone, since it may kill this process."""
        claimed_at, rest_s = monotonic(), 0.0
        self._recovered_at[queue] = math.inf  # keeps the other threads of this process from it
        try:
            claimed = self._claims.claim_recovered(queue, priorities)
            if claimed:
                self._run_alone(claimed, claimed_at, tally)
                rest_s = monotonic() - claimed_at
            else:
                rest_s = max(RECOVERED_S, RECOVERED_SHARE * (monotonic() - claimed_at))
            return claimed
        finally:
            self._recovered_at[queue] = monotonic() + rest_s

    def _run_alone(self, claimed: Claimed, claimed_at: float, tally: Tally) -> None:
        """Run a recovered row after other chunks have ended, since it may kill this process."""
        if claimed:
            tally.claimed += len(claimed)
            self._chunks.wait_for_detached()
        with self._chunks.opened(claimed, claimed_at) as chunk:
            self._chunks.run(chunk, tally, may_detach=False)

    def run_waitlist(self, queue: str, tag: str, limit: int, for_s: float) -> Report:
        """Run tasks of one waitlist as long as there is capacity for them."""
        tally = Tally()
        state = self._waitlists.run_one(queue, tag, limit, for_s, self._counting(tally))
        return self._report(tally, tally.claimed, waitlists=() if state is None else (state,))

    def _counting(self, tally: Tally) -> RunRows:
        """Return the function that runs admitted tasks, and counts them in `tally`."""

        def run_rows(
            tasks: Sequence[DelayedTask], claimed_at: float, settle: Settle
        ) -> tuple[int, float]:
            of_chunk = Tally()
            with self._chunks.opened(tasks, claimed_at, settle) as chunk:
                self._chunks.run(chunk, of_chunk, may_detach=False)
            of_chunk.add(*self._chunks.ended())
            tally.claimed += len(tasks)
            tally.add(of_chunk.ran, of_chunk.seconds)
            return of_chunk.ran, of_chunk.seconds

        return run_rows

    @property
    def detached(self) -> tuple[int, ...]:
        """The ids of rows that still run in this process although their chunks are over."""
        return self._chunks.detached

    def take_statistics(self) -> RunStatistics:
        """Return what was counted since the last call, and count anew."""
        return RunStatistics() if self._counter is None else self._counter.take()

    def finish(self) -> None:
        """Wait until the concurrent rows of past chunks have ended and are settled."""
        self._chunks.finish()

    def _report(
        self,
        tally: Tally,
        claimed: int,
        early: tuple[Entry, ...] = (),
        is_full: bool = False,
        drained: Mapping[int, int] = {},
        waitlists: tuple[WaitlistState, ...] = (),
    ) -> Report:
        tally.add(*self._chunks.ended())
        ran, seconds = tally.ran, tally.seconds
        return Report(
            claimed,
            ran,
            seconds,
            early,
            is_full,
            drained,
            wanted=tally.wanted_next,
            pid=os.getpid(),
            detached=self._chunks.detached,
            waitlists=waitlists,
            statistics=self.take_statistics(),
            sample=tally.sample if tally.sample != (ran, seconds) else None,
        )

    # -- entries that the claim did not get -------------------------------------------------------

    def _run_missing(
        self, missing: dict[tuple[int, int], Entry], tally: Tally
    ) -> tuple[tuple[Entry, ...], WaitlistsSeen]:
        """Run the missing entries (by id and version) that can run now, and return the early ones.

        An entry that is early within the clock tolerance is waited for, and a recovered row is
        claimed alone. All other entries are dropped: they were cancelled or moved, or another
        process has them.
        """
        soon, early, recovered = self._sort_missing(missing)
        dropped = len(missing) - len(soon) - len(early) - len(recovered)
        if dropped:
            self._events.emit("entry.dropped", count=dropped)
        seen = NO_WAITLISTS
        if soon or recovered:
            # The process's time differs from the database's, or a row was locked for a moment.
            self._clock.forget()
            now = self._clock.now_us()
            early += [entry for entry in soon if entry.due_us > now + CLOCK_TOLERANCE_US]
            soon = [entry for entry in soon if entry.due_us <= now + CLOCK_TOLERANCE_US]
            last_us = max((entry.due_us for entry in soon + recovered), default=now)
            wait_us = max(min(last_us - now, CLOCK_TOLERANCE_US), 0) + CLOCK_TOLERANCE_SLACK_US
            time.sleep(wait_us / 1e6)
            claimed_at = monotonic()
            claimed = self._claims.claim(soon)
            with self._chunks.opened(claimed, claimed_at) as chunk:
                self._chunks.run(chunk, tally, self._may_detach)
            seen = seen.merge(claimed.seen)
        for entry in recovered:
            claimed_at = monotonic()
            claimed = self._claims.claim_alone(entry.id, entry.version)
            self._run_alone(claimed, claimed_at, tally)
            seen = seen.merge(claimed.seen)
        return tuple(early), seen

    def _sort_missing(
        self, missing: dict[tuple[int, int], Entry]
    ) -> tuple[list[Entry], list[Entry], list[Entry]]:
        """Return the missing entries that are due soon, that are early, and that were recovered."""
        now, horizon_s = self._clock.now_us(), self._settings.horizon_s
        soon: list[Entry] = []
        early: list[Entry] = []
        recovered: list[Entry] = []
        for row in self._claims.unclaimed({id for id, _ in missing}):
            entry = missing.get((row.id, row.version))
            if entry is None or row.status is not Status.NOT_COMPLETE:
                continue
            entry = entry._replace(due_us=row.due_us)
            if row.due_us <= now + CLOCK_TOLERANCE_US:
                (recovered if row.lapses else soon).append(entry)
            elif horizon_s is None or row.due_us <= now + horizon_s * 1e6:
                early.append(entry)
        return soon, early, recovered
