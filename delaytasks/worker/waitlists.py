"""The lines of limited tags that a worker goes on with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from delaytasks.core.capacity import LOOK_S, WaitlistState
from delaytasks.core.clock import monotonic

#: How long a process goes on with a line before others have their turn: while there is another free one, and else.
GO_ON_S, GO_ON_ALONE_S = 1.0, 0.05
#: A place that seemed taken may have been on its way from one task to the next: the second look comes soon, each
#: further one after twice the time.
SOON_S = 0.02
#: While processes are at a line, another free one looks at it after this time, and after twice the time whenever it
#: looked in vain, up to `LOOK_S`. They may run rows that take minutes, and say nothing before these end.
AGAIN_S = 0.1
#: Lines that a worker goes on with, and looks at all of them in a second where nobody may start. The sweep's drain
#: chunks come by the lines beyond that.
MOST_LINES, MOST_LOOKS = 1000, 200
NEVER = float("inf")
Key = tuple[str, str]


class Turn(NamedTuple):
    """What a free process should do."""

    line: Key
    #: Others are at the line: this process takes what may start now, and does not wait for more.
    is_look: bool


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
    #: Looks that are due, and how many processes were sent here since one of them reported.
    looks: int = 0
    unheard: int = 0
    again_s: float = AGAIN_S


class Waitlists:
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

    @property
    def look_s(self) -> float:
        """In how many seconds the next look is due."""
        return min((line.looks_at for line in self._lines.values()), default=NEVER) - monotonic()

    def heard(
        self, openings: Sequence[WaitlistState], of: Key | None = None, is_look: bool = False
    ) -> float | None:
        """What a process found, `of` being the line that it was sent to; returns when somebody should look again,
        if nobody would. `is_look` says that the process only looked, and had no row that took its time."""
        if of is not None and (line := self._lines.get(of)) is not None:
            line.jobs, line.unheard, line.looks = max(line.jobs - 1, 0), 0, 0
            if not openings:
                line.wanted, line.looks_at = 0, NEVER
        first = NEVER
        patience = max(len(self._lines) / MOST_LOOKS, 1.0)
        for opening in openings:
            if opening[:2] not in self._lines and len(self._lines) >= MOST_LINES:
                continue
            if is_look and of == opening[:2] and of in self._lines and self._lines[of].jobs:
                first = min(first, self._looked(self._lines[of], opening.open or 0))
                continue
            if opening.open is None:
                if opening[:2] in self._lines:
                    continue  # somebody is at it, or looks within a second
                opening = opening._replace(open=1)
            line = self._lines.setdefault(opening[:2], Line())
            look_s, is_of_it = opening.look_s, of == opening[:2]
            # Who ends leaves a place of his own, beside those that others have left.
            line.wanted = (
                max(line.wanted + (1 if is_of_it else 0), opening.open) if opening.open else 0
            )
            if opening.open:
                line.misses = 0
            elif is_of_it:
                look_s = min(look_s, SOON_S * 2 ** min(line.misses, 10))
                line.misses += 1
                line.looks_at = NEVER
            look_s *= patience
            at = monotonic() + look_s
            if at < line.looks_at:
                line.looks_at = at
                first = min(first, look_s)
        self._lines = {
            k: line
            for k, line in self._lines.items()
            if line.wanted or line.jobs or line.looks_at < NEVER
        }
        return None if first == NEVER else first

    def _looked(self, line: Line, open: int) -> float:
        """Somebody looked at a line while others are at it, and found this many places with the one it took."""
        line.wanted = max(line.wanted, open - 1)
        line.again_s = AGAIN_S if open else min(2 * line.again_s, LOOK_S)
        line.looks_at = monotonic() + line.again_s
        return line.again_s

    def failed(self, of: Key) -> float | None:
        return self.heard([WaitlistState(*of, 0, LOOK_S)], of)

    def next(self) -> Turn | None:
        """The line that a free process should look at."""
        now = monotonic()
        for key, line in self._lines.items():
            if line.looks_at <= now:
                # Whoever did not come back found a row that takes its time. There may be as many more places.
                line.looks = line.unheard + 1
            if not line.wanted and not line.looks:
                continue
            is_look = not line.wanted and line.jobs > 0
            if line.wanted:
                line.wanted -= 1
            else:
                line.looks -= 1
            line.jobs += 1
            line.unheard += 1
            line.looks_at = now + line.again_s
            self._lines[key] = self._lines.pop(key)  # the next one's turn comes first
            return Turn(key, is_look)
        return None

    def clear(self) -> None:
        self._lines.clear()
