"""The policies that a process applies, read about once a second.

A read costs one row while nothing changes, and otherwise the changed policies. A worker's main
process reads in a thread, and each job for the pool carries the stamp of the policies that it
knows. A pool process reads only if it knows other policies, if the main process has read none yet,
or while it continues with a backlog. Other processes, such as commands, read when they use the
policies and the last read is older than a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from delaytasks.events import Events
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import StoreError
from delaytasks.model.policies import NO_POLICIES, Changes, Policies, Stamp
from delaytasks.model.task import DelayedTask, Settlement

if TYPE_CHECKING:
    from delaytasks.db.policy_rows import PausedRows


POLICY_REFRESH_S = 1.0
#: The time between two comparisons of the whole table with the known policies. People who write SQL
#: change policies without counting the change.
POLICY_CHECK_S = 10.0


class PolicyCache:
    """The policies, as this process has read them last."""

    def __init__(self, read: Callable[[int | None, bool], Changes]) -> None:
        """`read(number, checks)` returns the changes after `number`; for None, all policies."""
        self._read = read
        self.known = NO_POLICIES
        #: The number of requests to cancel running tasks, at the last read.
        self.cancel_requests = 0
        self._read_at = self._checked_at = float("-inf")
        self._is_read = False
        #: The main process determines when to read.
        self.is_led = False

    @property
    def stamp(self) -> Stamp | None:
        """The stamp of the known policies; None if this process has read none."""
        return self.known.stamp if self._is_read else None

    def current(self) -> Policies:
        """Return the policies, which are at most about a second old."""
        if not self.is_led and monotonic() - self._read_at >= POLICY_REFRESH_S:
            try:
                self.refresh()
            except StoreError:
                if not self._is_read:
                    raise
                self._read_at = monotonic()  # the next statement of the chunk reports the outage
        return self.known

    def refresh(self, checks: bool = False) -> Policies:
        """Read the changes, and return the policies as they are now."""
        read_at, known = monotonic(), self.known
        checks = checks or read_at - self._checked_at >= POLICY_CHECK_S
        found = self._read(known.number if self._is_read else None, checks)
        if not found.is_whole and (found.policies or found.number != known.number):
            known = known.changed(found.policies, found.number)
        if not found.is_whole and found.stamp is not None and found.stamp != known.stamp:
            found = self._read(None, False)
        if found.is_whole:
            known = Policies(found.policies, found.number)
        self.cancel_requests = found.cancel_requests
        if checks:
            self._checked_at = read_at
        if (
            found.is_whole or known.number >= self.known.number
        ):  # otherwise another thread read more
            self.known = known
        self._read_at, self._is_read = read_at, True
        return self.known

    def follow(self, stamp: Stamp | None, is_led: bool = True) -> None:
        """Read the policies unless they have this stamp, which the main process sent.

        The stamp is None if the main process has read none. If the process is not led, `current`
        reads them again about once a second.
        """
        self.is_led = is_led
        if stamp is None or stamp != self.known.stamp:
            self.refresh(checks=True)
        else:
            self._read_at = monotonic()  # the main process has read


class PauseFilter:
    def __init__(self, policies: PolicyCache, paused_rows: PausedRows, events: Events) -> None:
        self._policies = policies
        self._paused_rows = paused_rows
        self._events = events

    def hold_paused(
        self, tasks: Sequence[DelayedTask]
    ) -> tuple[Sequence[DelayedTask], Sequence[Settlement]]:
        """Hold the paused tasks.

        Return the tasks to run, and settlements of paused tasks that could not be held.
        """
        policies = self._policies.current()
        if not policies.has_pauses:
            return tasks, ()
        paused = [task for task in tasks if policies.pauses(task.tag, task.queue)]
        if not paused:
            return tasks, ()
        try:
            held = self._paused_rows.hold_claimed(paused)
        except StoreError as error:
            self._events.emit("chunk.failed", error=str(error), cause=error)
            allowed = [task for task in tasks if not policies.pauses(task.tag, task.queue)]
            return allowed, [Settlement(task, "give_back") for task in paused]
        if held:
            self._events.emit("task.held", count=len(held))
        # A paused task that was not held has been resumed since the policies were read, so it runs.
        return [task for task in tasks if task.id not in held], ()
