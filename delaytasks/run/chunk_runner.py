"""Runs the claimed rows of a chunk one by one, in batches or concurrently, within its time budget.

A chunk waits for its rows no longer than its time budget. Concurrent rows that still run then go
on, and the runner takes the next chunk as soon as there are free slots. The thread of the time
budget settles them when they end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from delaytasks.model.clock import monotonic
from delaytasks.model.errors import OutcomeUnknownError, StoreUnavailableError
from delaytasks.model.task import DelayedTask, Settle, Settlement
from delaytasks.model.workers import LEARNING
from delaytasks.registry import ProcessorSpec, ThreadSlots
from delaytasks.run.chunk import Chunk, TimeBudget
from delaytasks.run.executor import Host, TaskExecutor
from delaytasks.run.settlement import Settler

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

# -- Runs the rows of processors with `in_flight` in threads, beyond the runner's own thread ------


class ConcurrentCalls:
    """`on_end` gets a chunk in which a call has ended, `on_error` an error outside of a task."""

    def __init__(
        self,
        thread_slots: ThreadSlots,
        executor: TaskExecutor,
        on_end: Callable[[Chunk], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._thread_slots = thread_slots
        self._executor = executor
        self._on_end = on_end
        self._on_error = on_error

    def free_rows(self, processor: ProcessorSpec) -> int:
        """Return how many rows could start now."""
        return self._free_slots(processor) * (processor.batch or 1)

    def start(
        self, chunk: Chunk, processor: ProcessorSpec, first: DelayedTask, claimed: datetime
    ) -> int | None:
        """Start the row `first` with further rows of its batch, and return their number.

        Returns None if no slot became free within the chunk's time budget.
        """
        tag, slots, thread_slots = processor.tag, processor.in_flight or 1, self._thread_slots
        if not thread_slots.take(tag, slots, chunk.budget_ends):
            return None
        tasks = chunk.start(first, processor.batch or 1)
        if tasks:
            call = partial(self._call, processor, tasks, claimed)
            thread_slots.start(tag, slots, len(tasks), call, partial(self._ended, chunk, tasks))
        else:
            thread_slots.give_back(tag)
        return len(tasks)

    def wait(
        self, chunk: Chunk, processors: Iterable[ProcessorSpec], may_detach_s: float | None
    ) -> None:
        """Wait until all rows of the chunk have ended.

        With `may_detach_s`, wait no longer than the time budget, and then until another chunk has
        free slots: half of them for `may_detach_s`, since it would otherwise get only a few rows,
        and then any.
        """

        def is_done() -> bool:
            return chunk.is_done

        def has_free_slots(share: float = 0.0) -> bool:
            return chunk.is_done or all(
                self._free_slots(p) >= max(share * (p.in_flight or 1), 1) for p in processors
            )

        thread_slots, budget_ends = self._thread_slots, chunk.budget_ends
        if may_detach_s is None:
            thread_slots.wait(is_done)
        elif not thread_slots.wait(is_done, budget_ends) and not thread_slots.wait(
            lambda: has_free_slots(0.5), budget_ends + may_detach_s
        ):
            thread_slots.wait(has_free_slots)

    def _free_slots(self, processor: ProcessorSpec) -> int:
        return self._thread_slots.free(processor.tag, processor.in_flight or 1)

    def _call(
        self, processor: ProcessorSpec, tasks: Sequence[DelayedTask], claimed: datetime
    ) -> list[Settlement]:
        """Run the tasks in this thread, which has no caller that an exception could reach."""
        try:
            return self._executor.run(processor, tasks, claimed)
        except BaseException as error:
            try:
                return self._executor.failed(processor, tasks, error)
            except Exception as worse:
                self._on_error(worse)
                return []

    def _ended(
        self, chunk: Chunk, tasks: Sequence[DelayedTask], settlements: Sequence[Settlement]
    ) -> None:
        try:
            chunk.end(settlements)
            chunk.forget(tasks)  # a row without a settlement is abandoned
            self._on_end(chunk)
        except Exception as error:
            self._on_error(error)


# -- Counts what a process has run, and learns how long the tasks of each tag take ----------------


class SizeSample(NamedTuple):
    """What the size of the next chunk is learned from."""

    rows: int
    seconds: float


@dataclass(slots=True)
class Tally:
    """Counts the rows of one or several chunks."""

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

    def correct(self, returned: int, seconds: float) -> None:
        self.returned += returned
        self.correction_s += seconds

    @property
    def sample(self) -> SizeSample:
        """Return how long which number of rows takes, in a chunk that quick and slow rows share."""
        return SizeSample(self.ran + self.returned, self.seconds + self.correction_s)

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

    def counted(self, tasks: Sequence[DelayedTask]) -> tuple[int, float]:
        """Return how many of these rows have known tags, and the time that counts for them."""
        if not tasks:  # as nearly always
            return 0, 0.0
        known = [self._row_s[task.tag] for task in tasks if task.tag in self._row_s]
        return len(known), sum(min(row_s, self._time_budget_s) for row_s in known)

    def quick_first(self, tasks: Sequence[DelayedTask]) -> Sequence[DelayedTask]:
        """Return the rows of a chunk in the order in which to run them.

        If they will probably not all run within the time budget, the rows of quick tags come first
        within each priority, so that slow rows are given back and not the quick ones behind them.
        Otherwise, and within a tag, the order is kept.
        """
        if len({task.tag for task in tasks}) == 1 or self.expected_s(tasks) < self._time_budget_s:
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


#: A row that may kill this process waits for other rows to end, at most for this part of the lease.
ALONE = 0.25
#: The time between two tries to settle detached rows while the database is unavailable.
DETACHED_RETRY_S = 1.0


class ChunkRunner:
    def __init__(
        self,
        runtime: Runtime,
        host: Host,
        executor: TaskExecutor,
        settler: Settler,
        costs: TagCosts,
    ) -> None:
        self._clock, self._events = runtime.clock, runtime.events
        self._lease_s = runtime.settings.lease_s
        self._budget_s = runtime.settings.chunk_time_budget_s
        self._registry, self._thread_context = host.registry, host.thread_context
        self._thread_slots, self._pause_filter = host.thread_slots, host.pause_filter
        self._executor, self._settler, self._costs = executor, settler, costs
        failed = self._events.failed
        self._time_budget = TimeBudget(self._budget_s, self._expire, partial(failed, "time budget"))
        self._concurrent_calls = ConcurrentCalls(
            host.thread_slots, executor, self._time_budget.open, partial(failed, "concurrent calls")
        )
        #: Chunks whose runner has gone on, although some of their rows still run.
        self._detached: set[Chunk] = set()
        #: The last chunk that another thread settles.
        self._closing: Chunk | None = None

    @contextmanager
    def opened(
        self,
        tasks: Sequence[DelayedTask],
        claimed_at: float,
        settle: Settle | None = None,
        settles_in_background: Callable[[], bool] | None = None,
    ) -> Iterator[Chunk | None]:
        """Open a chunk of claimed tasks, and close it at the end; None if none of them may run.

        If `settles_in_background` returns True at the end, the thread of the time budget settles
        the rows. This is limited to one chunk at a time, so that a locked row delays no more
        settlements.
        """
        chunk = self.open(tasks, claimed_at)
        try:
            yield chunk
        finally:
            if chunk is None:
                pass
            elif (
                settles_in_background is not None
                and self._may_close_in_background
                and settles_in_background()
            ):
                self._close_in_background(chunk)
            else:
                self.close(chunk, settle)

    def run(self, chunk: Chunk | None, tally: Tally, may_detach: bool) -> None:
        """Run the tasks until all have ended, or with `may_detach` all except concurrent ones."""
        if chunk is None:
            return
        claimed, began = self._clock.now(), monotonic()
        concurrent = dict[str, ProcessorSpec]()
        with self._thread_context():
            while (first := chunk.next()) is not None:
                processor = self._registry.get(first.tag)
                if processor is not None and processor.in_flight is not None:
                    concurrent[first.tag] = processor
                    took_s = self._start_concurrent(chunk, processor, first, claimed, tally)
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
                    chunk.end(self._executor.run(processor, started, claimed))
                except BaseException:
                    chunk.forget(started)  # the process ends, and the rows are abandoned
                    raise
                tally.start(len(started), most if most > 1 else 0)
                took_s = monotonic() - began
                began += took_s
                tally.add(len(started), took_s)
                if processor is not None:  # else the row is given back, and its tag may be any text
                    tally.correct(0, -self._costs.learn(first.tag, len(started), took_s))
        tally.correct(*self._costs.counted(chunk.returned))
        if concurrent:
            self._wait(chunk, concurrent.values(), tally, may_detach)

    def wait_for_detached(self) -> None:
        """Wait until other chunks have ended, for a recovered row that may kill this process."""
        self._wait_until_alone(lambda: not self._detached)

    @property
    def detached(self) -> tuple[int, ...]:
        """The ids of rows that run although their chunk's runner has gone on."""
        return tuple(id for chunk in list(self._detached) for id in chunk.running)

    def finish(self) -> None:
        """Wait until these rows have ended and are settled."""
        self._thread_slots.wait(lambda: not self._detached)

    def ended(self) -> tuple[int, float]:
        """Return the concurrent rows that ended since the last call, and their time."""
        return self._thread_slots.ended()

    # -- the start and the end of a chunk ---------------------------------------------------------

    def open(
        self, tasks: Sequence[DelayedTask], claimed_at: float, waits_s: float = 0.0
    ) -> Chunk | None:
        """Hold the paused tasks, and return a chunk of the others; None if all are paused.

        The time budget of a chunk that is claimed ahead is longer by `waits_s`.
        """
        refused: Sequence[Settlement] = ()
        if tasks and self._pause_filter is not None:
            tasks, refused = self._pause_filter.hold_paused(tasks)
        if not tasks and not refused:
            return None
        self._events.emit("chunk.claimed", count=len(tasks))
        lease_left_s = self._lease_s - (monotonic() - claimed_at)
        chunk = Chunk(self._in_order(tasks), lease_left_s, self._budget_s + waits_s)
        if refused:
            chunk.keep(refused)
        # Without a watcher, a single row that runs now has nothing to settle, to give back or to
        # show before it ends, and the thread of the time budget need not wake up for it.
        if len(tasks) > 1 or waits_s or refused or self._executor.is_watched:
            self._time_budget.open(chunk, waits_s)
        return chunk

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
            self._executor.flush()

    @property
    def _may_close_in_background(self) -> bool:
        return self._closing not in self._detached

    def _close_in_background(self, chunk: Chunk) -> None:
        self._closing = chunk
        chunk.detach(even_if_done=True)
        self._detached.add(chunk)
        self._time_budget.end_now(chunk)

    def _in_order(self, tasks: Sequence[DelayedTask]) -> Sequence[DelayedTask]:
        """Order the tasks of a chunk.

        Quick rows are before slow ones. Concurrent rows that have a slot are first, since they wait
        while the others run. Rows with a hard time limit are last, since they may end the process.
        """
        tasks = self._costs.quick_first(tasks)
        if not any(self._is_special(tag) for tag in {task.tag for task in tasks}):
            return tasks
        free: dict[str, int] = {}
        concurrent: list[DelayedTask] = []
        others: list[DelayedTask] = []
        limited: list[DelayedTask] = []
        for task in tasks:
            processor = self._registry.get(task.tag)
            if processor is None or processor.in_flight is None:
                (limited if task.tag in self._registry.time_limits else others).append(task)
                continue
            if task.tag not in free:
                free[task.tag] = self._concurrent_calls.free_rows(processor)
            free[task.tag] -= 1
            (concurrent if free[task.tag] >= 0 else others).append(task)
        return [*concurrent, *others, *limited]

    def _is_special(self, tag: str) -> bool:
        processor = self._registry.get(tag)
        return processor is not None and (
            processor.in_flight is not None or processor.has_time_limits
        )

    def _start_concurrent(
        self,
        chunk: Chunk,
        processor: ProcessorSpec,
        first: DelayedTask,
        claimed: datetime,
        tally: Tally,
    ) -> float | None:
        """Start a concurrent row; return the time this took, or None after the time budget."""
        began = monotonic()
        rows = self._concurrent_calls.start(chunk, processor, first, claimed)
        if rows is None:
            return None
        if rows:
            tally.start(rows, processor.batch or 1)
        return monotonic() - began

    # -- waiting ----------------------------------------------------------------------------------

    def _wait(
        self, chunk: Chunk, processors: Collection[ProcessorSpec], tally: Tally, may_detach: bool
    ) -> None:
        """Wait for the concurrent rows; then as many rows as have free slots are wanted next."""
        self._concurrent_calls.wait(chunk, processors, self._budget_s if may_detach else None)
        free = (self._concurrent_calls.free_rows(processor) for processor in processors)
        tally.wanted = max(tally.wanted, *free)

    def _wait_until_alone(self, is_alone: Callable[[], bool]) -> None:
        self._thread_slots.wait(is_alone, monotonic() + ALONE * self._lease_s)

    def _prepare_for_kill(self, chunk: Chunk, tasks: list[DelayedTask]) -> float:
        """Wait for other rows before rows that may end the process, and settle those that ended.

        Returns the time that this took.
        """
        began = monotonic()
        try:
            self._wait_until_alone(lambda: not self._detached and len(chunk.running) == len(tasks))
            self._settler.settle(chunk, patience_s=self._lease_s)
        except BaseException:
            chunk.end(Settlement(task, "give_back") for task in tasks)
            raise
        return monotonic() - began

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
                self._thread_slots.notify()
            self._executor.flush()  # a monitor sees the rows that still run
