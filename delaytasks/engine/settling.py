"""The end of a chunk's rows: their settlements, made and repeated, and what is armed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from delaytasks.core.clock import Clock, monotonic, to_us
from delaytasks.core.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.ports import ClaimStore, Entry, Settlement, Timer
from delaytasks.core.settings import Settings
from delaytasks.core.states import MOVES, Status, following
from delaytasks.engine.chunk import Chunk

#: Makes settlements, and returns the ids of those that were accepted.
Settle = Callable[[Sequence[Settlement]], set[int]]


class Settling:
    def __init__(self, settings: Settings, claims: ClaimStore, clock: Clock, timer: Timer, events: Events) -> None:
        self._settings = settings
        self._claims = claims
        self._clock = clock
        self._timer = timer
        self._events = events

    def settle(self, chunk: Chunk, patience_s: float, settle: Settle | None = None) -> bool:
        """What is finished, and what will not be started. Without patience, one try: then it is the runner's again, as
        it is (False) while somebody settles. `settle` is tried first, as the way to do it."""
        chunk.keep(Settlement(task, "give_back") for task in chunk.take_waiting())
        return self.settle_finished(chunk, patience_s, settle)

    def settle_finished(self, chunk: Chunk, patience_s: float, settle: Settle | None = None) -> bool:
        if not chunk.settling.acquire(blocking=patience_s > 0):
            return False
        try:
            self._settle_finished(chunk, patience_s, settle or self._claims.settle)
        finally:
            chunk.settling.release()
        return True

    def _settle_finished(self, chunk: Chunk, patience_s: float, settle: Settle) -> None:
        finished = chunk.take_finished()
        self._tell([s for s in finished if s.is_made], {s.task.id for s in finished})
        settlements = [s for s in finished if not s.is_made]
        deadline = monotonic() + patience_s
        try:
            if settlements:
                self._tell(settlements, self._settled(settlements, deadline, settle))
        except (StoreUnavailableError, OutcomeUnknownError):
            chunk.keep(settlements)
            raise
        except StoreError:
            # Refused, because of one of them: the others must not suffer, nor run again.
            self._settle_singly(chunk, settlements, deadline)

    def _settle_singly(self, chunk: Chunk, settlements: Sequence[Settlement], deadline: float) -> None:
        refusal: StoreError | None = None
        for number, one in enumerate(settlements):
            try:
                self._tell([one], self._settled([one], deadline, self._claims.settle))
            except (StoreUnavailableError, OutcomeUnknownError):
                chunk.keep(settlements[number:])
                raise
            except StoreError as error:
                chunk.keep([one])
                refusal = error
        if refusal is not None:
            raise refusal

    def _settled(self, settlements: Sequence[Settlement], deadline: float, settle: Settle) -> set[int]:
        """A settlement is fenced and can be repeated, so it is, for as long as the leases may be ours."""
        while True:
            try:
                return settle(settlements)
            except (StoreUnavailableError, OutcomeUnknownError) as error:
                self._events.emit("store.down", error=str(error))
                if monotonic() > deadline:
                    raise
                time.sleep(0.5)
                settle = self._claims.settle
            except StoreError:
                text = settlements[0].error
                if len(settlements) > 1 or text is None or text.isascii():
                    raise
                plain = text.encode("ascii", "backslashreplace").decode()
                settlements = [replace(settlements[0], error=plain)]

    def _tell(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        """What became of them, and their rows' next time."""
        done = sum(s.move == "succeed" and s.task.id in accepted for s in settlements)
        if done:
            self._events.emit("task.succeeded", count=done)
        for s in settlements:
            if s.task.id not in accepted:
                self._events.emit("task.lease_lost", id=s.task.id, tag=s.task.tag)
        waits = (s for s in settlements if MOVES[s.move].target is Status.NOT_COMPLETE)
        self._arm_again([s for s in waits if s.task.id in accepted])

    def _arm_again(self, settlements: Sequence[Settlement]) -> None:
        horizon = self._clock.now_us() + (self._settings.horizon_s or 1e9) * 1e6
        entries = [
            Entry(task.id, following(task.version), to_us(s.due or task.expected_time), task.queue, task.priority)
            for s, task in ((s, s.task) for s in settlements)
        ]
        near = [entry for entry in entries if entry.due_us <= horizon]
        if near:
            self._timer.arm(near)
