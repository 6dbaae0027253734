"""The Redis of the `redis` timer: sorted sets, and its scripts in Python.

`tests/property/test_redis_timer.py` compares it and a real server with a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import NoScriptError

from delaytasks.broker.redis_timer import _NAMES, ARM, MAX_ENTRIES, TAKE

#: The last member of each `store` set.
END = "."


class Redis:
    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        self._publish = publish
        self.sets: dict[str, dict[str, float]] = {}
        #: The loaded scripts by their hashes; a restart removes them.
        self._scripts: dict[str, Callable[..., Any]] = {}

    def restart(self, is_empty: bool) -> None:
        self._scripts.clear()
        if is_empty:
            self.sets.clear()

    def load(self, script: str) -> None:
        run: dict[str, Callable[..., Any]] = {ARM: self._arm, TAKE: self._take}
        self._scripts[_NAMES[script]] = run[script]

    def call(self, command: str, *words: Any) -> Any:
        """Return the answer to one command. An error is returned, not raised."""
        if command == "ZREMRANGEBYSCORE":
            found, (low, high) = self._set(words[0]), words[1:]
            gone = [member for member, score in found.items() if low <= score <= high]
            for member in gone:
                del found[member]
            return len(gone)
        assert command == "EVALSHA", command
        script = self._scripts.get(words[0])
        return NoScriptError("no matching script") if script is None else script(*words[2:])

    def _set(self, key: str) -> dict[str, float]:
        return self.sets.setdefault(key, {})

    def _arm(self, store: str, channel: str, slot: str, *words: Any) -> None:
        waiting, first = self._set(store), words[0]
        is_lost = END not in waiting
        is_earliest = all(score > first for score in waiting.values())
        waiting.update(zip(words[1::2], words[::2], strict=True))
        if is_lost or is_earliest:
            self._publish(channel, f"{slot} {0 if is_lost else first!r}".encode())

    def _take(
        self, store: str, prepare: str, now: int, late: int, soon: float, back: float, most: int
    ) -> list[Any]:
        waiting, in_hand = self._set(store), self._set(prepare)
        in_hand.pop(END, None)
        was_lost = END not in waiting
        waiting.setdefault(END, float("inf"))
        stale = [member for member, score in _in_order(in_hand) if score <= now][:MAX_ENTRIES]
        for member in stale:
            waiting[member] = now
            del in_hand[member]
        dropped = [member for member, score in waiting.items() if score < late]
        for member in dropped:
            del waiting[member]
        due = [(member, score) for member, score in _in_order(waiting) if score <= soon][:most]
        for member, _ in due:
            in_hand[member] = back
            del waiting[member]
        text = " ".join(f"{member} {score!r}" for member, score in due)
        first, first_in_hand = (
            str(min(some.values(), default="inf")).encode() for some in (waiting, in_hand)
        )
        return [int(was_lost), len(stale), len(dropped), text.encode(), first, first_in_hand]


def _in_order(some: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(some.items(), key=lambda item: (item[1], item[0]))
