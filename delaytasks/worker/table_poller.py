"""With the `direct` timer near tasks wait in the table. Here a worker looks for them, shortly before they are due and
often enough, and holds them in its wheel until then.

Where the database tells of what is scheduled for soon, it is listened to, and looked at once a second. Elsewhere, and
while nobody can be heard, it is looked at more often, the sooner after something was found too late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from delaytasks.core.clock import from_us, monotonic
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.interfaces import Entry, by_shard
from delaytasks.core.loop import Loop
from delaytasks.maintenance.overdue_queues import MOST_OTHERS, OverdueQueues
from delaytasks.timers.direct import LOOK_S, SLACK_S
from delaytasks.worker.notify_listener import NotifyListener
from delaytasks.worker.worker_shares import Members, serves

if TYPE_CHECKING:
    from delaytasks.sharding.shard import Shard
    from delaytasks.worker.runtime import WorkerRuntime

#: Between two looks at a table that tells nothing: it grows from one to the other while nothing is found late.
LEAST_S, MOST_S = 0.02, 0.5
GROWTH = 1.5
#: Rows in one look; there are more, and the next look comes soon.
MOST_ROWS = 2000
#: How often it is looked for what is late, and for who else looks.
LATE_S = 1.0
#: A look waits for a database that is slow.
STUCK_S = 10.0


class TablePoller:
    """Of one shard."""

    def __init__(self, runtime: WorkerRuntime, shard: Shard, hostname: str) -> None:
        self._runtime = runtime
        self._shard = shard
        self._settings = runtime.delays.settings
        self._processes = runtime.delays.processes
        self._members = Members(hostname)
        #: What was handed on, and when it is due: it is still there when we look again.
        self._handed: dict[tuple[int, int], int] = {}
        self._pause_s = LEAST_S
        self._late_at = 0.0
        self._overdue = OverdueQueues(shard.store.sweeps, self._settings.grace_s)
        self.loop = Loop(
            shard.named("reader"), self._look, runtime.delays.events, STUCK_S, shard.close
        )
        self.listener = NotifyListener(
            shard,
            runtime.delays.events,
            self.take,
            self.look_now,
            partial(runtime.refuse, "notice"),
        )
        self.loops = [self.loop, self.listener.loop]

    def stop(self) -> None:
        self.listener.stop()
        self.loop.stop()

    def look_now(self) -> None:
        """At who looks as well, too."""
        self._late_at = 0.0
        self.loop.wake()

    def take(self, entries: Iterable[Entry]) -> Sequence[Entry]:
        """Of those that are near: what is ours, and was not handed on before. Any thread may call."""
        mine = [
            entry
            for entry in entries
            if entry[:2] not in self._handed
            and serves(self._processes.queues, entry.queue)
            and self._members.is_mine(entry)
        ]
        self._handed.update((entry[:2], entry.due_us) for entry in mine)
        if mine:
            self._runtime.hold(mine)
        return mine

    # -- look -------------------------------------------------------------------------------------

    def _look(self) -> float:
        if not self._runtime.dispatcher.shard_health.hear(
            self._shard.number, lambda: self._shard.store.tasks.now()
        ):
            return LOOK_S
        looks_late = monotonic() >= self._late_at
        if looks_late:
            self._late_at = monotonic() + LATE_S
            self._learn_members()
        now_us, grace_us = self._shard.clock.now_us(), self._settings.grace_s * 1e6
        rest_s = LOOK_S if self.listener.hears else self._pause_s
        until_us = now_us + (rest_s + SLACK_S) * 1e6
        found = self._shard.store.sweeps.look(
            from_us(int(now_us - grace_us)),
            from_us(int(until_us)),
            MOST_ROWS,
            self._shard.policies.known,
        )
        mine = self.take(found)
        if looks_late:
            self._ask_for_late()
        self._handed = {
            name: due for name, due in list(self._handed.items()) if due > now_us - 2 * grace_us
        }
        rest_s = self._rest(mine, now_us)
        if (
            len(found) == MOST_ROWS
        ):  # there are more, later than these, which are looked for before they are due
            rest_s = min(rest_s, (found[-1].due_us - now_us) / 2e6)
        return max(rest_s, LEAST_S)

    def _rest(self, mine: Sequence[Entry], now_us: int) -> float:
        if any(entry.due_us <= now_us for entry in mine):
            self._pause_s = LEAST_S
        else:
            self._pause_s = min(self._pause_s * GROWTH, MOST_S)
        return LOOK_S if self.listener.hears else self._pause_s

    def _learn_members(self) -> None:
        store, settings = self._shard.store, self._settings
        self._members.learn(store.workers.alive(), self._shard.clock.now(), settings.sweep_s)

    def _ask_for_late(self) -> None:
        """What nobody took in time, whoever's it was."""
        dispatcher, number = self._runtime.dispatcher, self._shard.number
        queues = set(self._processes.queues)
        serves_all = ALL_QUEUES in queues
        if serves_all:
            queues = self._runtime.delays.queues.all()
        late = self._overdue.of_named(queues, self.loop.beat)
        if serves_all:  # no more than can have their turn soon: the queues that are known have theirs in between
            late |= self._overdue.of_others(
                queues, self.loop.beat, MOST_OTHERS - dispatcher.lanes[number].drains
            )
        for queue, priorities in late.items():
            dispatcher.drain(queue, priorities, number)


class TablePollers:
    """Of all shards; told of what this process arms itself. There are none without the `direct` timer."""

    def __init__(self, runtime: WorkerRuntime, hostname: str, looks: bool) -> None:
        self._timer = timer = runtime.delays.direct_timer if looks else None
        self.all = (
            []
            if timer is None
            else [TablePoller(runtime, shard, hostname) for shard in runtime.delays.shards]
        )
        self.loops = [loop for reader in self.all for loop in reader.loops]
        if timer is not None:
            timer.take = self._take

    def stop(self) -> None:
        """First, or they would take what is sent back."""
        if self._timer is not None:
            self._timer.take = None
        for reader in self.all:
            reader.stop()

    def leave(self) -> None:
        """Last, when we are no member any more: what was ours is looked for by the others."""
        if self._timer is not None:
            for number in range(len(self.all)):
                self._timer.tell_to_look(number)

    def _take(self, entries: Sequence[Entry]) -> None:
        for shard, some in by_shard(entries, len(self.all)).items():
            self.all[shard].take(some)
