"""The way of a task, part 3: claim, run, settle. Here a row goes from RUNNING to DONE."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.events import Events
from delaytasks.core.ports import ClaimStore, Entry, Settlement, Timer
from delaytasks.core.settings import Settings
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.engine.admission import Admission
from delaytasks.engine.chunk import Chunk, TimeBox
from delaytasks.engine.endings import Endings
from delaytasks.engine.registry import Registry
from delaytasks.engine.run import UnitOf
from delaytasks.engine.running import Execute, Running, Watcher
from delaytasks.engine.settling import Settling

#: A message that is early by less is worth waiting for: clocks agree to a fraction of it.
NAP_US = 50_000
#: Slept beyond it, since some databases tell the time in whole milliseconds.
NAP_SLACK_US = 2_000


class Report(NamedTuple):
    """What became of a chunk, as the worker's main process wants to know it."""

    claimed: int = 0
    ran: int = 0
    seconds: float = 0.0
    early: tuple[Entry, ...] = ()
    is_full: bool = False


class Runner:
    """Runs chunks in one process. `execute` calls the processor in the surroundings that it expects."""

    def __init__(
        self,
        settings: Settings,
        claims: ClaimStore,
        clock: Clock,
        registry: Registry,
        timer: Timer,
        events: Events,
        execute: Execute,
        unit_of: UnitOf,
        admission: Admission | None = None,
        keeps_time_limits: bool = True,
    ) -> None:
        self._settings = settings
        self._claims = claims
        self._clock = clock
        self._events = events
        self._admission = admission
        self._time_limits = registry.time_limits
        endings = Endings(settings, clock, events)
        self._running = Running(claims, clock, registry, endings, execute, unit_of, keeps_time_limits)
        self._settling = Settling(settings, claims, clock, timer, events)
        self._time_box = TimeBox(settings.chunk_time_box_s, self._expire, self._time_box_failed)

    def run(self, entries: Sequence[Entry]) -> Report:
        """The fast path: the entries of messages that fell due."""
        claimed_at = monotonic()
        tasks = self._claims.claim(entries)
        ran, seconds = self._run_chunk(tasks, claimed_at)
        early: list[Entry] = []
        if len(tasks) < len(entries):
            claimed = {task.id for task in tasks}
            missing = {entry[:2]: entry for entry in entries if entry.id not in claimed}
            also, early = self._look_after(missing)
            ran, seconds = ran + also[0], seconds + also[1]
        return Report(len(tasks), ran, seconds, tuple(early))

    def drain(self, queue: str, priorities: Sequence[int], limit: int) -> Report:
        """The slow path: whatever is due, straight from the table."""
        claimed_at = monotonic()
        tasks = self._claims.claim_due(queue, priorities, limit)
        is_full = len(tasks) >= limit
        ran, seconds = self._run_chunk(tasks, claimed_at)
        claimed = len(tasks)
        if not is_full:
            suspect = self._claims.claim_suspect(queue, priorities)
            if suspect is not None:
                also, longer = self._run_chunk([suspect], monotonic())
                claimed, ran, seconds, is_full = claimed + 1, ran + also, seconds + longer, True
        return Report(claimed, ran, seconds, (), is_full)

    def _look_after(self, missing: dict[tuple[int, int], Entry]) -> tuple[tuple[int, float], list[Entry]]:
        """The entries that the claim did not get, by id and version. Those that were early by a blink are waited for,
        other early ones go back to the wheel, those that lapsed before are claimed alone; all others are not ours:
        cancelled, moved, or somebody else's already."""
        now = self._clock.now_us()
        horizon_s = self._settings.horizon_s
        soon: list[Entry] = []
        early: list[Entry] = []
        suspects: list[Entry] = []
        for miss in self._claims.misses({id for id, _ in missing}):
            if miss.status is not Status.NOT_COMPLETE or miss[:2] not in missing:
                continue
            entry = missing[miss[:2]]._replace(due_us=miss.due_us)
            if miss.lapses and miss.due_us <= now + NAP_US:
                suspects.append(entry)
            elif miss.due_us <= now + NAP_US:
                soon.append(entry)
            elif horizon_s is None or miss.due_us <= now + horizon_s * 1e6:
                early.append(entry)
        dropped = len(missing) - len(soon) - len(early) - len(suspects)
        if dropped:
            self._events.emit("entry.dropped", count=dropped)
        ran, seconds = 0, 0.0
        if soon or suspects:
            self._clock.forget()  # either it is wrong about the database's, or a row was locked for a moment
            now = self._clock.now_us()
            early += [entry for entry in soon if entry.due_us > now + NAP_US]
            soon = [entry for entry in soon if entry.due_us <= now + NAP_US]
            nap_us = min(max((entry.due_us for entry in soon + suspects), default=now) - now, NAP_US)
            time.sleep((max(nap_us, 0) + NAP_SLACK_US) / 1e6)
            claimed_at = monotonic()
            ran, seconds = self._run_chunk(self._claims.claim(soon), claimed_at)
        for entry in suspects:
            claimed_at = monotonic()
            task = self._claims.claim_alone(entry.id, entry.version)
            also, longer = self._run_chunk([task] if task else [], claimed_at)
            ran, seconds = ran + also, seconds + longer
        return (ran, seconds), early

    # -- a chunk ----------------------------------------------------------------------------------

    def _run_chunk(self, tasks: Sequence[DelayTask], claimed_at: float) -> tuple[int, float]:
        if not tasks:
            return 0, 0.0
        refused: Sequence[Settlement] = ()
        if self._admission is not None:
            tasks, refused = self._admission.admit(tasks)
            if not tasks and not refused:
                return 0, 0.0
        claimed = self._clock.now()
        self._events.emit("chunk.claimed", count=len(tasks))
        if self._time_limits:  # last, so that nothing is at stake but themselves
            tasks = sorted(tasks, key=lambda task: task.tag in self._time_limits)
        chunk = Chunk(tasks, self._settings.lease_s - (monotonic() - claimed_at))
        for settlement in refused:
            chunk.finish(settlement)
        self._time_box.open(chunk)
        ran, began_at = 0, monotonic()
        try:
            while (task := self._start_next(chunk)) is not None:
                chunk.finish(self._running.run(task, claimed))
                ran += 1
            seconds = monotonic() - began_at
        finally:
            self._time_box.close(chunk)
            try:
                self._settling.settle(chunk, patience_s=self._settings.lease_s)
            finally:
                self._flush()
        return ran, seconds

    def _start_next(self, chunk: Chunk) -> DelayTask | None:
        """A row with a time limit may take this process with it: what is finished is settled before it starts, and
        what waits behind it is given back by the time box."""
        if self._time_limits and (task := chunk.next) is not None and task.tag in self._time_limits:
            self._settling.settle_finished(chunk, patience_s=self._settings.lease_s)
        return chunk.start_next()

    def _expire(self, chunk: Chunk) -> None:
        """The time box is over: what is finished is settled, what did not start goes to other workers at once."""
        waiting = chunk.take_waiting()
        for task in waiting:
            chunk.finish(Settlement(task, "give_back", error=None))
        if waiting:
            self._events.emit("chunk.gave_back", count=len(waiting))
        try:
            self._settling.settle(chunk, patience_s=0)
        finally:
            self._flush()  # whoever watches sees the row that is still running

    def _time_box_failed(self, error: Exception) -> None:
        self._events.emit("loop.failed", loop="time box", error=f"{type(error).__name__}: {error}")

    def _flush(self) -> None:
        if self.watcher is not None:
            self.watcher.flush()

    @property
    def watcher(self) -> Watcher | None:
        return self._running.watcher

    @watcher.setter
    def watcher(self, watcher: Watcher | None) -> None:
        self._running.watcher = watcher
