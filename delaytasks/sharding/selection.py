"""Chooses the shard of what is scheduled, where there are several."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from delaytasks.core.clock import monotonic
from delaytasks.core.errors import InvalidIdError, ShardMismatchError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.forks import reset_in_child
from delaytasks.core.ids import check_id, shard_of
from delaytasks.core.inputs import check_key, check_tag
from delaytasks.core.shards import home_of
from delaytasks.core.task import NewTask

T = TypeVar("T")
#: A shard that is down is left out for so long, then somebody tries it again.
REST_S = 5.0
#: As long as an answer is due for more than this, nobody else waits for it who has the choice.
SLOW_S = 1.0


class ShardSelection:
    """A key has a home, an id names its shard, a session is on one; all else goes to any shard that is up."""

    def __init__(self, shards: int, events: Events) -> None:
        self._shards = shards
        self._events = events
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._rests_until = [0.0] * self._shards
        #: When each call that is under way began.
        self._asked: list[dict[object, float]] = [{} for _ in range(self._shards)]

    def home(self, tag: str, key: str) -> int:
        return home_of(check_tag(tag), check_key(key), self._shards)

    def of(
        self, new: NewTask, session: int | None, anywhere: tuple[int, ...] = ()
    ) -> tuple[int, ...]:
        """The shards that it may go to, in the order in which they are to be tried: `anywhere`, if it may go to any.
        `session` is the shard that the caller's session is on."""
        wanted, what = self._wanted(new)
        if session is None:
            return anywhere or self.any() if wanted is None else (wanted,)
        if wanted not in (None, session):
            raise ShardMismatchError(
                f"{what} belongs to shard {wanted}, and the session is on shard {session}: open one on the database "
                "that shard_for(tag, key) names, or schedule without session="
            )
        return (session,)

    def _wanted(self, new: NewTask) -> tuple[int | None, str]:
        """The shard that it has to go to, and what says so."""
        if new.id is not None and (shard := shard_of(check_id(new.id))) >= self._shards:
            raise InvalidIdError(
                f"id {new.id} names shard {shard} of {self._shards}; take ids from new_id()"
            )
        if new.key is None:
            return (None, "") if new.id is None else (shard, f"id {new.id}")
        home, what = self.home(new.tag, new.key), f"key {new.key!r} of tag {new.tag!r}"
        if new.id is not None and shard != home:
            raise ShardMismatchError(
                f"{what} belongs to shard {home}, and id {new.id} names shard {shard}: take it from new_id(tag, key)"
            )
        return home, what

    def any(self) -> tuple[int, ...]:
        """All, in a random order; those that seem to be down are the last."""
        now = monotonic()
        numbers = random.sample(range(self._shards), self._shards)
        with self._lock:
            return tuple(sorted(numbers, key=lambda number: self._is_left_out(number, now)))

    def run(self, numbers: Sequence[int], work: Callable[[int], T]) -> T:
        """`work(shard)` with the first one that is up: where it is not, nothing was done."""
        for number in numbers[:-1]:
            try:
                return self._ask(number, work)
            except StoreUnavailableError:
                continue  # which was told
        return self._ask(numbers[-1], work)

    def _is_left_out(self, number: int, now: float) -> bool:
        return (
            now < self._rests_until[number]
            or min(self._asked[number].values(), default=now) < now - SLOW_S
        )

    def _ask(self, number: int, work: Callable[[int], T]) -> T:
        call, began = object(), monotonic()
        with self._lock:
            self._asked[number][call] = began
            if self._rests_until[number]:  # it was down: one call finds out whether it still is
                self._rests_until[number] = began + REST_S
        try:
            answer = work(number)
        except StoreUnavailableError as error:
            if error.shard is not None:  # else it is only busy
                self._rests_until[error.shard] = monotonic() + REST_S
                self._events.emit("store.down", error=str(error), shard=error.shard)
            raise
        finally:
            with self._lock:
                del self._asked[number][call]
        self._rests_until[number] = 0.0
        return answer
