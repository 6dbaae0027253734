"""The lines of limited tags that a worker goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delaytasks.core.clock import monotonic
from delaytasks.core.lines import LOOK_S, Opening

#: How long a process goes on with a line before others have their turn: while there is another free one, and else.
GO_ON_S, GO_ON_ALONE_S = 1.0, 0.05
#: A place that seemed taken may have been on its way from one task to the next: the second look comes soon, each
#: further one after twice the time.
SOON_S = 0.02
NEVER = float("inf")
Key = tuple[str, str]


@dataclass
class Line:
    """Of one tag in one queue."""

    #: Processes that would find somebody to run.
    wanted: int = 0
    #: Processes that are at it.
    jobs: int = 0
    looks_at: float = NEVER
    #: How often in a row somebody looked in vain.
    misses: int = 0


class Lines:
    """Not thread-safe: the dispatcher's lock guards it."""

    def __init__(self) -> None:
        self._lines: dict[Key, Line] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def queues(self) -> set[str]:
        return {queue for queue, _ in self._lines}

    @property
    def is_wanted(self) -> bool:
        """Whether somebody could go on with one now."""
        return any(line.wanted or line.jobs for line in self._lines.values())

    def heard(self, openings: Sequence[Opening], of: Key | None = None) -> float | None:
        """What a process found, `of` being the line that it was sent to; returns when somebody should look again,
        if nobody would."""
        if of is not None and (line := self._lines.get(of)) is not None:
            line.jobs = max(line.jobs - 1, 0)
            if not openings:
                line.wanted, line.looks_at = 0, NEVER
        first = NEVER
        for opening in openings:
            if opening.open is None:
                if opening[:2] in self._lines:
                    continue  # somebody is at it, or looks within a second
                opening = opening._replace(open=1)
            line = self._lines.setdefault(opening[:2], Line())
            look_s, is_of_it = opening.look_s, of == opening[:2]
            # Who ends leaves a place of his own, beside those that others have left.
            line.wanted = max(line.wanted + (1 if is_of_it else 0), opening.open) if opening.open else 0
            if opening.open:
                line.misses = 0
            elif is_of_it:
                look_s = min(look_s, SOON_S * 2 ** min(line.misses, 10))
                line.misses += 1
            at = monotonic() + look_s
            if at < line.looks_at:
                line.looks_at = at
                first = min(first, look_s)
        self._lines = {k: line for k, line in self._lines.items() if line.wanted or line.jobs or line.looks_at < NEVER}
        return None if first == NEVER else first

    def failed(self, of: Key) -> float | None:
        return self.heard([Opening(*of, 0, LOOK_S)], of)

    def next(self) -> Key | None:
        """The line that a free process should look at."""
        now = monotonic()
        for key, line in self._lines.items():
            if line.wanted or line.looks_at <= now:
                line.wanted = max(line.wanted - 1, 0)
                line.jobs += 1
                line.looks_at = NEVER
                self._lines[key] = self._lines.pop(key)  # the next one's turn comes first
                return key
        return None

    def clear(self) -> None:
        self._lines.clear()
