"""Selects the shard of a new task, in a deployment with several databases."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import InvalidIdError, ShardMismatchError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.forks import reset_in_child
from delaytasks.core.ids import check_id, home_of, shard_of
from delaytasks.core.inputs import check_key, check_tag
from delaytasks.core.new_task import NewTask

T = TypeVar("T")
#: A shard that is down is tried last for this time; then one call tries it again.
SHARD_REST_S = 5.0
#: A shard that has owed an answer for this time is tried last by calls that may use another one.
SLOW_S = 1.0


class ShardSelection:
    """Selects the home shard of a key, the shard in an id, or any shard that can be reached."""

    def __init__(self, shards: int, events: Events) -> None:
        self._shards = shards
        self._events = events
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._rests_until = [0.0] * self._shards
        #: For each shard, the start times of the calls that have no answer yet.
        self._began: list[dict[object, float]] = [{} for _ in range(self._shards)]

    def home(self, tag: str, key: str) -> int:
        return home_of(check_tag(tag), check_key(key), self._shards)

    def of(
        self, new: NewTask, session_shard: int | None, any_shard: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """Return the shards that the task may go to, in the order in which to try them.

        `any_shard` is returned for a task that may go to any shard. `session_shard` is the shard
        of the caller's session.
        """
        required, reason = self._required(new)
        if session_shard is None:
            return (any_shard or self.any()) if required is None else (required,)
        if required not in (None, session_shard):
            raise ShardMismatchError(
                f"{reason} belongs to shard {required}, and the session is on shard "
                f"{session_shard}: open one on the database that shard_for(tag, key) names, or "
                "schedule without session="
            )
        return (session_shard,)

    def _required(self, new: NewTask) -> tuple[int | None, str]:
        """Return the shard that the task must go to, and the key or id that requires it."""
        if new.id is not None and (shard := shard_of(check_id(new.id))) >= self._shards:
            raise InvalidIdError(
                f"id {new.id} names shard {shard} of {self._shards}; take ids from new_id()"
            )
        if new.key is None:
            return (None, "") if new.id is None else (shard, f"id {new.id}")
        home, reason = self.home(new.tag, new.key), f"key {new.key!r} of tag {new.tag!r}"
        if new.id is not None and shard != home:
            raise ShardMismatchError(
                f"{reason} belongs to shard {home}, and id {new.id} names shard {shard}: "
                "take it from new_id(tag, key)"
            )
        return home, reason

    def any(self) -> tuple[int, ...]:
        """Return all shards in a random order; shards that seem to be down come last."""
        now = monotonic()
        numbers = random.sample(range(self._shards), self._shards)
        with self._lock:
            return tuple(sorted(numbers, key=lambda number: self._seems_down(number, now)))

    def run(self, numbers: Sequence[int], work: Callable[[int], T]) -> T:
        """Call `work(shard)` with the first of the shards that can be reached."""
        for number in numbers[:-1]:
            try:
                return self._call(number, work)
            except StoreUnavailableError:
                continue  # `_call` has emitted the event; nothing was written there
        return self._call(numbers[-1], work)

    def _seems_down(self, number: int, now: float) -> bool:
        return (
            now < self._rests_until[number]
            or min(self._began[number].values(), default=now) < now - SLOW_S
        )

    def _call(self, number: int, work: Callable[[int], T]) -> T:
        call, began = object(), monotonic()
        with self._lock:
            self._began[number][call] = began
            if self._rests_until[number]:  # this call finds out whether the shard is still down
                self._rests_until[number] = began + SHARD_REST_S
        try:
            answer = work(number)
        except StoreUnavailableError as error:
            if error.shard is not None:  # without a number the shard is only busy
                self._rests_until[error.shard] = monotonic() + SHARD_REST_S
                self._events.emit("store.down", error=str(error), shard=error.shard)
            raise
        finally:
            with self._lock:
                del self._began[number][call]
        self._rests_until[number] = 0.0
        return answer
