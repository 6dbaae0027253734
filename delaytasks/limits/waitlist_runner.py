"""Runs the tasks of waitlists: when one ends, the same process runs the next one in its slot."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence, Set

from delaytasks.limits.admission import Admission, Waitlist
from delaytasks.model.clock import monotonic
from delaytasks.model.policies import WaitlistsSeen, WaitlistState
from delaytasks.model.task import DelayedTask, Settle, Settlement
from delaytasks.model.workers import ChunkSize
from delaytasks.registry import Registry
from delaytasks.settings import Settings

#: If a claim of more than `MANY` rows held most of them, there is an overdue backlog, which one
#: chunk helps to hold for `HOLD_S`.
MANY, HOLD_S = 5, 0.2
#: Runs rows that were claimed at a time, with a function that settles them. Returns how many ended,
#: and the seconds that the process spent on them.
RunRows = Callable[[Sequence[DelayedTask], float, Settle], tuple[int, float]]


class _SettlingTransfer:
    """Settles tasks of one waitlist, and admits the next ones to their slots until the end."""

    def __init__(
        self, admission: Admission, queue: str, tag: str, until: float, wanted: int, is_scarce: bool
    ) -> None:
        self._admission = admission
        self._waitlist = (queue, tag)
        self._until = until
        self._wanted = wanted
        self._is_scarce = is_scarce
        self.admitted: list[DelayedTask] = []

    def settle(self, settlements: Sequence[Settlement]) -> set[int]:
        is_worth_it = self._is_scarce or len(settlements) >= self._wanted
        if monotonic() >= self._until or not is_worth_it:
            return self._admission.settle(settlements)
        accepted, admitted = self._admission.settle_and_admit(settlements, *self._waitlist)
        self.admitted.extend(admitted)
        return accepted


class WaitlistRunner:
    def __init__(
        self, settings: Settings, registry: Registry, waitlist: Waitlist, admission: Admission
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._waitlist = waitlist
        self._admission = admission
        #: The chunk size of each tag. Rows beyond the time budget would occupy slots and not run.
        self._sizes: dict[str, ChunkSize] = {}

    def hold_backlog(self, seen: WaitlistsSeen, asked: int, levels: Set[tuple[str, int]]) -> None:
        """If a claim of `asked` rows held most of them, hold further overdue rows of the tags.

        Otherwise a row far behind in the backlog would miss its key's turn until a claim finds it.
        """
        if not 2 * seen.held > asked > MANY:
            return
        until = monotonic() + HOLD_S
        for queue, priority in levels:
            tags = {tag for of, tag in seen.waitlists if of == queue}
            while monotonic() < until and self._waitlist.hold_overdue(queue, priority, tags):
                pass

    def run(
        self, waitlists: Set[tuple[str, str]], limit: int, for_s: float, run_rows: RunRows
    ) -> tuple[WaitlistState, ...]:
        """Run tasks of these waitlists for `for_s`, and return the waitlists to go on with."""
        until, states = monotonic() + for_s, list[WaitlistState | None]()
        for number, (queue, tag) in enumerate(sorted(waitlists)):
            if number and monotonic() >= until:
                states.append(WaitlistState(queue, tag, None))
            else:
                states.append(self.run_one(queue, tag, limit, for_s, run_rows))
        return tuple(state for state in states if state is not None)

    def run_one(
        self, queue: str, tag: str, limit: int, for_s: float, run_rows: RunRows
    ) -> WaitlistState | None:
        """Run tasks of one waitlist; return None if it is empty."""
        until, is_first = monotonic() + for_s, True
        settings, parallel = self._settings, self._parallel(tag)
        size = self._sizes.setdefault(
            tag, ChunkSize(settings.chunk_time_budget_s, settings.chunk_max, 1)
        )
        while True:
            claimed_at, most = monotonic(), max(min(size.rows, limit), parallel)
            tasks, state = self._admission.admit(queue, tag, most, parallel)
            if not tasks and (state is None or state.recheck_s > until - monotonic()):
                return state
            if not tasks and state is not None:
                time.sleep(state.recheck_s)
                continue
            if is_first:
                # The wait for the lock does not count. Processes that began together end at
                # different times.
                until, is_first = monotonic() + for_s * random.uniform(0.5, 1), False
            is_scarce = state is not None and not state.open
            while tasks:
                wanted = min(size.rows, limit)
                transfer = _SettlingTransfer(self._admission, queue, tag, until, wanted, is_scarce)
                size.learn(*run_rows(tasks, claimed_at, transfer.settle))
                tasks, claimed_at = transfer.admitted, monotonic()
            if state is not None and monotonic() >= until:
                return state._replace(open=state.open or 1)

    def _parallel(self, tag: str) -> int:
        """Return how many tasks of the tag this process starts simultaneously."""
        processor = self._registry.get(tag)
        return 1 if processor is None else (processor.in_flight or 1) * (processor.batch or 1)
