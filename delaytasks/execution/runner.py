"""The way of a task, part 3: claim, run, settle. Here a row goes from RUNNING to DONE."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from delaytasks.core.capacity import WaitlistState
from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.interfaces import ClaimStore, Entry, Timer, WaitlistsSeen
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.execution.admission import Admission
from delaytasks.execution.chunk_run import ChunkRun, Kept, Tally
from delaytasks.execution.executor import Execute, TaskExecutor, Watcher
from delaytasks.execution.outcome_rules import OutcomeRules
from delaytasks.execution.settler import Settler
from delaytasks.execution.task_run import LeaseOf, UnitOf
from delaytasks.execution.waitlist_runner import WaitlistRunner
from delaytasks.processors.registry import Registry
from delaytasks.processors.thread_slots import ThreadSlots

#: A message that is early by less is worth waiting for: clocks agree to a fraction of it.
CLOCK_TOLERANCE_US = 50_000
#: Slept beyond it, since some databases tell the time in whole milliseconds.
CLOCK_TOLERANCE_SLACK_US = 2_000
#: While a backlog is worked off, so long passes before rows that lapsed are looked for again, when there were none; and
#: so many times as long as the look took, since it passes over the whole backlog.
SUSPECTS_S, SUSPECTS_SHARE = 1.0, 20


class Report(NamedTuple):
    """What became of a chunk, as the worker's main process wants to know it."""

    claimed: int = 0
    ran: int = 0
    seconds: float = 0.0
    early: tuple[Entry, ...] = ()
    is_full: bool = False
    #: Rows that the next chunk should have at least, as far as this one's processors tell.
    wanted: int = 0
    #: This process, and the rows that still run in it though their chunk is over.
    pid: int = 0
    left: tuple[int, ...] = ()
    #: Why the chunk failed as a whole, and whether that was the database.
    error: str = ""
    is_stores_error: bool = False
    #: Lines of limited tags that somebody should go on with.
    lines: tuple[WaitlistState, ...] = ()
    #: Events, tags and numbers, for who asked to have them counted.
    counts: tuple[tuple[str, str, int], ...] = ()


class Runner:
    """Runs chunks in one process. `execute` calls the processor in the surroundings that it expects; between rows that
    a thread runs one after another they are `kept`.

    With `may_leave` rows that run side by side may go on while the next chunk runs: somebody has to renew their leases,
    and to call `finish` at the end. `renewed_at` is when leases were renewed last, by the monotonic clock.
    """

    def __init__(
        self,
        settings: Settings,
        claims: ClaimStore,
        clock: Clock,
        registry: Registry,
        timer: Timer,
        events: Events,
        execute: Execute,
        transaction_of: UnitOf,
        admission: Admission | None = None,
        keeps_time_limits: bool = True,
        thread_slots: ThreadSlots | None = None,
        may_leave: bool = False,
        renewed_at: Callable[[], float] = lambda: float("-inf"),
        kept: Kept = nullcontext,
    ) -> None:
        self._settings = settings
        self._claims = claims
        self._lines = claims.lines
        self._clock = clock
        self._events = events
        outcome_rules = OutcomeRules(settings, clock, events)
        lease = LeaseOf(settings.lease_s, settings.chunk_time_box_s, renewed_at)
        self._running = TaskExecutor(
            claims,
            clock,
            registry,
            outcome_rules,
            execute,
            transaction_of,
            keeps_time_limits,
            lease,
        )
        settling = Settler(settings, claims, clock, timer, events)
        self._chunks = ChunkRun(
            settings,
            clock,
            registry,
            self._running,
            settling,
            thread_slots or ThreadSlots(),
            admission,
            events,
            kept,
        )
        self._may_leave = may_leave
        self._waitlist_runner = WaitlistRunner(settings, claims, registry, self._chunks)
        #: By queue, when rows that lapsed have a turn though others wait: they get half of the time at most.
        self._suspects_at: dict[str, float] = {}

    def run(self, entries: Sequence[Entry], for_s: float = 0) -> Report:
        """The fast path: the entries of messages that fell due. Lines of limited tags that it met it goes on with
        `for_s` seconds."""
        claimed_at, tally = monotonic(), Tally()
        tasks = self._claims.claim(entries)
        met = self._lines.met()
        self._run_chunk(tasks, claimed_at, tally)
        early: list[Entry] = []
        if (claimed := len(tasks)) + met.held < len(entries):
            found = {task.id for task in tasks}
            early = self._look_after(
                {entry[:2]: entry for entry in entries if entry.id not in found}, tally
            )
        self._waitlist_runner.gather(met, len(entries), {entry[3:] for entry in entries})
        openings = self._waitlist_runner.go_on(
            met.lines | self._lines.met().lines, len(entries), for_s, tally
        )
        return self._report(tally, claimed, tuple(early), lines=openings)

    def drain(self, queue: str, priorities: Sequence[int], limit: int, for_s: float = 0) -> Report:
        """The slow path: whatever is due, straight from the table; and what waits in line."""
        claimed_at, tally = monotonic(), Tally()
        is_suspects_turn = claimed_at >= self._suspects_at.setdefault(
            queue, claimed_at + SUSPECTS_S
        )
        most = limit - 1 if is_suspects_turn else limit
        tasks = self._claims.claim_due(queue, priorities, most) if most else []
        met = self._lines.met()
        is_full = len(tasks) + met.held >= most
        self._run_chunk(tasks, claimed_at, tally)
        if is_suspects_turn or not is_full:
            is_full = self._run_suspect(queue, priorities, tally) or is_full
            met = WaitlistsSeen(met.lines | self._lines.met().lines, met.held)
        self._waitlist_runner.gather(met, limit, {(queue, priority) for priority in priorities})
        lines = met.lines if is_full and not is_suspects_turn else met.lines | self._lines.of(queue)
        # Those that wait behind a backlog have a chunk of their own, or they would keep it waiting.
        later = lines - met.lines if is_full else set()
        openings = self._waitlist_runner.go_on(lines - later, limit, for_s, tally)
        openings += tuple(WaitlistState(*line, None) for line in sorted(later))
        return self._report(tally, tally.claimed, is_full=is_full, lines=openings)

    def _run_suspect(self, queue: str, priorities: Sequence[int], tally: Tally) -> bool:
        """A row that lapsed, if there is one: last, since it may kill this process."""
        claimed_at, rests_s = monotonic(), 0.0
        self._suspects_at[queue] = math.inf  # for this process' other threads
        try:
            abandoned_row = self._claims.claim_abandoned(queue, priorities)
            if abandoned_row is None:
                rests_s = max(SUSPECTS_S, SUSPECTS_SHARE * (monotonic() - claimed_at))
                return False
            self._chunks.run_alone(abandoned_row, claimed_at, tally)
            rests_s = monotonic() - claimed_at
            return True
        finally:
            self._suspects_at[queue] = monotonic() + rests_s

    def work_off(self, queue: str, tag: str, limit: int, for_s: float) -> Report:
        """Those who wait in line for a limited tag, as long as there is room for them."""
        tally = Tally()
        openings = self._waitlist_runner.go_on({(queue, tag)}, limit, for_s, tally)
        return self._report(tally, tally.claimed, lines=openings)

    @property
    def left(self) -> tuple[int, ...]:
        """The ids of rows that run on in this process, though their chunks are over."""
        return self._chunks.left

    def _report(
        self,
        tally: Tally,
        claimed: int,
        early: tuple[Entry, ...] = (),
        is_full: bool = False,
        lines: tuple[WaitlistState, ...] = (),
    ) -> Report:
        tally.add(*self._chunks.ended())
        wanted = tally.wanted if 2 * tally.wanting >= tally.started else 0
        ran, seconds = tally.ran, tally.seconds
        return Report(
            claimed,
            ran,
            seconds,
            early,
            is_full,
            wanted,
            os.getpid(),
            self._chunks.left,
            lines=lines,
        )

    def _run_chunk(self, tasks: Sequence[DelayTask], claimed_at: float, tally: Tally) -> None:
        self._chunks.run(tasks, claimed_at, tally, self._may_leave)

    def _look_after(self, missing: dict[tuple[int, int], Entry], tally: Tally) -> list[Entry]:
        """The entries that the claim did not get, by id and version. Those that were early by a blink are waited for,
        other early ones go back to the wheel, those that lapsed before are claimed alone; all others are not ours:
        cancelled, moved, or somebody else's already."""
        now = self._clock.now_us()
        horizon_s = self._settings.horizon_s
        soon: list[Entry] = []
        early: list[Entry] = []
        abandoned: list[Entry] = []
        for miss in self._claims.misses({id for id, _ in missing}):
            if miss.status is not Status.NOT_COMPLETE or miss[:2] not in missing:
                continue
            entry = missing[miss[:2]]._replace(due_us=miss.due_us)
            if miss.lapses and miss.due_us <= now + CLOCK_TOLERANCE_US:
                abandoned.append(entry)
            elif miss.due_us <= now + CLOCK_TOLERANCE_US:
                soon.append(entry)
            elif horizon_s is None or miss.due_us <= now + horizon_s * 1e6:
                early.append(entry)
        dropped = len(missing) - len(soon) - len(early) - len(abandoned)
        if dropped:
            self._events.emit("entry.dropped", count=dropped)
        if soon or abandoned:
            self._clock.forget()  # either it is wrong about the database's, or a row was locked for a moment
            now = self._clock.now_us()
            early += [entry for entry in soon if entry.due_us > now + CLOCK_TOLERANCE_US]
            soon = [entry for entry in soon if entry.due_us <= now + CLOCK_TOLERANCE_US]
            tolerance_us = min(
                max((entry.due_us for entry in soon + abandoned), default=now) - now,
                CLOCK_TOLERANCE_US,
            )
            time.sleep((max(tolerance_us, 0) + CLOCK_TOLERANCE_SLACK_US) / 1e6)
            claimed_at = monotonic()
            self._run_chunk(self._claims.claim(soon), claimed_at, tally)
        for entry in abandoned:
            claimed_at = monotonic()
            task = self._claims.claim_alone(entry.id, entry.version)
            if task is not None:
                self._chunks.run_alone(task, claimed_at, tally)
        return early

    # -- rows that run on ---------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits for rows that run side by side with others, and whose chunks are over."""
        self._chunks.finish()

    @property
    def watcher(self) -> Watcher | None:
        return self._running.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self._running.watcher = watcher
