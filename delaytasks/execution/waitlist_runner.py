"""Lines of limited tags, worked off: a row that ends makes room for the next one, which its process takes at once."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence, Set

from delaytasks.core.capacity import WaitlistState
from delaytasks.core.clock import monotonic
from delaytasks.core.interfaces import ClaimStore, Settlement, WaitlistsSeen
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask
from delaytasks.execution.chunk import ChunkSize
from delaytasks.execution.chunk_run import ChunkRun, Tally
from delaytasks.processors.registry import Registry

#: A claim of more rows, of which most had to be held, tells of a crowd; how long one chunk helps it to get in line.
MANY, GATHER_S = 5, 0.2


class WaitlistRunner:
    def __init__(
        self, settings: Settings, claims: ClaimStore, registry: Registry, chunks: ChunkRun
    ) -> None:
        self._settings = settings
        self._claims = claims
        self._lines = claims.lines
        self._registry = registry
        self._chunks = chunks
        #: By limited tags: what does not fit the time box would hold places for nothing.
        self._sizes: dict[str, ChunkSize] = {}

    def gather(self, met: WaitlistsSeen, asked: int, levels: Set[tuple[str, int]]) -> None:
        """A crowd for which there is no room gets in line: whoever is in it must not wait until a claim comes by."""
        if not 2 * met.held > asked > MANY:
            return
        until = monotonic() + GATHER_S
        for queue, priority in levels:
            tags = {tag for of, tag in met.lines if of == queue}
            while monotonic() < until and self._lines.gather(queue, priority, tags):
                pass

    def go_on(
        self, lines: Set[tuple[str, str]], limit: int, for_s: float, tally: Tally
    ) -> tuple[WaitlistState, ...]:
        """Returns what somebody should go on with. Lines for which there is no time are among that."""
        until, openings = monotonic() + for_s, list[WaitlistState | None]()
        for number, (queue, tag) in enumerate(sorted(lines)):
            if number and monotonic() >= until:
                openings.append(WaitlistState(queue, tag, None))
            else:
                openings.append(self._work_off(queue, tag, limit, for_s, tally))
        return tuple(opening for opening in openings if opening is not None)

    def _work_off(
        self, queue: str, tag: str, limit: int, for_s: float, tally: Tally
    ) -> WaitlistState | None:
        until, is_first = monotonic() + for_s, True
        following: list[DelayTask] = []
        size = self._sizes.setdefault(
            tag, ChunkSize(self._settings.chunk_time_box_s, self._settings.chunk_max, 1)
        )
        at_once = self._at_once(tag)

        def settle(settlements: Sequence[Settlement]) -> set[int]:
            is_scarce = opening is not None and not opening.open
            if monotonic() >= until or not (is_scarce or len(settlements) >= min(size.rows, limit)):
                return self._claims.settle(settlements)
            accepted, next = self._claims.hand_over(settlements, queue, tag)
            following.extend(next)
            return accepted

        while True:
            claimed_at = monotonic()
            tasks, opening = self._lines.admit(
                queue, tag, max(min(size.rows, limit), at_once), at_once
            )
            if tasks and is_first:
                # Who waited for the lock has his time nonetheless; those who began together do not end together.
                until, is_first = monotonic() + for_s * random.uniform(0.5, 1), False
            next: Sequence[DelayTask] = tasks
            while next:
                following = []
                batch_tally = Tally()
                self._chunks.run(next, claimed_at, batch_tally, may_leave=False, settle=settle)
                batch_tally.add(*self._chunks.ended())
                size.learn(batch_tally.ran, batch_tally.seconds)
                tally.claimed += batch_tally.claimed
                tally.add(batch_tally.ran, batch_tally.seconds)
                next, claimed_at = following, monotonic()
            if tasks and opening is not None and monotonic() >= until:
                return opening._replace(open=opening.open or 1)
            if not tasks:
                if opening is None or opening.look_s > until - monotonic():
                    return opening
                time.sleep(opening.look_s)

    def _at_once(self, tag: str) -> int:
        """How many rows of the tag this process starts at once."""
        processor = self._registry.get(tag)
        return 1 if processor is None else (processor.in_flight or 1) * (processor.batch or 1)
