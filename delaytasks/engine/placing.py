"""Chooses the shard of what is scheduled, where there are several."""

from __future__ import annotations

import random
import threading
from collections import Counter
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


class Placing:
    """A key has a home, an id names its shard, a session is on one; all else goes to any shard that is up."""

    def __init__(self, shards: int, events: Events) -> None:
        self._shards = shards
        self._events = events
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._rests_until = [0.0] * self._shards
        #: When the calls that are under way began.
        self._asked: list[Counter[float]] = [Counter() for _ in range(self._shards)]

    def home(self, tag: str, key: str) -> int:
        return home_of(check_tag(tag), check_key(key), self._shards)

    def of(self, new: NewTask, session: int | None) -> Sequence[int]:
        """The shards that it may go to, in the order in which they are to be tried. `session` is the shard that the
        caller's session is on."""
        home = None if new.key is None else self.home(new.tag, new.key)
        named = None if new.id is None else self._named(check_id(new.id))
        if home is not None and named not in (None, home):
            raise ShardMismatchError(
                f"id {new.id} names shard {named}, and key {new.key!r} of tag {new.tag!r} lives in shard {home}; take "
                "the id from new_id(tag, key)"
            )
        wanted = named if home is None else home
        if session is None:
            return self.any() if wanted is None else [wanted]
        if wanted not in (None, session):
            what = f"id {new.id}" if home is None else f"key {new.key!r} of tag {new.tag!r}"
            raise ShardMismatchError(
                f"{what} belongs to shard {wanted}, and the session is on shard {session}; open one on the database "
                "that shard_for(tag, key) names, or schedule without session="
            )
        return [session]

    def any(self) -> Sequence[int]:
        """All, in a random order; those that seem to be down are the last."""
        now = monotonic()
        numbers = random.sample(range(self._shards), self._shards)
        with self._lock:
            return sorted(numbers, key=lambda number: self._is_left_out(number, now))

    def run(self, numbers: Sequence[int], work: Callable[[int], T]) -> T:
        """`work(shard)` with the first one that is up: where it is not, nothing was done."""
        for number in numbers[:-1]:
            try:
                return self._ask(number, work)
            except StoreUnavailableError:
                continue  # which was told
        return self._ask(numbers[-1], work)

    def _named(self, id: int) -> int:
        if shard_of(id) >= self._shards:
            raise InvalidIdError(
                f"id {id} names shard {shard_of(id)}, and there are {self._shards}; take ids from new_id()"
            )
        return shard_of(id)

    def _is_left_out(self, number: int, now: float) -> bool:
        return now < self._rests_until[number] or min(self._asked[number], default=now) < now - SLOW_S

    def _ask(self, number: int, work: Callable[[int], T]) -> T:
        began = monotonic()
        with self._lock:
            self._asked[number][began] += 1
            if self._rests_until[number]:  # it was down: one call finds out whether it still is
                self._rests_until[number] = began + REST_S
        try:
            answer = work(number)
        except StoreUnavailableError as error:
            self._rests_until[number] = monotonic() + REST_S
            self._events.emit("store.down", error=str(error), shard=number)
            raise
        finally:
            with self._lock:
                self._asked[number] -= Counter([began])
        self._rests_until[number] = 0.0
        return answer
