"""The way of a task, part 3: claim, run, settle. Here a row goes from RUNNING to DONE."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol

from delaytasks.core.clock import Clock, monotonic, to_us
from delaytasks.core.current import current_run
from delaytasks.core.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.ports import ClaimStore, Entry, Settlement, Timer
from delaytasks.core.settings import Settings
from delaytasks.core.states import MOVES, Status
from delaytasks.core.task import DelayTask
from delaytasks.core.text import storable
from delaytasks.engine.chunk import Chunk, TimeBox
from delaytasks.engine.endings import Endings
from delaytasks.engine.registry import Processor, Registry
from delaytasks.engine.run import Run, UnitOf

Execute = Callable[[Processor, DelayTask], Any]
#: A message that is early by less is worth waiting for: clocks agree to a fraction of it.
NAP_US = 50_000
#: Slept beyond it, since some databases tell the time in whole milliseconds.
NAP_SLACK_US = 2_000
#: A tag without a processor is tried again after a tenth of the time it has waited, within these bounds.
UNKNOWN_MIN_S, UNKNOWN_MAX_S = 5.0, 600.0

_EXITS = (SystemExit, KeyboardInterrupt)


class Report(NamedTuple):
    """What became of a chunk, as the worker's main process wants to know it."""

    claimed: int = 0
    ran: int = 0
    seconds: float = 0.0
    early: tuple[Entry, ...] = ()
    is_full: bool = False


class Watcher(Protocol):
    """Sees every row's run, and is told when to pass on what it saw. It must not raise."""

    def started(self, task: DelayTask, claimed: datetime, began: datetime) -> None: ...
    def ended(self, ending: Settlement, ended: datetime, error: BaseException | None) -> None: ...
    def expired(self, ending: Settlement, claimed: datetime) -> None: ...
    def put_off(self, task: DelayTask, claimed: datetime, why: str) -> None: ...
    def flush(self) -> None: ...


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
    ) -> None:
        self._settings = settings
        self._claims = claims
        self._clock = clock
        self._registry = registry
        self._timer = timer
        self._events = events
        self._execute = execute
        self._unit_of = unit_of
        #: With nobody watching, a row pays a test for it.
        self.watcher: Watcher | None = None
        self._endings = Endings(settings, clock, events)
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
        claimed = self._clock.now()
        self._events.emit("chunk.claimed", count=len(tasks))
        chunk = Chunk(tasks, self._settings.lease_s - (monotonic() - claimed_at))
        self._time_box.open(chunk)
        ran, began_at = 0, monotonic()
        try:
            while (task := chunk.start_next()) is not None:
                chunk.finish(self._run_one(task, claimed))
                ran += 1
            seconds = monotonic() - began_at
        finally:
            self._time_box.close(chunk)
            try:
                self._settle(chunk, patience_s=self._settings.lease_s)
            finally:
                self._flush()
        return ran, seconds

    def _run_one(self, task: DelayTask, claimed: datetime) -> Settlement:
        processor, watcher = self._registry.get(task.tag), self.watcher
        if processor is None:
            return self._give_back_unknown(task, claimed)
        late = self._endings.too_late(processor, task)
        if late is not None:
            if watcher is not None:
                watcher.expired(late, claimed)
            return late
        began, error = self._clock.now(), None
        if watcher is not None:
            watcher.started(task, claimed, began)
        run = Run(task, self._claims, self._unit_of)
        token = current_run.set(run)
        try:
            value = self._execute(processor, task)
            if run.is_written:
                ending = self._endings.of_completed(run, began, None)
            else:
                ending = self._endings.of_value(processor, task, began, value)
        except BaseException as raised:
            if isinstance(raised, _EXITS) and type(raised) not in _EXITS:
                raise  # Celery's WorkerShutdown and WorkerTerminate
            error = raised
            if run.is_certain or run.is_left_open:
                ending = self._endings.of_completed(run, began, error)
            else:  # if its commit came through nonetheless, what we make of the row is refused
                ending = self._endings.of_error(processor, task, began, error)
        finally:
            current_run.reset(token)
        if watcher is not None:
            watcher.ended(ending, self._clock.now(), error)
        return ending

    def _give_back_unknown(self, task: DelayTask, claimed: datetime) -> Settlement:
        """A deploy may bring its processor: never failed, tried again less and less often."""
        now = self._clock.now()
        first_due = (task.create_time or now) + timedelta(seconds=task.delay_s)
        wait = min(max((now - first_due).total_seconds() / 10, UNKNOWN_MIN_S), UNKNOWN_MAX_S)
        self._events.emit("task.no_processor", id=task.id, tag=task.tag, next_try_s=wait)
        known = ", ".join(sorted(p.tag for p in self._registry)) or "none"
        error = storable(
            f"no such processor, tag={task.tag} (this worker knows: {known}); is its module imported?", 4096
        )
        if self.watcher is not None:
            self.watcher.put_off(task, claimed, error)
        return Settlement(task, "give_back", None, error, now + timedelta(seconds=wait))

    def _expire(self, chunk: Chunk) -> None:
        """The time box is over: what is finished is settled, what did not start goes to other workers at once."""
        waiting = chunk.take_waiting()
        for task in waiting:
            chunk.finish(Settlement(task, "give_back", error=None))
        if waiting:
            self._events.emit("chunk.gave_back", count=len(waiting))
        try:
            self._settle(chunk, patience_s=0)
        finally:
            self._flush()  # whoever watches sees the row that is still running

    def _time_box_failed(self, error: Exception) -> None:
        self._events.emit("loop.failed", loop="time box", error=f"{type(error).__name__}: {error}")

    def _flush(self) -> None:
        if self.watcher is not None:
            self.watcher.flush()

    def _settle(self, chunk: Chunk, patience_s: float) -> None:
        """What is finished, and what will not be started. Without patience, one try: then it is the runner's again."""
        waiting = [Settlement(task, "give_back") for task in chunk.take_waiting()]
        settlements = chunk.take_finished() + waiting
        made, settlements = [s for s in settlements if s.is_made], [s for s in settlements if not s.is_made]
        try:
            accepted = self._settled(settlements, monotonic() + patience_s) if settlements else set()
        except StoreError:
            for settlement in settlements:
                chunk.finish(settlement)
            raise
        done = sum(s.move == "succeed" and (s.is_made or s.task.id in accepted) for s in made + settlements)
        if done:
            self._events.emit("task.succeeded", count=done)
        lost = [s for s in settlements if s.task.id not in accepted]
        for settlement in lost:
            self._events.emit("task.lease_lost", id=settlement.task.id, tag=settlement.task.tag)
        waits = [s for s in settlements if MOVES[s.move].target is Status.NOT_COMPLETE]
        self._arm_again([s for s in waits if s.task.id in accepted])

    def _settled(self, settlements: Sequence[Settlement], deadline: float) -> set[int]:
        """A settlement is fenced and can be repeated, so it is, for as long as the leases may be ours."""
        while True:
            try:
                return self._claims.settle(settlements)
            except (StoreUnavailableError, OutcomeUnknownError) as error:
                self._events.emit("store.down", error=str(error))
                if monotonic() > deadline:
                    raise
                time.sleep(0.5)
            except StoreError:
                # Refused, because of one of them: the others must not suffer, nor run again.
                if len(settlements) > 1:
                    return set().union(*(self._settled([settlement], deadline) for settlement in settlements))
                text = settlements[0].error
                if text is None or text.isascii():
                    raise
                plain = text.encode("ascii", "backslashreplace").decode()
                settlements = [replace(settlements[0], error=plain)]

    def _arm_again(self, settlements: Sequence[Settlement]) -> None:
        horizon = self._clock.now_us() + (self._settings.horizon_s or 1e9) * 1e6
        entries = [
            Entry(s.task.id, s.task.version + 1, to_us(s.due or s.task.expected_time), s.task.queue, s.task.priority)
            for s in settlements
        ]
        near = [entry for entry in entries if entry.due_us <= horizon]
        if near:
            self._timer.arm(near)
