"""What the worker's main process does for delayed tasks: it holds what is near, hands chunks to the pool, sweeps,
and looks after leases."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from celery.worker import state

from delaytasks.core.clock import from_us, monotonic
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, by_shard
from delaytasks.core.loop import Loop
from delaytasks.timers.timing_wheel import WheelThread
from delaytasks.worker.celery_compat.versions import brpop_s
from delaytasks.worker.dispatcher import Dispatcher, DispatcherState
from delaytasks.worker.lease_keeper import LeaseKeeper
from delaytasks.worker.policy_loop import policy_loop
from delaytasks.worker.shard_queue import ShardQueue
from delaytasks.worker.sweep_loop import SweepLoop
from delaytasks.worker.table_poller import TablePollers
from delaytasks.worker.task_events import wants_row_events
from delaytasks.worker.watchdog import LOOK_S, Watchdog
from delaytasks.worker.worker_lost import WorkerLostFailures

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.worker.redis_poller import RedisPoller

logger = get_logger(__name__)
#: A refused message is logged at most so often: anybody may send them.
REFUSAL_LOG_S = 60.0
#: Producers and workers may have different horizons for a while.
FAR_S = 600.0
#: The watch may have to wait for broker and database: it is stuck after that.
WATCH_S = 30.0
#: Redis answers a question for messages so long after it gave up looking for one.
ANSWER_S = 1.0


class WorkerRuntime:
    def __init__(self, delays: DelayTasks, worker: Any) -> None:
        self.delays = delays
        self._worker = worker
        soon = getattr(worker.hub or worker, "call_soon", None)
        self._calls = CallThread(delays.events) if soon is None else None
        self.wheel: WheelThread[Entry] = WheelThread(
            delays.clock,
            lambda due: self.dispatcher.take(due),
            delays.events,
            delays.settings.grace_s,
        )
        self.dispatcher = Dispatcher(
            delays.settings,
            [shard.clock for shard in delays.shards],
            delays.events,
            worker.pool,
            soon=soon or self._calls.call,  # type: ignore[union-attr]  # there is one of the two
            rearm=self.hold,
            sends_events=self._sends_events,
        )
        self.dispatcher.on_left = self._leave_to_others
        self.dispatcher.stamp_of = lambda number: delays.shards[number].policies.stamp
        for shard in delays.shards:
            shard.sweeper.drain_here = partial(self._drain_here, shard.number)
        self._redis_poller = self._make_redis_poller()
        self.readers = TablePollers(self, worker.hostname, getattr(worker, "looks", True))
        keepers = [LeaseKeeper(delays, shard, worker, self.dispatcher) for shard in delays.shards]
        self._sweepings = [SweepLoop(delays, shard, worker) for shard in delays.shards]
        watch = Loop("watch", self._look, delays.events, WATCH_S)
        loops = [self.wheel.loop, watch]
        loops += [keeper.loop for keeper in keepers] + [
            sweeping.loop for sweeping in self._sweepings
        ]
        loops += [
            policy_loop(delays, shard, self.dispatcher.shard_health.outages)
            for shard in delays.shards
        ]
        if self._calls is not None:
            loops.append(self._calls.loop)
        if self._redis_poller is not None:
            loops += self._redis_poller.loops
        loops += self.readers.loops
        self.watchdog = Watchdog(delays.events, loops)
        self._was_connected = False
        self._refusal_logged_at = -REFUSAL_LOG_S

    def start(self) -> None:
        delays = self.delays
        delays.routes.each(lambda shard: shard.clock.refresh_if_due())
        for shard in delays.shards:
            shard.clock.refreshes_inline = (
                False  # neither the event loop nor the wheel waits for the database
            )
        rows = delays.processes.row_events()
        delays.events.subscribe(WorkerLostFailures(rows, self._sends_events))
        self.watchdog.start()

    def stop(self, is_warm: bool = False) -> None:
        """Sends back what is held, and asks others to go on with what we work off, so that they have it in time; done
        again it does no harm. Leases are renewed as long as the process lives, since the pool may have rows to
        finish."""
        if self._redis_poller is not None:
            self._redis_poller.stop()  # first, or it would take what we send back
        self.readers.stop()
        waiting = self.wheel.stop()  # before those who take what falls due
        left = self.dispatcher.close()
        waiting += left.entries + self.wheel.stop()  # what a chunk's end brought it meanwhile
        if is_warm:  # else the pool ends with what it has, and this may be any thread
            waiting += self.dispatcher.recall()
        self._leave_to_others(DispatcherState(waiting, left.queues))
        hang_up(self._worker.consumer)
        # Last: until then we count as a worker that may have died.
        self.delays.routes.each(lambda shard: self._sweepings[shard.number].stop())
        self.delays.events.attempt("stop", "leave", self.readers.leave)

    def _leave_to_others(self, left: DispatcherState) -> None:
        timer, settings = self.delays.inline_timer, self.delays.settings
        if left.entries:
            if timer.arm(left.entries):
                logger.info("delaytasks: sent back %d near tasks", len(left.entries))
            else:
                attempt = partial(self.delays.events.attempt, "stop")
                self.delays.routes.each(
                    lambda at: attempt(at.named("forget"), lambda: at.store.sweeps.forget_armed())
                )
        for queue, priorities, shard in left.queues:
            timer.drain(queue, sorted(priorities), settings.drain_tokens, settings.sweep_s, shard)

    def _look(self) -> float:
        """Once a second, what needs no database."""
        delays = self.delays
        self.watchdog.loop.look()  # as it looks at us
        consumer = getattr(self._worker.consumer, "task_consumer", None)
        if consumer is not None:  # `celery control add_consumer` and `cancel_consumer` change it
            delays.processes.queues = delays.own_queues(queue.name for queue in consumer.queues)
        self.dispatcher.shard_health.tell_silent()
        self.dispatcher.shard_health.outages.look()
        late_s = self.wheel.late_s
        if late_s > delays.settings.grace_s:
            delays.events.emit("wheel.late", seconds=late_s)
        if state.should_terminate is not None:
            self.stop()  # a cold shutdown waits for the pool first, but what is held must not wait with it
        return LOOK_S

    def hold(self, entries: Sequence[Entry]) -> None:
        for shard, some in by_shard(entries, len(self.dispatcher.lanes)).items():
            self._hold(self.dispatcher.lanes[shard], some)

    def _hold(self, lane: ShardQueue, entries: Sequence[Entry]) -> None:
        now = lane.clock.now_us()
        horizon_s = self.delays.settings.horizon_s
        if (
            horizon_s is not None
        ):  # nobody arms what is so far away: a message that does is forged, or very old
            latest = now + int((2 * horizon_s + FAR_S) * 1e6)
            if any(entry.due_us > latest for entry in entries):
                self.refuse("run", ValueError("an entry is far beyond the horizon"))
                entries = [entry for entry in entries if entry.due_us <= latest]
        due = [entry for entry in entries if entry.due_us <= now]
        if due:
            self.dispatcher.take(due)
        if len(due) < len(entries):
            # The wheel goes by the first database's clock.
            ahead_us = self.delays.clock.now_us() - now if lane.shard else 0
            self.wheel.add(
                ((e.id, e.version), e.due_us + ahead_us, e) for e in entries if e.due_us > now
            )

    def connected(self) -> None:
        """The worker takes in messages from now on: for the first time, or again after it lost the broker."""
        if self._was_connected:
            self.recall()
            self.forget_armed()
        self._was_connected = True

    def recall(self) -> None:
        """The pool knows again what it was made to forget with the broker; what no process has is due again."""
        nobodys = self.dispatcher.recall()
        if nobodys:
            self.dispatcher.take(nobodys)

    def forget_armed(self) -> None:
        """What the timer held may be lost: the next sweep arms it again."""
        for sweeping in self._sweepings:
            sweeping.forget()

    def sweep(self, house: int | None) -> None:
        for sweeping in self._sweepings:
            sweeping.request(house)

    def _drain_here(self, shard: int, queue: str, priorities: Sequence[int]) -> bool:
        is_ours = queue in self.delays.processes.queues
        if is_ours:
            self.dispatcher.drain(queue, priorities, shard)
        return is_ours

    def refuse(self, task: str, error: Exception) -> None:
        """A message that is not of our form: dropped, counted, and logged now and then."""
        if monotonic() - self._refusal_logged_at < REFUSAL_LOG_S:
            self.delays.events.counts["message.refused"] += 1
            return
        self._refusal_logged_at = monotonic()
        self.delays.events.emit("message.refused", task=task, reason=str(error)[:200])

    def pids(self) -> set[int]:
        """The processes that may run rows: those of the pool, and this one where the pool has none."""
        info = getattr(self._worker.pool, "info", None) or {}
        return {os.getpid(), *(info.get("processes") or ())}

    def info(self) -> dict[str, Any]:
        """For `celery inspect stats`."""
        began = list(self.dispatcher.in_flight.values())
        return {
            "held": len(self.wheel),
            "waiting": self.dispatcher.waiting,
            "chunks": len(self.dispatcher.in_flight),
            "timer": self.delays.settings.timer,
            "timer_is_up": self.delays.timer.is_up,
            # As text: `celery inspect` prints the answer with the JSON of the standard library.
            "oldest_chunk": from_us(min(map(int, began))).isoformat() if began else None,
            "shards": {
                str(shard): said for shard, said in self.dispatcher.shard_health.info().items()
            },
            "loops": self.watchdog.info(),
            "events": dict(self.delays.events.counts),
        }

    def _make_redis_poller(self) -> RedisPoller | None:
        if self.delays.redis_timer is None:
            return None
        from delaytasks.worker.redis_poller import (
            RedisPoller,  # and with it a client that other deployments need not load
        )

        return RedisPoller(self.delays.redis_timer, self)

    def _sends_events(self) -> bool:
        return wants_row_events(getattr(self._worker, "consumer", None))


def hang_up(consumer: Any) -> None:
    """On Redis a worker that stops still has an open question for the next message, which nobody reads any more. The
    answer may be on its way, or be what it has just sent back: it is waited for, a second at most, and since nobody
    consumes it any more it goes back into its queue."""
    connection = getattr(consumer, "connection", None)
    if connection is None or connection.transport.driver_type != "redis":
        return
    for channel in connection.transport.channels or ():
        client = vars(channel).get("client")
        if client is None or client.connection is None:
            continue
        try:
            if channel._in_poll and client.connection.can_read(brpop_s(channel) + ANSWER_S):
                channel._brpop_read()
        except Exception:
            pass  # the broker is away, or had nothing
        client.connection.disconnect()
        channel._in_poll = None  # or closing it would wait for an answer that can not come


class CallThread:
    """Takes the event loop's place where the transport has none. It may be as busy as a solo pool, which runs its
    chunks in here, and there must be no second one: it is never stuck."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.loop = Loop("calls", self._turn, events)

    def call(self, function: Callable[[], None]) -> None:
        self._queue.put(function)
        self.loop.wake()

    def _turn(self) -> None:
        while True:
            try:
                function = self._queue.get_nowait()
            except Empty:
                return
            self._events.attempt("calls", "call", function)
