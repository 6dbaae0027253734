"""Builds the worker runtime from the parts of a `DelayTasks` instance.

Only this module reads the instance's parts. Each object gets what it needs in its constructor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaytasks.wiring import wiring_of
from delaytasks.worker.calls import CallThread
from delaytasks.worker.dispatcher import Dispatcher
from delaytasks.worker.lease_keeper import LeaseKeeper
from delaytasks.worker.message_strategy import RefusedMessages
from delaytasks.worker.near_entries import NearEntries
from delaytasks.worker.policy_loop import policy_loop
from delaytasks.worker.runtime import WorkerRuntime
from delaytasks.worker.sweep_loop import SweepLoop, SweepLoops
from delaytasks.worker.table_poller import TablePoller, TablePollers
from delaytasks.worker.task_events import WorkerLostEvents, wants_task_events
from delaytasks.worker.unfinished_work import WorkSender

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from delaytasks.client import DelayTasks
    from delaytasks.core.interfaces import Entry
    from delaytasks.core.loop import Loop
    from delaytasks.execution.runner import Report
    from delaytasks.sharding.shard import Shard
    from delaytasks.worker.redis_poller import RedisPoller


def build_runtime(
    delays: DelayTasks,
    celery_worker: Any,
    *,
    polls_table: bool = True,
    on_report: Callable[[Report], None] | None = None,
    row_budget: int | None = None,
) -> WorkerRuntime:
    """Return the runtime of the main process of `celery_worker`.

    With `polls_table` and the timer `direct` it looks for near tasks in the table. The other
    options are those of the dispatcher.
    """
    return _Builder(delays, celery_worker, polls_table).build(on_report, row_budget)


class _Builder:
    """Reads the parts of the instance once, and builds one runtime of them."""

    def __init__(self, delays: DelayTasks, celery_worker: Any, polls_table: bool) -> None:
        wiring = wiring_of(delays)
        self._settings = delays.settings
        self._events = delays.events
        self._registry = wiring.registry
        self._processes = wiring.processes
        self._router = wiring.router
        self._shards = delays.shards
        self._clock = wiring.clock
        self._queue_routing = wiring.queues
        self._publisher = wiring.publisher
        self._timer = wiring.timer
        self._inline_timer = wiring.inline_timer
        self._direct_timer = wiring.direct_timer
        self._redis_timer = wiring.redis_timer
        self._celery_worker = celery_worker
        self._polls_table = polls_table
        self._refused_messages = RefusedMessages(delays.events)
        self._work_sender = WorkSender(
            delays.settings, wiring.inline_timer, wiring.router, delays.events
        )
        hub_or_worker = celery_worker.hub or celery_worker
        has_event_loop = hasattr(hub_or_worker, "call_soon")
        self._call_thread = None if has_event_loop else CallThread(delays.events)
        self._call_soon = (self._call_thread or hub_or_worker).call_soon

    def build(
        self, on_report: Callable[[Report], None] | None, row_budget: int | None
    ) -> WorkerRuntime:
        near_entries: NearEntries
        redis_poller: RedisPoller | None = None

        # The dispatcher and the two parts above need each other, so it looks them up later.

        def hold(entries: Sequence[Entry]) -> None:
            near_entries.hold(entries)

        def on_capacity() -> None:
            if redis_poller is not None:
                redis_poller.wake_if_waiting()

        dispatcher = Dispatcher(
            self._settings,
            [shard.clock for shard in self._shards],
            self._events,
            self._celery_worker.pool,
            call_soon=self._call_soon,
            hold=hold,
            send_back=self._work_sender.send_back,
            policy_stamp=lambda number: self._shards[number].policies.stamp,
            sends_events=self._sends_events,
            on_capacity=on_capacity,
            on_report=on_report,
            row_budget=row_budget,
        )
        near_entries = NearEntries(self._settings, self._events, dispatcher, self._refused_messages)
        sweep_loops = SweepLoops([self._sweep_loop(shard, dispatcher) for shard in self._shards])
        table_pollers = self._table_pollers(dispatcher, near_entries)
        redis_poller = self._redis_poller(dispatcher, near_entries, sweep_loops)
        outages = dispatcher.shard_health.outages
        loops = [near_entries.wheel.loop, *sweep_loops.loops]
        loops += [self._lease_keeper(shard, dispatcher).loop for shard in self._shards]
        loops += [policy_loop(shard, self._events, outages) for shard in self._shards]
        loops += [] if self._call_thread is None else [self._call_thread.loop]
        loops += [] if table_pollers is None else table_pollers.loops
        loops += [] if redis_poller is None else redis_poller.loops
        return self._runtime(
            dispatcher, near_entries, sweep_loops, table_pollers, redis_poller, loops
        )

    def _sends_events(self) -> bool:
        return wants_task_events(getattr(self._celery_worker, "consumer", None))

    def _lease_keeper(self, shard: Shard, dispatcher: Dispatcher) -> LeaseKeeper:
        return LeaseKeeper(
            shard,
            self._settings,
            self._events,
            self._processes,
            self._registry,
            dispatcher,
            self._celery_worker.pool,
            self._celery_worker.hub,
        )

    def _sweep_loop(self, shard: Shard, dispatcher: Dispatcher) -> SweepLoop:
        return SweepLoop(
            shard,
            self._settings,
            self._events,
            self._processes,
            self._registry,
            self._inline_timer,
            dispatcher,
            self._celery_worker.pool,
            self._celery_worker.hostname,
            self._polls_table,
        )

    def _table_pollers(
        self, dispatcher: Dispatcher, near_entries: NearEntries
    ) -> TablePollers | None:
        if self._direct_timer is None or not self._polls_table:
            return None
        pollers = [
            TablePoller(
                shard,
                self._settings,
                self._events,
                self._processes,
                self._queue_routing,
                dispatcher,
                near_entries,
                self._refused_messages,
                self._celery_worker.hostname,
            )
            for shard in self._shards
        ]
        return TablePollers(self._direct_timer, pollers)

    def _redis_poller(
        self, dispatcher: Dispatcher, near_entries: NearEntries, sweep_loops: SweepLoops
    ) -> RedisPoller | None:
        if self._redis_timer is None:
            return None
        # Imported here, since other deployments need no Redis client.
        from delaytasks.worker.redis_poller import RedisPoller

        return RedisPoller(
            self._redis_timer,
            self._clock,
            self._events,
            self._processes,
            dispatcher,
            near_entries,
            sweep_loops,
            self._refused_messages,
        )

    def _runtime(
        self,
        dispatcher: Dispatcher,
        near_entries: NearEntries,
        sweep_loops: SweepLoops,
        table_pollers: TablePollers | None,
        redis_poller: RedisPoller | None,
        loops: Sequence[Loop],
    ) -> WorkerRuntime:
        task_events = self._processes.task_events()
        return WorkerRuntime(
            celery_worker=self._celery_worker,
            settings=self._settings,
            events=self._events,
            clock=self._clock,
            router=self._router,
            registry=self._registry,
            processes=self._processes,
            publisher=self._publisher,
            timer=self._timer,
            dispatcher=dispatcher,
            near_entries=near_entries,
            sweep_loops=sweep_loops,
            table_pollers=table_pollers,
            redis_poller=redis_poller,
            work_sender=self._work_sender,
            refused_messages=self._refused_messages,
            worker_lost_events=WorkerLostEvents(task_events, self._sends_events),
            loops=loops,
        )
