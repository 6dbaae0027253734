"""The end of a chunk's rows: their settlements, made and repeated, and what is armed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
        settlements = chunk.take_finished()
        made, settlements = [s for s in settlements if s.is_made], [s for s in settlements if not s.is_made]
        try:
            accepted = self._settled(settlements, monotonic() + patience_s, settle) if settlements else set()
        except StoreError:
            chunk.keep(settlements)
            raise
        done = sum(s.move == "succeed" and (s.is_made or s.task.id in accepted) for s in made + settlements)
        if done:
            self._events.emit("task.succeeded", count=done)
        lost = [s for s in settlements if s.task.id not in accepted]
        for settlement in lost:
            self._events.emit("task.lease_lost", id=settlement.task.id, tag=settlement.task.tag)
        waits = [s for s in settlements if MOVES[s.move].target is Status.NOT_COMPLETE]
        self._arm_again([s for s in waits if s.task.id in accepted])

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
                # Refused, because of one of them: the others must not suffer, nor run again.
                if len(settlements) > 1:
                    return self._settled_singly(settlements, deadline)
                text = settlements[0].error
                if text is None or text.isascii():
                    raise
                plain = text.encode("ascii", "backslashreplace").decode()
                settlements = [replace(settlements[0], error=plain)]

    def _settled_singly(self, settlements: Sequence[Settlement], deadline: float) -> set[int]:
        accepted: set[int] = set()
        refusal: StoreError | None = None
        for one in settlements:
            try:
                accepted |= self._settled([one], deadline, self._claims.settle)
            except (StoreUnavailableError, OutcomeUnknownError):
                raise
            except StoreError as error:
                refusal = error
        if refusal is not None:
            raise refusal
        return accepted

    def _arm_again(self, settlements: Sequence[Settlement]) -> None:
        horizon = self._clock.now_us() + (self._settings.horizon_s or 1e9) * 1e6
        entries = [
            Entry(task.id, following(task.version), to_us(s.due or task.expected_time), task.queue, task.priority)
            for s, task in ((s, s.task) for s in settlements)
        ]
        near = [entry for entry in entries if entry.due_us <= horizon]
        if near:
            self._timer.arm(near)
