"""The entries of tasks that are due soon, which the worker holds until they are due."""

from __future__ import annotations

from collections.abc import Sequence

from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, by_shard
from delaytasks.core.settings import Settings
from delaytasks.timers.timing_wheel import WheelThread
from delaytasks.worker.dispatcher import Dispatcher
from delaytasks.worker.message_strategy import RefusedMessages
from delaytasks.worker.shard_queue import ShardQueue

#: Producers and workers may have different horizons for a while.
HORIZON_TOLERANCE_S = 600.0


class NearEntries:
    """Holds entries in a timing wheel, and gives those that are due to the dispatcher."""

    def __init__(
        self,
        settings: Settings,
        events: Events,
        dispatcher: Dispatcher,
        refused_messages: RefusedMessages,
    ) -> None:
        self._horizon_s = settings.horizon_s
        self._dispatcher = dispatcher
        self._refused_messages = refused_messages
        #: The wheel follows the clock of the first shard's database.
        self._wheel_queue = dispatcher.shard_queues[0]
        self.wheel: WheelThread[Entry] = WheelThread(
            self._wheel_queue.clock, lambda due: dispatcher.take(due), events, settings.grace_s
        )

    def hold(self, entries: Sequence[Entry]) -> None:
        """Hold the entries until they are due. Any thread may call this."""
        shard_queues = self._dispatcher.shard_queues
        for shard, some in by_shard(entries, len(shard_queues)).items():
            self._hold_of_shard(shard_queues[shard], some)

    def _hold_of_shard(self, shard_queue: ShardQueue, entries: Sequence[Entry]) -> None:
        now = shard_queue.clock.now_us()
        if self._horizon_s is not None:
            # No timer arms what is due later: such a message is forged, or very old.
            latest = now + int((2 * self._horizon_s + HORIZON_TOLERANCE_S) * 1e6)
            if any(entry.due_us > latest for entry in entries):
                error = ValueError("an entry is far beyond the horizon")
                self._refused_messages.refuse("run", error)
                entries = [entry for entry in entries if entry.due_us <= latest]
        due = [entry for entry in entries if entry.due_us <= now]
        if due:
            self._dispatcher.take(due)
        if len(due) < len(entries):
            ahead_us = self._wheel_queue.clock.now_us() - now if shard_queue.shard else 0
            self.wheel.add(
                ((e.id, e.version), e.due_us + ahead_us, e) for e in entries if e.due_us > now
            )
