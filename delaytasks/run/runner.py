"""Claims rows and runs them as chunks: from NOT_COMPLETE by RUNNING to DONE or FAILED.

A `Runner` does one job of the worker's main process at a time and answers with a `Report`:
`run` has the entries of messages that fell due, `run_due` drains a queue from the table, and
`run_waitlist` serves the waitlist of a limited tag. The first two serve the waitlists that they
have met, too.

In a backlog, a process would wait between two chunks for the database and for the worker's main
process. Therefore `run_due` continues with further chunks, and while the runner's thread runs a
chunk, another thread settles the previous chunk and claims the next one:

    runner's thread    claim 1 | run 1   | run 2             | run 3
    other thread               | claim 2 | settle 1, claim 3 | settle 2, claim 4

At most one chunk is claimed ahead. If that chunk has to wait for a slow row, the thread of the time
budget gives it back two time budgets after its claim. (It cannot while the slow row holds Python's
GIL. The leases of the chunk are renewed meanwhile.) Therefore the other thread rests before its
claim until the rows have one time budget left, as far as the times of their tags are known.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.model.clock import fork_safe, monotonic
from delaytasks.model.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.model.inputs import MAX_SLOTS
from delaytasks.model.moves import BroughtBy, Status
from delaytasks.model.policies import WaitlistState
from delaytasks.model.task import Claimed, DelayedTask, Entry, Settlement
from delaytasks.run.calls import Calls, Host
from delaytasks.run.chunk import Chunk, ChunkRunner, ChunkSize, Tally
from delaytasks.run.observers import Counted, Observer, RunCounter, RunLog

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
#: The rows of a chunk that is settled later take at least this time on average. With shorter ones
#: the other thread would compete for the interpreter, and bursts of empty tasks were slower.
SLOW_ROW_S = 0.0005

#: Claims up to a number of rows.
Claim = Callable[[int], Claimed]


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
        """Classify what a chunk raised in its process; `db` has typed the driver's errors."""
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
    #: What the process has counted since its last report.
    statistics: Counted = {}
    #: The rows and seconds from which the size of the next chunk is learned.
    sample: tuple[int, float] = (0, 0.0)


class _ClaimedChunk(NamedTuple):
    """The result of one claim."""

    chunk: Chunk
    claimed: Claimed
    #: Whether the claim got as many rows as it asked for, so that there are probably more.
    is_full: bool


class Runner:
    """Runs chunks in one process, which is its `host`."""

    def __init__(self, runtime: Runtime, host: Host) -> None:
        self._settings, self._clock, self._events = runtime.settings, runtime.clock, runtime.events
        self._host, self._claims, self._admission = host, host.claims, host.admission
        self._policies = runtime.policy_cache
        self._counter = RunCounter() if self._settings.statistics else None
        self._observers = list[Observer]()
        if self._counter is not None:
            self._observers.append(self._counter)
        if self._settings.log_format == "json":
            self._observers.append(RunLog(runtime.events))
        self._own_observers = len(self._observers)
        self._chunks = ChunkRunner(Calls(runtime, host, self._observers))
        #: The next time for recovered rows, by queue.
        self._recovered_at: dict[str, float] = {}
        #: The chunk size of each waitlist. Rows beyond the time budget would occupy slots and not
        #: run.
        self._sizes: dict[str, ChunkSize] = {}
        fork_safe(self)

    def after_fork(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_SLOTS, "delaytasks-claim-ahead")

    def watch(self, watcher: Observer | None) -> None:
        """From now on, let `watcher` observe the runs instead of the last one."""
        self._observers[self._own_observers :] = [] if watcher is None else [watcher]
        self._chunks.is_watched = watcher is not None

    # -- the entries of messages ------------------------------------------------------------------

    def run(self, entries: Sequence[Entry], for_s: float = 0) -> Report:
        """Run the entries of messages that fell due, and then their waitlists for `for_s`."""
        claimed_at, tally = monotonic(), Tally(BroughtBy.ENTRY)
        claimed = self._claims.claim(entries)
        tally.claimed += len(claimed)
        with self._chunks.opened(claimed, claimed_at) as chunk:
            self._chunks.run(chunk, tally, self._host.may_detach)
            if self._settles_later(claimed, tally):
                self._chunks.settle_later(chunk)
        early, seen = tuple[Entry, ...](), claimed.seen.waitlists
        if len(claimed) + claimed.seen.held < len(entries):
            got = {task.id for task in claimed}
            missing = {(one.id, one.version): one for one in entries if one.id not in got}
            early, more_seen = self._run_missing(missing, tally)
            seen = seen | more_seen
        states = self._run_waitlists(seen, len(entries), for_s, tally)
        return self._report(tally, early=early, waitlists=states)

    def _settles_later(self, claimed: Claimed, tally: Tally) -> bool:
        """Whether the process takes its next chunk while another thread settles this one.

        A waitlist needs the slots of the rows that have ended.
        """
        if not self._host.memory.others_wait or claimed.seen.waitlists:
            return False
        return self._host.may_detach and tally.seconds >= SLOW_ROW_S * tally.ran

    def _run_missing(
        self, missing: dict[tuple[int, int], Entry], tally: Tally
    ) -> tuple[tuple[Entry, ...], Set[tuple[str, str]]]:
        """Run the missing entries (by id and version) that can run now, and return the early ones.

        An entry that is early within the clock tolerance is waited for, and a recovered row is
        claimed alone. All other entries are dropped: they were cancelled or moved, or another
        process has them. So are those of rows that were touched and are due far beyond the horizon
        now: a touch leaves the version as it is, and a sweep arms the row again in time.
        """
        found = self._claims.unclaimed({id for id, _ in missing})
        rows = [
            row
            for row in found
            if (row.id, row.version) in missing and row.status is Status.NOT_COMPLETE
        ]
        soon_us = self._clock.now_us() + CLOCK_TOLERANCE_US
        if any(row.due_us <= soon_us for row in rows):
            # The process's time differs from the database's, or a row was locked for a moment.
            self._clock.forget()
            soon_us = self._clock.now_us() + CLOCK_TOLERANCE_US
        due = [row for row in rows if row.due_us <= soon_us]
        latest_us = soon_us + 2e6 * (self._settings.horizon_s or math.inf)
        early = tuple(
            missing[row.id, row.version]._replace(due_us=row.due_us)
            for row in rows
            if soon_us < row.due_us <= latest_us
        )
        if dropped := len(missing) - len(due) - len(early):
            self._events.emit("entry.dropped", count=dropped)
        if not due:
            return early, frozenset()
        wait_us = max(row.due_us for row in due) - (soon_us - CLOCK_TOLERANCE_US)
        time.sleep((max(wait_us, 0) + CLOCK_TOLERANCE_SLACK_US) / 1e6)
        claimed_at = monotonic()
        claimed = self._claims.claim(
            [missing[row.id, row.version] for row in due if not row.lapses]
        )
        tally.claimed += len(claimed)
        with self._chunks.opened(claimed, claimed_at) as chunk:
            self._chunks.run(chunk, tally, self._host.may_detach)
        seen = claimed.seen.waitlists
        for row in due:
            if row.lapses:
                claimed_at = monotonic()
                claimed = self._claims.claim_alone(row.id, row.version)
                self._run_alone(claimed, claimed_at, tally)
                seen = seen | claimed.seen.waitlists
        return early, seen

    # -- a drain ----------------------------------------------------------------------------------

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
        began, tally, settings = monotonic(), Tally(BroughtBy.DRAIN), self._settings
        budget_s = settings.chunk_time_budget_s
        is_turn_of_recovered = began >= self._recovered_at.setdefault(queue, began + RECOVERED_S)
        most = limit - 1 if is_turn_of_recovered else limit
        claim = partial(self._claims.claim_due, queue, priorities)
        size = ChunkSize(budget_s, settings.chunk_max, most)
        until, drained = began + continue_s, dict[int, int]()
        ended, current = None, self._claim_chunk(claim, most)
        while True:
            ahead: Future[_ClaimedChunk] | None = None
            has_run, (rows, seconds) = threading.Event(), tally.sample
            tally.claimed += len(current.claimed)
            drained.update((task.id, task.version) for task in current.claimed)
            try:
                if self._may_continue(current, until):
                    rest_s = self._chunks.costs.expected_s(current.chunk.waiting) - budget_s
                    rest = partial(has_run.wait, max(rest_s, 0.0))
                    ahead = self._threads.submit(
                        self._close_and_claim, ended, claim, size.rows, rest, until
                    )
                elif ended is not None:
                    self._chunks.close(ended)
                self._chunks.run(current.chunk, tally, self._host.may_detach)
                has_run.set()
                if ahead is None:
                    break
                ran, took_s = tally.sample
                size.learn(ran - rows, took_s - seconds, tally.wanted_next)
                ended, current = current.chunk, ahead.result()
            except BaseException as error:
                has_run.set()
                self._give_up(current.chunk, ahead, error)
                raise
        self._chunks.close(current.chunk)
        is_full, seen = current.is_full, current.claimed.seen.waitlists
        if is_turn_of_recovered or not is_full:
            recovered = self._run_recovered(queue, priorities, tally)
            is_full = bool(recovered) or is_full
            seen = seen | recovered.seen.waitlists
        waitlists = seen
        if not is_full or is_turn_of_recovered:
            waitlists = seen | self._admission.in_queue(queue)
        # During a backlog, waitlists that no claim has seen get chunks of their own, or they would
        # delay the backlog.
        later = waitlists - seen if is_full else set()
        states = self._run_waitlists(waitlists - later, limit, for_s, tally)
        states += tuple(WaitlistState(*waitlist, None) for waitlist in sorted(later))
        return self._report(tally, is_full=is_full, drained=drained, waitlists=states)

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

    # -- a backlog, in which the next chunk is claimed while the current one runs -----------------

    def _may_continue(self, current: _ClaimedChunk, until: float) -> bool:
        if not current.chunk.rows or not current.is_full or current.claimed.seen.waitlists:
            return False
        # Rows that are claimed ahead would be lost with the process, which a time limit may end.
        if any(task.tag in self._host.registry.time_limits for task in current.claimed):
            return False
        return self._has_time(until)

    def _has_time(self, until: float) -> bool:
        return monotonic() < until and not self._host.memory.others_wait

    def _close_and_claim(
        self, ended: Chunk | None, claim: Claim, most: int, rest: Callable[[], object], until: float
    ) -> _ClaimedChunk:
        """Run in another thread while a chunk runs; `rest` ends with it at the latest."""
        if ended is not None:
            self._chunks.close(ended)
        rest()
        self._policies.current()
        most = most if self._has_time(until) else 0
        return self._claim_chunk(claim, most, self._settings.chunk_time_budget_s)

    def _claim_chunk(self, claim: Claim, most: int, waits_s: float = 0.0) -> _ClaimedChunk:
        claimed_at = monotonic()
        claimed = claim(most) if most else Claimed()
        chunk = self._chunks.open(claimed, claimed_at, waits_s)
        return _ClaimedChunk(chunk, claimed, len(claimed) + claimed.seen.held >= most)

    def _give_up(
        self, current: Chunk, ahead: Future[_ClaimedChunk] | None, raised: BaseException
    ) -> None:
        """Close the chunk that ran, and give back the one that was claimed meanwhile."""
        try:
            self._chunks.close(current)
        finally:
            error = None if ahead is None else ahead.exception()
            if ahead is not None and error is None:
                self._chunks.close(ahead.result().chunk)
            elif error is not None and error is not raised:
                self._events.failed("claim ahead", error)

    # -- waitlists of limited tags: when a task ends, the next one runs in its slot ---------------

    def run_waitlist(self, queue: str, tag: str, limit: int, for_s: float) -> Report:
        """Run tasks of one waitlist as long as there is capacity for them."""
        tally = Tally(BroughtBy.WAITLIST)
        state = self._run_one_waitlist(queue, tag, limit, for_s, tally)
        return self._report(tally, waitlists=() if state is None else (state,))

    def _run_waitlists(
        self, waitlists: Set[tuple[str, str]], limit: int, for_s: float, tally: Tally
    ) -> tuple[WaitlistState, ...]:
        """Run tasks of these waitlists for `for_s`, and return the waitlists to go on with."""
        until, states = monotonic() + for_s, list[WaitlistState | None]()
        for number, (queue, tag) in enumerate(sorted(waitlists)):
            if number and monotonic() >= until:
                states.append(WaitlistState(queue, tag, None))
            else:
                states.append(self._run_one_waitlist(queue, tag, limit, for_s, tally))
        return tuple(state for state in states if state is not None)

    def _run_one_waitlist(
        self, queue: str, tag: str, limit: int, for_s: float, tally: Tally
    ) -> WaitlistState | None:
        """Run tasks of one waitlist; return None if it is empty."""
        until, is_first, settings = monotonic() + for_s, True, self._settings
        processor = self._host.registry.get(tag)
        # How many tasks of the tag this process starts simultaneously.
        parallel = 1 if processor is None else (processor.in_flight or 1) * (processor.batch or 1)
        size = self._sizes.setdefault(
            tag, ChunkSize(settings.chunk_time_budget_s, settings.chunk_max, 1)
        )
        while True:
            claimed_at, most = monotonic(), max(min(size.rows, limit), parallel)
            tasks, state = self._admission.admit(queue, tag, most, parallel)
            if not tasks and (state is None or state.recheck_s > until - monotonic()):
                return state
            if not tasks and state is not None:
                time.sleep(state.recheck_s)
                continue
            if is_first:
                # The wait for the lock does not count. Processes that began together end at
                # different times.
                until, is_first = monotonic() + for_s * random.uniform(0.5, 1), False
            is_scarce = state is not None and not state.open
            while tasks:
                least = 1 if is_scarce else min(size.rows, limit)
                admitted, of_chunk = list[DelayedTask](), Tally(BroughtBy.WAITLIST)
                settle = partial(self._settle_and_admit, queue, tag, least, until, admitted)
                if tasks[0].lapses:  # a recovered row is admitted alone
                    self._chunks.wait_for_detached()
                with self._chunks.opened(tasks, claimed_at, settle) as chunk:
                    self._chunks.run(chunk, of_chunk, may_detach=False)
                tally.claimed += len(tasks)
                tally.add(of_chunk.ran, of_chunk.seconds)
                size.learn(of_chunk.ran, of_chunk.seconds)
                tasks, claimed_at = admitted, monotonic()
            if state is not None and monotonic() >= until:
                return state._replace(open=state.open or 1)

    def _settle_and_admit(
        self,
        queue: str,
        tag: str,
        least: int,
        until: float,
        admitted: list[DelayedTask],
        settlements: Sequence[Settlement],
    ) -> set[int]:
        """Settle tasks, and until the end admit the next ones to the slots of at least `least`."""
        if monotonic() >= until or len(settlements) < least:
            return self._claims.settle(settlements)
        accepted, next_tasks = self._admission.settle_and_admit(settlements, queue, tag)
        admitted.extend(next_tasks)
        return accepted

    # -- reports ----------------------------------------------------------------------------------

    @property
    def detached(self) -> tuple[int, ...]:
        """The ids of rows that still run in this process although their chunks are over."""
        return self._chunks.detached

    def take_statistics(self) -> Counted:
        """Return what was counted since the last call, and count anew."""
        return {} if self._counter is None else self._counter.take()

    def finish(self) -> None:
        """Wait until the concurrent rows of past chunks have ended and are settled."""
        self._chunks.finish()

    def _report(self, tally: Tally, **others: Any) -> Report:
        return Report(
            tally.claimed,
            tally.ran,
            tally.seconds,
            wanted=tally.wanted_next,
            pid=os.getpid(),
            detached=self._chunks.detached,
            statistics=self.take_statistics(),
            sample=tally.sample,
            **others,
        )
