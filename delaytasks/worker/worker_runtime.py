"""What the main process of a worker does besides Celery, from its start to its stop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from celery import signals
from celery.utils.nodenames import node_format
from celery.worker import state

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.clock import from_us, monotonic
from delaytasks.statistics.statistics_table import StatisticsWriter, WorkerCounts, write_last
from delaytasks.worker.broker_connection import stop_reading
from delaytasks.worker.celery_patches import running_pids
from delaytasks.worker.chunk_queue import NearEntries, UnfinishedWork, WorkSender
from delaytasks.worker.dispatcher import CallThread, CapacityRequest, Dispatcher
from delaytasks.worker.lease_keeper import LeaseKeeper
from delaytasks.worker.processes import Processes, logical_queues
from delaytasks.worker.service_watch import (
    CancelRequestReader,
    DatabaseOutages,
    ServiceWatch,
    policy_loop,
)
from delaytasks.worker.sweep_loop import DeclaredSchedules, SweepLoop
from delaytasks.worker.task_events import WorkerLostEvents, wants_task_events
from delaytasks.worker.timing_wheel import WheelThread

if TYPE_CHECKING:
    from delaytasks.metrics.process import WorkerMetrics
    from delaytasks.metrics.prometheus import MetricsEndpoint
    from delaytasks.run.runner import Report
    from delaytasks.runtime import Runtime
    from delaytasks.worker.redis_poller import RedisPoller
    from delaytasks.worker.table_poller import TablePoller

#: How often the watchdog checks the loops.
WATCHDOG_S = 1.0
#: A check that comes this much later shows that the whole process was suspended. It proves nothing
#: about a single loop.
SUSPENDED_S = 3 * WATCHDOG_S
#: A turn of the watch loop that takes longer is stuck. It may wait for broker and database.
WATCH_STUCK_S = 30.0


class WorkerRuntime:
    """Keeps near entries, sends chunks to the pool, sweeps, and renews leases.

    `celery_worker` is Celery's worker, or a worker that does without a broker. With `polls_table`
    and the timer `direct` it looks for near tasks in the table. `on_report` gets the report of each
    chunk, and at most `row_budget` rows are claimed, if it is given. A test replaces a part by
    setting its attribute before `loops` is used.
    """

    def __init__(
        self,
        runtime: Runtime,
        processes: Processes,
        celery_worker: Any,
        *,
        polls_table: bool = True,
        on_report: Callable[[Report], None] | None = None,
        row_budget: int | None = None,
    ) -> None:
        self.runtime = runtime
        self.processes = processes
        self.celery_worker = celery_worker
        self.polls_table = polls_table
        self.on_report = on_report
        self.row_budget = row_budget
        self.settings = runtime.settings
        self.events = runtime.events
        self.clock = runtime.clock
        self.store = runtime.store
        self.registry = runtime.registry
        self.timer = runtime.timer
        self.outages = DatabaseOutages(self.events)
        self.capacity_request = CapacityRequest()
        self.service_watch = ServiceWatch(self.timer, self._check_timer)
        self.work_sender = WorkSender(runtime)
        hub_or_worker = celery_worker.hub or celery_worker
        has_event_loop = hasattr(hub_or_worker, "call_soon")
        self._call_thread = None if has_event_loop else CallThread(self.events)
        self.call_soon = (self._call_thread or hub_or_worker).call_soon
        #: What the worker has run; None if the setting `statistics` is off.
        self.counts: WorkerCounts | None = None
        self.statistics_writer: StatisticsWriter | None = None
        if self.settings.statistics:
            self.counts = WorkerCounts(self.clock, self.settings.statistics_tags)
            self.statistics_writer = StatisticsWriter(
                self.store, self.clock, self.counts, self.events
            )
        self.near_entries = NearEntries(self.settings, self.clock, self.events)
        self.dispatcher = Dispatcher(self)
        self.wheel_thread = WheelThread(
            self.near_entries.wheel, self.dispatcher.take, self.events, self.settings.grace_s
        )
        self.sweep_loop = SweepLoop(self, DeclaredSchedules(runtime))
        self.lease_keeper = LeaseKeeper(self)
        self.table_poller = self._make_table_poller()
        self.redis_poller = self._make_redis_poller()
        self.worker_lost_events = WorkerLostEvents(processes.task_events(), self.sends_events)
        watch = Loop("watch", self._watch, self.events, WATCH_STUCK_S)
        self.watchdog = Watchdog(self.events, [watch, *self._loops()])
        self._was_connected = False
        self._endpoint: MetricsEndpoint | None = None

    def _make_table_poller(self) -> TablePoller | None:
        timer = self.runtime.direct_timer
        if timer is None or not self.polls_table:
            return None
        from delaytasks.worker.table_poller import TablePoller

        return TablePoller(self, timer)

    def _make_redis_poller(self) -> RedisPoller | None:
        timer = self.runtime.redis_timer
        if timer is None:
            return None
        # Imported here, since other deployments need no Redis client.
        from delaytasks.worker.redis_poller import RedisPoller

        return RedisPoller(self, timer)

    def _loops(self) -> list[Loop]:
        requests = CancelRequestReader(self.runtime, self.processes, self.celery_worker.pool)
        return [
            self.wheel_thread.loop,
            self.sweep_loop.loop,
            self.lease_keeper.loop,
            policy_loop(self.runtime, self.outages, requests, self.dispatcher.limits_changed),
            *([] if self._call_thread is None else [self._call_thread.loop]),
            *([] if self.table_poller is None else self.table_poller.loops),
            *([] if self.redis_poller is None else self.redis_poller.loops),
            *([] if self.statistics_writer is None else [self.statistics_writer.loop]),
        ]

    def sends_events(self) -> bool:
        return wants_task_events(getattr(self.celery_worker, "consumer", None))

    def _check_timer(self) -> None:
        """Connect to the broker and send nothing. The Redis poller tries its server by itself."""
        runtime = self.runtime
        if runtime.redis_timer is None and runtime.direct_timer is None:
            runtime.timer.arm([])

    def start(self) -> None:
        self.clock.refresh_if_due()
        # From now on the lease keeper refreshes the clock, so that neither the event loop nor the
        # timing wheel waits for the database.
        self.clock.refreshes_inline = False
        self.events.subscribe(self.worker_lost_events)
        if self.counts is not None:
            self.events.subscribe(self.counts)
            # After the pool has stopped, since its last chunks report until then.
            signals.worker_shutdown.connect(self.write_statistics)
        self._endpoint = self._make_endpoint()
        if self._endpoint is not None:
            self.watchdog.loops.append(self._endpoint.loop)
        self.watchdog.start()

    def _make_endpoint(self) -> MetricsEndpoint | None:
        """Return what serves this worker's metrics, or None if the settings ask for none."""
        place = self.settings.metrics
        if not place:
            return None
        # Imported here, since other deployments need no client of Prometheus.
        from delaytasks.metrics.prometheus import MetricsEndpoint

        if isinstance(place, str):
            place = node_format(place, self.celery_worker.hostname)
        return MetricsEndpoint(place, self.events, self.metrics)

    @cached_property
    def metrics(self) -> WorkerMetrics:
        """The metrics of this worker, which include the sweeps from the first use on."""
        from delaytasks.metrics.process import SweepTimes, WorkerMetrics

        counts, pool, sweep_times = self.counts, self.celery_worker.pool, SweepTimes()
        self.events.subscribe(sweep_times)
        return WorkerMetrics(
            self.info,
            dict if counts is None else counts.totals,
            lambda: int(pool.limit or 1),
            sweep_times,
        )

    def stop(self, is_warm: bool = False) -> None:
        """Send back what is kept, and ask other workers to continue the drains of this one.

        Calling this again does no harm. Leases are renewed as long as the process lives, since
        the pool may have to finish tasks. With `is_warm` the caller is the pool's thread, and the
        pool may be changed.
        """
        # The pollers stop first. Otherwise they would take what is sent back.
        if self.redis_poller is not None:
            self.redis_poller.stop()
        if self.table_poller is not None:
            self.table_poller.stop()
        # The dispatcher closes before the wheel, so that it sends back all that comes from now on.
        unfinished = self.dispatcher.close()
        waiting = unfinished.entries + self.wheel_thread.stop()
        if is_warm:
            waiting += self.dispatcher.recall()
        self.work_sender.send_back(UnfinishedWork(waiting, unfinished.queues))
        stop_reading(self.celery_worker.consumer)
        self.write_statistics()
        if self._endpoint is not None:
            self._endpoint.stop()
        # Last, since a worker without a row may have died.
        self.sweep_loop.stop()
        if self.table_poller is not None:
            self.events.attempt("stop", "wake others", self.table_poller.wake_others)

    def write_statistics(self, **_: Any) -> None:
        """Write what the worker has counted since the last write."""
        if self.statistics_writer is not None:
            write_last(self.statistics_writer, self.events)

    def _watch(self) -> float:
        """Do once a second what needs no database."""
        self.watchdog.loop.check()
        # Other workers help with the entries that were too many for this one.
        self.work_sender.send_back(self.dispatcher.take_left_to_table())
        consumer = getattr(self.celery_worker.consumer, "task_consumer", None)
        if consumer is not None:  # `celery control add_consumer` and `cancel_consumer` change it
            names = (queue.name for queue in consumer.queues)
            self.processes.queues = logical_queues(names, self.settings.namespace)
        self.outages.check_answer()
        late_s = self.near_entries.wheel.late_s
        if late_s > self.settings.grace_s:
            self.events.emit("wheel.late", seconds=late_s)
        if state.should_terminate is not None:
            # A cold shutdown waits for the pool first. The kept entries must not wait with it.
            self.stop()
        return WATCHDOG_S

    def connected(self) -> None:
        """Prepare for messages. Celery calls this at the start and after each lost connection."""
        self.service_watch.mark_broker_back()
        if self._was_connected:
            self.recall()
            self.sweep_loop.forget_armed()
        self._was_connected = True

    def recall(self) -> None:
        """Restore the chunks that Celery forgot when it lost the broker; send lost ones again."""
        lost = self.dispatcher.recall()
        if lost:
            self.dispatcher.take(lost)

    def pids(self) -> set[int]:
        """Return the pool's processes and this one, which runs the tasks of a pool of threads."""
        return {os.getpid(), *running_pids(self.celery_worker.pool)}

    def info(self) -> dict[str, Any]:
        """Return what `celery inspect stats` shows."""
        in_flight = self.dispatcher.in_flight
        return {
            "held": len(self.near_entries.wheel),
            "waiting": self.dispatcher.waiting,
            "chunks": len(in_flight),
            "timer": self.settings.timer_kind,
            "timer_is_up": self.timer.is_up,
            # `celery inspect` prints the answer as JSON, so it is text.
            "oldest_chunk": from_us(int(min(in_flight))).isoformat() if in_flight else None,
            "loops": self.watchdog.info(),
            "events": dict(self.events.counts),
        }


class Watchdog:
    """Checks all loops once a second. It waits for neither the database nor the broker.

    The watch loop of the runtime checks the watchdog's own loop, so both would have to die within
    a second.
    """

    def __init__(self, events: Events, loops: Iterable[Loop]) -> None:
        self._events = events
        self.loop = Loop("watchdog", self.check, events, stuck_s=10 * WATCHDOG_S)
        self.loops = [*loops, self.loop]
        self._checked_at = monotonic()

    def start(self) -> None:
        for loop in self.loops:
            loop.start()

    def check(self) -> float:
        now = monotonic()
        was_suspended, self._checked_at = now - self._checked_at > SUSPENDED_S, now
        if not was_suspended:
            for loop in self.loops:
                self._events.attempt("watchdog", loop.name, loop.check)
        return WATCHDOG_S

    def info(self) -> dict[str, Any]:
        """Return the state of each loop by its name."""
        return {loop.name: loop.info() for loop in self.loops}
