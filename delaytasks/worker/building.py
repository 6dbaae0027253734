"""Builds the worker runtime from the parts of a `DelayTasks` instance.

Each object gets what it needs in its constructor. Besides this module, only `Processes` reads the
instance's parts: it builds the runners in the processes of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaytasks.statistics.worker_counts import WorkerCounts
from delaytasks.statistics.writer import StatisticsWriter
from delaytasks.timers.eta import RUN
from delaytasks.timers.timing_wheel import WheelThread
from delaytasks.worker.calls import CallThread
from delaytasks.worker.cancel_requests import CancelRequestReader
from delaytasks.worker.capacity_request import CapacityRequest
from delaytasks.worker.declared_schedules import DeclaredSchedules
from delaytasks.worker.dispatcher import Dispatcher
from delaytasks.worker.lease_keeper import LeaseKeeper
from delaytasks.worker.near_entries import NearEntries
from delaytasks.worker.policy_loop import policy_loop
from delaytasks.worker.runtime import WorkerRuntime
from delaytasks.worker.service_watch import ServiceWatch
from delaytasks.worker.sweep_loop import SweepLoop, SweepLoops
from delaytasks.worker.task_events import WorkerLostEvents, wants_task_events
from delaytasks.worker.unfinished_work import WorkSender

if TYPE_CHECKING:
    from collections.abc import Callable

    from delaytasks.execution.runner import Report
    from delaytasks.routing.shard import Shard
    from delaytasks.wiring import Wiring
    from delaytasks.worker.processes import Processes
    from delaytasks.worker.redis_poller import RedisPoller
    from delaytasks.worker.table_poller import TablePollers


def build_runtime(
    wiring: Wiring,
    processes: Processes,
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
    return _Builder(wiring, processes, celery_worker, polls_table).build(on_report, row_budget)


class _Builder:
    """Builds one runtime from the parts of the instance."""

    def __init__(
        self, wiring: Wiring, processes: Processes, celery_worker: Any, polls_table: bool
    ) -> None:
        self._wiring = wiring
        self._processes = processes
        self._celery_worker = celery_worker
        self._polls_table = polls_table
        self._service_watch = ServiceWatch(wiring.timer, self._check_timer)
        self._work_sender = WorkSender(wiring.settings, wiring.timer, wiring.router, wiring.events)
        hub_or_worker = celery_worker.hub or celery_worker
        has_event_loop = hasattr(hub_or_worker, "call_soon")
        self._call_thread = None if has_event_loop else CallThread(wiring.events)
        self._call_soon = (self._call_thread or hub_or_worker).call_soon
        clocks, settings = [shard.clock for shard in wiring.shards], wiring.settings
        self._counts = (
            WorkerCounts(clocks, settings.statistics_tags) if settings.statistics else None
        )

    def build(
        self, on_report: Callable[[Report], None] | None, row_budget: int | None
    ) -> WorkerRuntime:
        wiring, capacity_request = self._wiring, CapacityRequest()
        clocks = [shard.clock for shard in wiring.shards]
        near_entries = NearEntries(wiring.settings, clocks, wiring.events)
        dispatcher = self._dispatcher(near_entries, capacity_request, on_report, row_budget)
        wheel_thread = WheelThread(
            near_entries.wheel, dispatcher.take, wiring.events, wiring.settings.grace_s
        )
        sweep_loops = SweepLoops([self._sweep_loop(shard, dispatcher) for shard in wiring.shards])
        table_pollers = self._table_pollers(dispatcher)
        redis_poller = self._redis_poller(dispatcher, capacity_request, sweep_loops)
        outages = dispatcher.shard_health.outages
        loops = [wheel_thread.loop, *sweep_loops.loops]
        loops += [self._lease_keeper(shard, dispatcher).loop for shard in wiring.shards]
        requests = CancelRequestReader(self._processes, self._celery_worker.pool)
        loops += [policy_loop(shard, wiring.events, outages, requests) for shard in wiring.shards]
        loops += [] if self._call_thread is None else [self._call_thread.loop]
        loops += [] if table_pollers is None else table_pollers.loops
        loops += [] if redis_poller is None else redis_poller.loops
        writers = self._statistics_writers()
        loops += [writer.loop for writer in writers]
        task_events = self._processes.task_events()
        return WorkerRuntime(
            celery_worker=self._celery_worker,
            settings=wiring.settings,
            events=wiring.events,
            clock=wiring.clock,
            router=wiring.router,
            registry=wiring.registry,
            processes=self._processes,
            publisher=wiring.publisher,
            timer=wiring.timer,
            dispatcher=dispatcher,
            near_entries=near_entries,
            wheel_thread=wheel_thread,
            sweep_loops=sweep_loops,
            service_watch=self._service_watch,
            table_pollers=table_pollers,
            redis_poller=redis_poller,
            work_sender=self._work_sender,
            worker_lost_events=WorkerLostEvents(task_events, self._sends_events),
            counts=self._counts,
            statistics_writers=writers,
            loops=loops,
        )

    def _dispatcher(
        self,
        near_entries: NearEntries,
        capacity_request: CapacityRequest,
        on_report: Callable[[Report], None] | None,
        row_budget: int | None,
    ) -> Dispatcher:
        shards = self._wiring.shards
        return Dispatcher(
            self._wiring.settings,
            [shard.clock for shard in shards],
            self._wiring.events,
            self._celery_worker.pool,
            call_soon=self._call_soon,
            near_entries=near_entries,
            capacity_request=capacity_request,
            send_back=self._work_sender.send_back,
            policy_stamp=lambda number: shards[number].policies.stamp,
            sends_events=self._sends_events,
            others_wait=self._processes.others_wait,
            on_report=on_report,
            row_budget=row_budget,
            counts=self._counts,
        )

    def _statistics_writers(self) -> list[StatisticsWriter]:
        if self._counts is None:
            return []
        return [
            StatisticsWriter(shard, self._counts, self._wiring.events)
            for shard in self._wiring.shards
        ]

    def _sends_events(self) -> bool:
        return wants_task_events(getattr(self._celery_worker, "consumer", None))

    def _lease_keeper(self, shard: Shard, dispatcher: Dispatcher) -> LeaseKeeper:
        return LeaseKeeper(
            shard,
            self._wiring.settings,
            self._wiring.events,
            self._processes,
            self._wiring.registry,
            dispatcher,
            self._celery_worker.pool,
            self._celery_worker.hub,
        )

    def _sweep_loop(self, shard: Shard, dispatcher: Dispatcher) -> SweepLoop:
        return SweepLoop(
            shard,
            self._wiring.settings,
            self._wiring.events,
            self._processes,
            self._wiring.registry,
            self._wiring.timer,
            dispatcher,
            self._celery_worker.pool,
            self._celery_worker.hostname,
            self._polls_table,
            self._service_watch,
            self._declared_schedules() if shard.number == 0 else None,
        )

    def _declared_schedules(self) -> DeclaredSchedules:
        wiring = self._wiring
        return DeclaredSchedules(
            wiring.shards, wiring.registry, wiring.recurring, wiring.celery.tasks, wiring.events
        )

    def _check_timer(self) -> None:
        """Connect to the broker and send nothing. The Redis poller tries its server by itself."""
        wiring = self._wiring
        if wiring.redis_timer is None and wiring.direct_timer is None:
            wiring.publisher.send(RUN, wiring.settings.default_queue, [])

    def _table_pollers(self, dispatcher: Dispatcher) -> TablePollers | None:
        if self._wiring.direct_timer is None or not self._polls_table:
            return None
        from delaytasks.worker.table_poller import TablePoller, TablePollers

        pollers = [
            TablePoller(
                shard,
                self._wiring.settings,
                self._wiring.events,
                self._processes,
                self._wiring.queues,
                dispatcher,
                self._celery_worker.hostname,
            )
            for shard in self._wiring.shards
        ]
        return TablePollers(self._wiring.direct_timer, pollers)

    def _redis_poller(
        self, dispatcher: Dispatcher, capacity_request: CapacityRequest, sweep_loops: SweepLoops
    ) -> RedisPoller | None:
        if self._wiring.redis_timer is None:
            return None
        # Imported here, since other deployments need no Redis client.
        from delaytasks.worker.redis_poller import RedisPoller

        return RedisPoller(
            self._wiring.redis_timer,
            self._wiring.clock,
            self._wiring.events,
            self._processes,
            dispatcher,
            capacity_request,
            sweep_loops,
        )
