"""The end of a chunk's rows: their settlements, made and repeated, and what is armed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from delaytasks.core.clock import Clock, monotonic, to_us
from delaytasks.core.errors import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.interfaces import ClaimStore, Entry, Settlement, Timer
from delaytasks.core.settings import Settings
from delaytasks.core.states import MOVES, Status, following
from delaytasks.core.task import DelayTask
from delaytasks.execution.chunk import Chunk

#: Rows that are tried one by one although some transaction may have locked them; each try takes seconds.
MOST_LOCKED = 3
#: Makes settlements, and returns the ids of those that were accepted.
Settle = Callable[[Sequence[Settlement]], set[int]]


def is_locked(error: StoreError) -> bool:
    """Whether the database answers, and some open transaction is in the way."""
    return isinstance(error, StoreUnavailableError) and error.is_locked


class Settler:
    def __init__(
        self, settings: Settings, claims: ClaimStore, clock: Clock, timer: Timer, events: Events
    ) -> None:
        self._settings = settings
        self._claims = claims
        self._clock = clock
        self._timer = timer
        self._events = events
        #: Id and version of the row that was found to be locked last.
        self._told_locked: tuple[int, int] | None = None

    def settle(self, chunk: Chunk, patience_s: float, settle: Settle | None = None) -> bool:
        """What is finished, and what will not be started. Without patience, one try: then it is the runner's again, as
        it is (False) while somebody settles. `settle` is tried first, as the way to do it."""
        chunk.keep(Settlement(task, "give_back") for task in chunk.take_waiting())
        return self.settle_finished(chunk, patience_s, settle)

    def settle_finished(
        self, chunk: Chunk, patience_s: float, settle: Settle | None = None
    ) -> bool:
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
        except (StoreUnavailableError, OutcomeUnknownError) as error:
            if len(settlements) > 1 and is_locked(error):
                self._settle_singly(chunk, settlements, deadline)
                return
            chunk.keep(settlements)
            raise
        except StoreError:
            # Refused, because of one of them: the others must not suffer, nor run again.
            self._settle_singly(chunk, settlements, deadline)

    def _settle_singly(
        self, chunk: Chunk, settlements: Sequence[Settlement], deadline: float
    ) -> None:
        """Those that are refused or locked come last, so that no other one waits for them."""
        refusal: StoreError | None = None
        locked: list[Settlement] = []
        untried: list[Settlement] = []
        for number, one in enumerate(settlements):
            try:
                if len(locked) < MOST_LOCKED:
                    self._tell([one], self._claims_settle([one]))
                else:
                    untried.append(one)
            except (StoreUnavailableError, OutcomeUnknownError) as error:
                if not is_locked(error):
                    chunk.keep([*locked, *untried, *settlements[number:]])
                    raise
                locked.append(one)
            except StoreError as error:
                chunk.keep([one])
                refusal = error
        later = [*untried, *locked]
        for number, one in enumerate(later):
            try:
                self._tell([one], self._settled([one], deadline, self._claims.settle))
            except StoreError:
                chunk.keep(later[number:])
                raise
        if refusal is not None:
            raise refusal

    def _settled(
        self, settlements: Sequence[Settlement], deadline: float, settle: Settle
    ) -> set[int]:
        """A settlement is fenced and can be repeated, so it is, for as long as the leases may be ours."""
        while True:
            try:
                return self._storable_settled(settlements, settle)
            except (StoreUnavailableError, OutcomeUnknownError) as error:
                if is_locked(error) and len(settlements) > 1:
                    raise
                if is_locked(error):
                    self._tell_locked(settlements[0].task)
                self._events.emit("settle.waits", error=str(error), cause=error)
                if monotonic() > deadline:
                    raise
                time.sleep(0.5)
                settle = self._claims.settle

    def _claims_settle(self, settlements: Sequence[Settlement]) -> set[int]:
        return self._storable_settled(settlements, self._claims.settle)

    @staticmethod
    def _storable_settled(settlements: Sequence[Settlement], settle: Settle) -> set[int]:
        """Some databases refuse characters of an error's text, which is then written in ASCII."""
        try:
            return settle(settlements)
        except (StoreUnavailableError, OutcomeUnknownError):
            raise
        except StoreError:
            text = settlements[0].error
            if len(settlements) > 1 or text is None or text.isascii():
                raise
            plain = text.encode("ascii", "backslashreplace").decode()
            return settle([replace(settlements[0], error=plain)])

    def _tell_locked(self, task: DelayTask) -> None:
        """Once: each try to settle the row finds it again."""
        if self._told_locked == (task.id, task.version):
            return
        self._told_locked = task.id, task.version
        remedy = (
            "an open transaction has locked this task's row (with SQLite: the database); if its processor began the "
            "transaction, commit it or roll it back before the processor returns"
        )
        self._events.emit("task.row_locked", id=task.id, tag=task.tag, remedy=remedy)

    def _tell(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        """What became of them, and their rows' next time."""
        done = sum(s.move == "succeed" and s.task.id in accepted for s in settlements)
        if done:
            self._events.emit("task.succeeded", count=done)
            if self._settings.log_successes:
                self._tell_done(settlements, accepted)
        for s in settlements:
            if s.task.id not in accepted:
                self._events.emit("task.lease_lost", id=s.task.id, tag=s.task.tag)
        waits = (s for s in settlements if MOVES[s.move].target is Status.NOT_COMPLETE)
        self._arm_again([s for s in waits if s.task.id in accepted])

    def _tell_done(self, settlements: Sequence[Settlement], accepted: Container[int]) -> None:
        for s in settlements:
            if s.move == "succeed" and s.task.id in accepted:
                late_s = ((s.began or s.task.due) - s.task.due).total_seconds()
                self._events.emit(
                    "task.done",
                    id=s.task.id,
                    tag=s.task.tag,
                    attempt=s.task.attempts,
                    late_s=late_s,
                )

    def _arm_again(self, settlements: Sequence[Settlement]) -> None:
        horizon = self._clock.now_us() + (self._settings.horizon_s or 1e9) * 1e6
        entries = [
            Entry(
                task.id,
                following(task.version),
                to_us(s.due or task.expected_time),
                task.queue,
                task.priority,
            )
            for s, task in ((s, s.task) for s in settlements)
        ]
        near = [entry for entry in entries if entry.due_us <= horizon]
        if near:
            self._timer.arm(near)
