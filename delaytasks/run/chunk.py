"""Runs and settles the rows of one claim: a chunk, which has a time budget.

Rows run one by one, in batches, or concurrently in threads. A chunk starts its rows within its
time budget. Rows that have not begun by then are given back, and those that have ended are
settled, both by the thread of the time budget, since the thread that runs the chunk may be in a
processor for minutes. Concurrent rows that still run go on, and the runner takes the next chunk as
soon as there are free slots; their chunk is *detached*, and the thread of the time budget settles
them when they end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING

from delaytasks.model.clock import fork_safe, monotonic, to_us
from delaytasks.model.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.model.moves import LATE_S, BroughtBy, LateReason, Status, following
from delaytasks.model.task import DelayedTask, Entry, Settle, Settlement
from delaytasks.run.calls import Calls

if TYPE_CHECKING:
    from delaytasks.registry import ProcessorSpec


# -- The number of rows of a chunk ----------------------------------------------------------------


#: Rows of the first chunk, before the speed of the processors is known.
FIRST_SIZE = 10
#: The weight of the last chunk in the estimate, if it was as small as the first; a larger chunk
#: weighs more.
LEARNING = 0.3
#: The most full chunks in one time budget, since claims and settlements take time as well.
MOST_CHUNKS = 5


class ChunkSize:
    """Estimates from past chunks how many rows fit the time budget."""

    def __init__(self, time_budget_s: float, most: int, first: int = FIRST_SIZE) -> None:
        self._time_budget_s = time_budget_s
        self._most = most
        self._first = first
        self._row_s: float | None = None
        self._wanted = 0

    def learn(self, ran: int, seconds: float, wanted: int = 0) -> None:
        """Learn from a chunk.

        `wanted` is the number of rows that its processors can start simultaneously.
        """
        if ran or wanted:
            self._wanted = min(wanted, self._most)
        if ran:
            row_s = seconds / ran
            known = row_s if self._row_s is None else self._row_s
            self._row_s = known + (1 - (1 - LEARNING) ** max(ran / FIRST_SIZE, 1)) * (row_s - known)

    @property
    def rows(self) -> int:
        return min(self.in_time, self._most)

    @property
    def in_time(self) -> int:
        """The rows that one process runs in a time budget, in several chunks if they are short."""
        fitting = (
            self._first if self._row_s is None else self._time_budget_s / max(self._row_s, 1e-6)
        )
        return int(min(max(fitting, self._wanted, 1), self._most * MOST_CHUNKS))

    @property
    def least(self) -> int:
        """The rows that stay together although other processes may be idle."""
        return max(self._wanted, 1)

    @property
    def is_limited_by_time(self) -> bool:
        """Whether rows take so long that the time budget limits a chunk, not its largest size."""
        return self._row_s is not None and self.in_time < self._most

    @property
    def fits(self) -> bool:
        """Whether one row fits the time budget; assumed until the first row has run."""
        return self._row_s is None or self._row_s < self._time_budget_s


# -- The states of the rows of a chunk, and the thread of the time budget -------------------------


class Chunk:
    """The rows of one claim. Each row waits first; then it runs, has ended, and is settled:

        from      method                              to
        waiting   `start`: its run begins             running
        waiting   `give_back`: it will not run here   ended
        running   `end`: its run has a settlement     ended
        running   `end`: it has none                  (abandoned)
        ended     `take_finished`: it is settled      (left)
        (left)    `keep`: it could not be settled     ended

    The thread of the runner starts rows, and the thread of the time budget gives back the rows that
    still wait when the time is over.
    """

    def __init__(self, tasks: Sequence[DelayedTask], leases_end_at: float, budget_s: float) -> None:
        self._lock = threading.Lock()
        #: The number of its rows; none if all claimed rows are held.
        self.rows = len(tasks)
        self._waiting = deque(tasks)
        self._running: set[int] = set()
        self._finished: list[Settlement] = []
        #: The rows that were given back.
        self.returned: list[DelayedTask] = []
        self._leases_end_at = leases_end_at
        self.budget_ends = monotonic() + budget_s
        #: The runner has gone on, and the thread of the time budget settles the rest.
        self.is_detached = False
        #: Locked while the ended rows are settled.
        self.settling = threading.Lock()

    def next(self) -> DelayedTask | None:
        """Return the next waiting row, or None if no row waits or the leases may have ended."""
        try:
            first = self._waiting[0]
        except IndexError:  # the time budget may take all of them meanwhile
            return None
        return first if monotonic() <= self._leases_end_at else None

    def start(self, first: DelayedTask, most: int = 1) -> list[DelayedTask]:
        """Start `first`, and up to `most` rows of its tag together.

        Return the started rows; none if the time budget has given `first` back meanwhile.
        """
        with self._lock:
            if not self._waiting or self._waiting[0] is not first:
                return []
            if most == 1:
                self._running.add(self._waiting.popleft().id)
                return [first]
            started = [task for task in self._waiting if task.tag == first.tag][:most]
            ids = {task.id for task in started}
            self._waiting = deque(task for task in self._waiting if task.id not in ids)
            self._running |= ids
            return started

    def end(self, started: Iterable[DelayedTask], settlements: Iterable[Settlement] = ()) -> None:
        """Record the end of started rows. A row without a settlement is abandoned."""
        with self._lock:
            for task in started:
                self._running.discard(task.id)
            self._finished.extend(settlements)

    def keep(self, settlements: Iterable[Settlement]) -> None:
        """Add settlements for the next call of `take_finished`."""
        with self._lock:
            self._finished.extend(settlements)

    @property
    def is_done(self) -> bool:
        """Whether no row runs or waits."""
        return not self._running and not self._waiting

    @property
    def is_settled(self) -> bool:
        with self._lock:
            return self.is_done and not self._finished

    def detach(self) -> bool:
        """Record that the runner goes on to another chunk; return False if no row runs."""
        with self._lock:
            self.is_detached = bool(self._running)
            return self.is_detached

    @property
    def waiting(self) -> list[DelayedTask]:
        with self._lock:
            return list(self._waiting)

    @property
    def running(self) -> list[int]:
        with self._lock:
            return list(self._running)

    def take_finished(self) -> list[Settlement]:
        with self._lock:
            finished, self._finished = self._finished, []
            return finished

    def give_back(self) -> int:
        """Settle the waiting rows as given back, and return their number."""
        if not self._waiting:  # as nearly always; rows never begin to wait again
            return 0
        with self._lock:
            returned = list(self._waiting)
            self._finished.extend(Settlement(task, "give_back") for task in returned)
            self.returned += returned
            self._waiting.clear()
            return len(returned)


class TimeBudget:
    """A thread that calls `expire(chunk)` for each chunk that is open after its time budget.

    The thread that runs the chunk may be in a processor for minutes, so it takes no part in this.
    While chunks are opened and closed, this thread wakes once in a time budget by itself, and no
    runner spends time on waking it.
    """

    def __init__(
        self,
        budget_s: float,
        expire: Callable[[Chunk], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._budget_s = budget_s
        self._expire = expire
        self._on_error = on_error
        fork_safe(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[Chunk, float] = {}
        self._opened = 0
        self._is_asleep = False
        self._thread: threading.Thread | None = None

    def open(self, chunk: Chunk, rest_s: float = 0.0) -> None:
        """Open a chunk; a chunk that is open keeps its time budget."""
        with self._changed:
            self._open.setdefault(chunk, monotonic() + self._budget_s + rest_s)
            self._opened += 1
            self._start()
            if self._is_asleep:
                self._changed.notify()

    def end_now(self, chunk: Chunk) -> None:
        """End the budget of a chunk at once, open or not."""
        with self._changed:
            self._open[chunk] = monotonic()
            self._opened += 1
            self._start()
            self._changed.notify()

    def close(self, chunk: Chunk) -> None:
        if chunk in self._open:  # a chunk of a single row need not be open
            with self._changed:
                self._open.pop(chunk, None)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            name = "delaytasks-time-budget"
            self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while True:
            with self._changed:
                if not self._open:
                    self._rest()
                    continue
                chunk, deadline = min(self._open.items(), key=itemgetter(1))
                left = deadline - monotonic()
                if left > 0:
                    # A chunk that is opened meanwhile may expire earlier.
                    self._changed.wait(min(left, self._budget_s))
                    continue
                del self._open[chunk]
            try:
                self._expire(chunk)
            except Exception as error:  # the thread goes on for the other chunks
                self._on_error(error)

    def _rest(self) -> None:
        opened = self._opened
        # A chunk that is opened meanwhile does not expire earlier.
        self._changed.wait(self._budget_s)
        if self._opened == opened:
            self._is_asleep = True
            self._changed.wait()
            self._is_asleep = False


# -- What a process learns from the rows that it has run ------------------------------------------


@dataclass(slots=True)
class Tally:
    """Counts the rows of one or several chunks."""

    brought_by: BroughtBy
    claimed: int = 0
    #: The rows that ended, and the time that the process spent on them.
    ran: int = 0
    seconds: float = 0.0
    #: The rows that were given back, and what has to be added to `seconds` for the size of the next
    #: chunk: the expected time of these rows, without what rows took beyond a time budget each.
    returned: int = 0
    correction_s: float = 0.0
    #: The rows that the next chunk should have, for processors that start several rows together.
    wanted: int = 0
    #: The started rows of such processors, and all started rows.
    wanting: int = 0
    started: int = 0

    def start(self, rows: int, wanted: int = 0) -> None:
        self.started += rows
        if wanted:
            self.wanted, self.wanting = max(self.wanted, wanted), self.wanting + rows

    def add(self, ran: int, seconds: float) -> None:
        self.ran += ran
        self.seconds += seconds

    @property
    def sample(self) -> tuple[int, float]:
        """How long which number of rows takes, in a chunk that quick and slow rows share."""
        return self.ran + self.returned, self.seconds + self.correction_s

    @property
    def wanted_next(self) -> int:
        """The least number of rows for the next chunk, if most rows are of such processors."""
        return self.wanted if 2 * self.wanting >= self.started else 0


class TagCosts:
    """Estimates the time of a row from past rows of its tag. A tag without any counts as quick."""

    def __init__(self, time_budget_s: float) -> None:
        self._time_budget_s = time_budget_s
        self._row_s: dict[str, float] = {}

    def learn(self, tag: str, rows: int, seconds: float) -> float:
        """Learn from rows that ran one after another or as a batch.

        Return the seconds beyond one time budget for each row, which do not count for the size of
        the next chunk: a chunk has at most one such row that runs, and quicker rows run before it.
        """
        row_s = seconds / rows
        known = self._row_s.get(tag, row_s)
        self._row_s[tag] = known + LEARNING * (row_s - known)
        return max(seconds - rows * self._time_budget_s, 0.0)

    def count_returned(self, tasks: Sequence[DelayedTask], tally: Tally) -> None:
        """Count the rows of known tags that were given back, with their expected time."""
        for task in tasks:
            if task.tag in self._row_s:
                tally.returned += 1
                tally.correction_s += min(self._row_s[task.tag], self._time_budget_s)

    def quick_first(self, tasks: Sequence[DelayedTask]) -> Sequence[DelayedTask]:
        """Return the rows of a chunk in the order in which to run them.

        If they will probably not all run within the time budget, the rows of quick tags come first
        within each priority, so that slow rows are given back and not the quick ones behind them.
        Otherwise, and within a tag, the order is kept.
        """
        if self.expected_s(tasks) < self._time_budget_s:
            return tasks
        costs = self._row_s
        return sorted(tasks, key=lambda task: (-task.priority, costs.get(task.tag, 0.0)))

    def expected_s(self, tasks: Sequence[DelayedTask]) -> float:
        """Return how long a chunk of these rows takes. No row starts after the time budget."""
        total_s = 0.0
        for task in tasks:
            total_s += self._row_s.get(task.tag, 0.0)
            if total_s >= self._time_budget_s:
                break
        return total_s


# -- Settlements, with retries --------------------------------------------------------------------


#: The time between two tries while the database is unavailable, or rows are locked.
SETTLE_RETRY_S = 0.5
#: After this number of locked rows no further row is tried, if the time is over: each try takes
#: seconds.
MAX_LOCKED = 3
#: The database gave no answer, or another transaction has locked a row.
_AWAY = (StoreUnavailableError, OutcomeUnknownError)
LOCKED_REMEDY = (
    "an open transaction has locked this task's row (with SQLite: the database); if its processor "
    "began the transaction, commit or roll back before the processor returns"
)


def is_locked(error: StoreError) -> bool:
    """Whether an open transaction has locked a row, so that the database works nevertheless."""
    return isinstance(error, StoreUnavailableError) and error.is_locked


class Settler:
    """Settles the rows of a chunk together, and tells the observers what became of them.

    A settlement says how a row leaves the status RUNNING. The settlements of a chunk are written in
    one statement, which names the version of each row: a row that another worker has recovered
    meanwhile keeps its state, and so a repeated settlement is safe. While the database is
    unavailable, settling is repeated. If the database refuses the statement, or another transaction
    has locked a row, each row is settled by itself. Rows that run again are armed afterwards.
    """

    def __init__(self, calls: Calls) -> None:
        self._runtime, self._events = calls.runtime, calls.runtime.events
        self._claims, self._observers = calls.host.claims, calls.observers

    def settle(self, chunk: Chunk, patience_s: float, settle: Settle | None = None) -> bool:
        """Settle the rows of a chunk that have ended, and arm those that run again.

        While the database is unavailable, settling is repeated for `patience_s`; the chunk keeps
        what could not be settled. `settle` is used in the first try, and the store's function in
        further ones. With `patience_s=0`, return False if another thread settles the chunk now.
        """
        if not chunk.settling.acquire(blocking=patience_s > 0):
            return False
        try:
            finished = chunk.take_finished()
            made = [one for one in finished if one.is_made]
            if made:
                self._report(made, {one.task.id for one in made})
                finished = [one for one in finished if not one.is_made]
            if finished:
                deadline = monotonic() + patience_s
                self._settle(chunk, finished, deadline, settle or self._claims.settle)
        finally:
            chunk.settling.release()
        return True

    def _settle(
        self, chunk: Chunk, settlements: Sequence[Settlement], deadline: float, settle: Settle
    ) -> None:
        try:
            self._report(settlements, self._repeat(settlements, deadline, settle))
        except StoreError as error:
            if isinstance(error, _AWAY) and not is_locked(error):
                chunk.keep(settlements)
                raise
            # The database refused one of them, or a row is locked. The others do not run again.
            self._settle_each(chunk, settlements, deadline)

    def _repeat(
        self, settlements: Sequence[Settlement], deadline: float, settle: Settle
    ) -> set[int]:
        """Write settlements, with retries until the deadline; the fence makes retries safe."""
        while True:
            try:
                return settle(settlements)
            except _AWAY as error:
                if is_locked(error):
                    raise
                self._events.emit("settle.waits", error=str(error), cause=error)
                if monotonic() > deadline:
                    raise
                time.sleep(SETTLE_RETRY_S)
                settle = self._claims.settle

    def _settle_each(
        self, chunk: Chunk, settlements: Sequence[Settlement], deadline: float
    ) -> None:
        """Settle each row by itself, and try locked rows again until the deadline.

        After the deadline, the chunk keeps the rows behind `MAX_LOCKED` locked ones; they are tried
        first the next time.
        """
        refusal: StoreError | None = None
        lock: StoreError | None = None
        while settlements:
            locked: list[Settlement] = []
            for number, one in enumerate(settlements):
                try:
                    self._report([one], self._claims.settle([one]))
                except _AWAY as error:
                    if not is_locked(error):
                        chunk.keep([*locked, *settlements[number:]])
                        raise
                    self._events.emit(
                        "task.row_locked", **one.task.event_fields, remedy=LOCKED_REMEDY
                    )
                    locked.append(one)
                    lock = error
                    if len(locked) >= MAX_LOCKED and monotonic() > deadline:
                        chunk.keep([*settlements[number + 1 :], *locked])
                        raise
                except StoreError as error:
                    chunk.keep([one])
                    refusal = error
            if lock is not None and locked and monotonic() > deadline:
                chunk.keep(locked)
                raise lock
            if locked:
                time.sleep(SETTLE_RETRY_S)
            settlements = locked
        if refusal is not None:
            raise refusal

    def _report(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        """Report which settlements were accepted, and arm the tasks that run again."""
        for observer in self._observers:
            observer.settled(settlements, accepted)
        done, again = 0, list[Settlement]()
        for s in settlements:
            if s.task.id not in accepted:
                self._events.emit("task.lease_lost", **s.task.event_fields)
            elif s.move == "succeed":
                done += 1
            elif s.target is Status.NOT_COMPLETE:
                again.append(s)
        if done:
            self._events.emit("task.succeeded", count=done)
        if again:
            self._arm_again(again)

    def _arm_again(self, settlements: Sequence[Settlement]) -> None:
        self._runtime.arm_near(
            Entry.of(s.task)._replace(
                version=following(s.task.version),
                due_us=to_us(s.expected_time or s.task.expected_time),
            )
            for s in settlements
        )


# -- Runs the rows of a chunk ---------------------------------------------------------------------


#: A row that may kill this process waits for other rows to end, at most for this part of the lease.
ALONE = 0.25
#: A run that begins so much later than its row was due is late.
LATE = timedelta(seconds=LATE_S)
#: The time between two tries to settle detached rows while the database is unavailable.
DETACHED_RETRY_S = 1.0


class ChunkRunner:
    def __init__(self, calls: Calls) -> None:
        runtime = calls.runtime
        self._clock, self._events, self._host = runtime.clock, runtime.events, calls.host
        self._policies = runtime.policy_cache
        self._lease_s = runtime.settings.lease_s
        self._budget_s = runtime.settings.chunk_time_budget_s
        self._calls, self._settler = calls, Settler(calls)
        self._registry, self._slots = calls.host.registry, calls.host.thread_slots
        self.costs = TagCosts(self._budget_s)
        failed = partial(self._events.failed, "time budget")
        self._time_budget = TimeBudget(self._budget_s, self._expire, failed)
        #: Whether an observer shows single rows that run.
        self.is_watched = False
        #: Chunks whose runner has gone on before all of their rows are settled.
        self._detached: set[Chunk] = set()
        #: The last chunk that is settled later.
        self._later: Chunk | None = None

    # -- a chunk is opened, run, and closed -------------------------------------------------------

    def open(self, tasks: Sequence[DelayedTask], claimed_at: float, waits_s: float = 0.0) -> Chunk:
        """Hold the paused tasks, and return a chunk of the others.

        The time budget of a chunk that is claimed ahead is longer by `waits_s`.
        """
        refused: Sequence[Settlement] = ()
        policies = self._policies.known
        if tasks and (policies.paused_tags or policies.paused_queues):
            tasks, refused = self._host.admission.hold_paused(tasks)
        if tasks or refused:
            self._events.emit("chunk.claimed", count=len(tasks))
        leases_end_at, lost_at = claimed_at + self._lease_s, self._host.memory.lost_at
        if lost_at > claimed_at:  # the rows that a lost worker claims afterwards are its own
            leases_end_at = min(leases_end_at, lost_at)
        chunk = Chunk(self._in_order(tasks), leases_end_at, self._budget_s + waits_s)
        if refused:
            chunk.keep(refused)
        # Without a watcher, a single row that runs now has nothing to settle, to give back or to
        # show before it ends, and the thread of the time budget need not wake up for it.
        if len(tasks) > 1 or refused or (tasks and (waits_s or self.is_watched)):
            self._time_budget.open(chunk, waits_s)
        return chunk

    @contextmanager
    def opened(
        self, tasks: Sequence[DelayedTask], claimed_at: float, settle: Settle | None = None
    ) -> Iterator[Chunk]:
        """Open a chunk of claimed tasks, and close it at the end."""
        chunk = self.open(tasks, claimed_at)
        try:
            yield chunk
        finally:
            if not chunk.is_detached:
                self.close(chunk, settle)

    def run(self, chunk: Chunk, tally: Tally, may_detach: bool) -> None:
        """Run the tasks until all have ended, or with `may_detach` all except concurrent ones."""
        claimed, began = self._clock.now(), monotonic()
        self._explain_late(chunk.waiting, claimed, tally.brought_by)
        concurrent: dict[str, ProcessorSpec] = {}
        with self._host.thread_context():
            while (first := chunk.next()) is not None:
                processor = self._registry.get(first.tag)
                if processor is not None and processor.in_flight is not None:
                    concurrent[first.tag] = processor
                    took_s = self._start_in_thread(chunk, processor, first, claimed, tally)
                    if took_s is None:
                        break
                    began += took_s
                    continue
                most = 1 if processor is None else processor.batch or 1
                started = chunk.start(first, most)
                if not started:
                    continue
                if first.tag in self._registry.time_limits:
                    began += self._prepare_for_kill(chunk, started)
                try:
                    chunk.end(started, self._calls.run(processor, started, claimed))
                except BaseException:
                    chunk.end(started)  # the process ends
                    raise
                tally.start(len(started), most if most > 1 else 0)
                took_s = monotonic() - began
                began += took_s
                tally.add(len(started), took_s)
                if processor is not None:  # else the row is given back, and its tag may be any text
                    tally.correction_s -= self.costs.learn(first.tag, len(started), took_s)
        self.costs.count_returned(chunk.returned, tally)
        if concurrent:
            self._wait(chunk, concurrent.values(), may_detach)
            tally.wanted = max(tally.wanted, *map(self._free_rows, concurrent.values()))
        tally.add(*self._slots.ended())

    def _explain_late(
        self, tasks: Sequence[DelayedTask], now: datetime, brought_by: BroughtBy
    ) -> None:
        """Note in `late_by` of the rows that start late what brought them, and why not earlier."""
        late_before, now_us = now - LATE, to_us(now)
        # Rows that fell due together have one reason.
        why_since = cache(lambda since: self._host.memory.why_late(to_us(since), now_us))
        for task in tasks:
            if (task.due_time or task.expected_time) < late_before:
                task.late_by = brought_by + self._why_late(task, late_before, why_since)
            elif task.late_by is not None:  # of an earlier run
                task.late_by = None

    @staticmethod
    def _why_late(
        task: DelayedTask, late_before: datetime, why_since: Callable[[datetime], LateReason]
    ) -> LateReason:
        if task.lapses > 0:
            return LateReason.LEASE_LOST
        if task.late_by == LateReason.HELD:
            return LateReason.HELD
        if task.due_time is not None:
            return LateReason.DEFERRED
        since = max(task.expected_time, task.create_time or task.expected_time)
        if since >= late_before:
            return LateReason.SCHEDULED_LATE
        return why_since(since)

    def close(self, chunk: Chunk, settle: Settle | None = None) -> None:
        """Give back the waiting rows, and settle them with the rows that have ended.

        The thread of the time budget settles the rows that still run. `settle` writes the
        settlements, if another function than the store's should do it.
        """
        if chunk.detach():
            self._detached.add(chunk)
            self._time_budget.open(chunk)
        else:
            self._time_budget.close(chunk)
        try:
            chunk.give_back()
            self._settler.settle(chunk, self._lease_s, settle)
        finally:
            self._calls.flush()

    def settle_later(self, chunk: Chunk) -> None:
        """Let the thread of the time budget settle the rows, as those that outlive their chunk.

        It is one chunk at a time, so that a locked row delays no more settlements.
        """
        if self._later not in self._detached:
            self._later, chunk.is_detached = chunk, True
            self._detached.add(chunk)
            self._time_budget.end_now(chunk)

    def _expire(self, chunk: Chunk) -> None:
        """After the time budget, settle the ended rows and give back the waiting ones."""
        if given_back := chunk.give_back():
            self._events.emit("chunk.gave_back", count=given_back)
        try:
            if not self._settler.settle(chunk, patience_s=0):
                self._time_budget.open(chunk)
        except (StoreUnavailableError, OutcomeUnknownError):
            if not chunk.is_detached:
                raise
            # Without a limit: if the leases end meanwhile, the fence refuses a settlement that is
            # too late.
            self._time_budget.open(chunk, rest_s=DETACHED_RETRY_S)
        except BaseException:
            if chunk.is_detached:
                chunk.take_finished()  # the settlements are refused, so the rows are abandoned
            raise
        finally:
            if chunk.is_settled and chunk.is_detached:
                self._detached.discard(chunk)
                self._slots.notify()
            self._calls.flush()  # a monitor sees the rows that still run

    def _in_order(self, tasks: Sequence[DelayedTask]) -> Sequence[DelayedTask]:
        """Order the tasks of a chunk.

        Quick rows are before slow ones. Concurrent rows that have a slot are first, since they wait
        while the others run. Rows with a hard time limit are last, since they may end the process.
        """
        if len(tasks) <= 1:
            return tasks
        tags, hard_limits = {task.tag for task in tasks}, self._registry.time_limits
        if len(tags) > 1:
            tasks = self.costs.quick_first(tasks)
        processors = [self._registry.get(tag) for tag in tags]
        free = {p.tag: self._free_rows(p) for p in processors if p and p.in_flight is not None}
        if not free and tags.isdisjoint(hard_limits):
            return tasks

        def place(task: DelayedTask) -> int:
            if free.get(task.tag, 0) > 0:
                free[task.tag] -= 1
                return 0
            return 2 if task.tag in hard_limits else 1

        return sorted(tasks, key=place)

    # -- rows of processors with `in_flight`, which run in threads beyond the runner's own --------

    def _free_slots(self, processor: ProcessorSpec) -> int:
        return self._slots.free(processor.tag, processor.in_flight or 1)

    def _free_rows(self, processor: ProcessorSpec) -> int:
        """Return how many rows could start now."""
        return self._free_slots(processor) * (processor.batch or 1)

    def _start_in_thread(
        self,
        chunk: Chunk,
        processor: ProcessorSpec,
        first: DelayedTask,
        claimed: datetime,
        tally: Tally,
    ) -> float | None:
        """Start the row `first` with further rows of its batch, and return the time that this took.

        Return None if no slot became free within the chunk's time budget.
        """
        tag, slots, most = processor.tag, processor.in_flight or 1, processor.batch or 1
        began = monotonic()
        if not self._slots.take(tag, slots, chunk.budget_ends):
            return None
        tasks = chunk.start(first, most)
        if tasks:
            call = partial(self._run_in_thread, processor, tasks, claimed)
            ended = partial(self._ended_in_thread, chunk, tasks)
            self._slots.start(tag, slots, len(tasks), call, ended)
            tally.start(len(tasks), most)
        else:
            self._slots.give_back(tag)
        return monotonic() - began

    def _run_in_thread(
        self, processor: ProcessorSpec, tasks: Sequence[DelayedTask], claimed: datetime
    ) -> list[Settlement]:
        """Run the tasks in this thread, which has no caller that an exception could reach."""
        try:
            return self._calls.run(processor, tasks, claimed)
        except BaseException as error:
            self._events.failed("concurrent calls", error)
            return []

    def _ended_in_thread(
        self, chunk: Chunk, tasks: Sequence[DelayedTask], settlements: Sequence[Settlement]
    ) -> None:
        chunk.end(tasks, settlements)
        self._time_budget.open(chunk)

    def _wait(self, chunk: Chunk, processors: Collection[ProcessorSpec], may_detach: bool) -> None:
        """Wait until all rows of the chunk have ended.

        With `may_detach`, wait no longer than the time budget, and then until another chunk has
        free slots: half of them for a time budget, since it would otherwise get only a few rows,
        and then any.
        """

        def is_done() -> bool:
            return chunk.is_done

        def has_free_slots(share: float = 0.0) -> bool:
            return chunk.is_done or all(
                self._free_slots(p) >= max(share * (p.in_flight or 1), 1) for p in processors
            )

        wait, budget_ends = self._slots.wait, chunk.budget_ends
        if not may_detach:
            wait(is_done)
        elif not wait(is_done, budget_ends) and not wait(
            partial(has_free_slots, 0.5), budget_ends + self._budget_s
        ):
            wait(has_free_slots)

    @property
    def detached(self) -> tuple[int, ...]:
        """The ids of rows that run although their chunk's runner has gone on."""
        return tuple(id for chunk in list(self._detached) for id in chunk.running)

    def finish(self) -> None:
        """Wait until these rows have ended, and for a lease until they are settled.

        A transaction that a processor left open may lock a row as long as this process lives.
        """
        self._slots.wait(lambda: not self.detached)
        self._slots.wait(lambda: not self._detached, monotonic() + self._lease_s)

    # -- rows that may end the process ------------------------------------------------------------

    def wait_for_detached(self) -> None:
        """Wait until other chunks have ended, for a recovered row that may kill this process."""
        self._wait_until_alone(lambda: not self._detached)

    def _prepare_for_kill(self, chunk: Chunk, tasks: list[DelayedTask]) -> float:
        """Wait for other rows before rows that may end the process, and settle those that ended.

        Return the time that this took.
        """
        began = monotonic()
        try:
            self._wait_until_alone(lambda: not self._detached and len(chunk.running) == len(tasks))
            self._settler.settle(chunk, patience_s=self._lease_s)
        except BaseException:
            chunk.end(tasks, [Settlement(task, "give_back") for task in tasks])
            raise
        return monotonic() - began

    def _wait_until_alone(self, is_alone: Callable[[], bool]) -> None:
        self._slots.wait(is_alone, monotonic() + ALONE * self._lease_s)
