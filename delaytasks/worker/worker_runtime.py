"""What the main process of a worker does besides Celery, from its start to its stop.

`WorkerRuntime` runs beside a Celery worker, or beside a `StandaloneWorker`, which takes its place
without a broker: its main thread is the event loop of a pool of processes, or of a solo pool.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from celery import _state, signals
from celery.concurrency import get_implementation
from celery.utils.log import get_logger
from kombu.asynchronous import Hub, set_event_loop

from delaytasks.broker.direct import TablePoller
from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.clock import from_us, monotonic
from delaytasks.model.inputs import ALL_QUEUES, serves
from delaytasks.model.moves import LateReason
from delaytasks.model.task import Entry
from delaytasks.operate.checks import check_ready
from delaytasks.operate.statistics import StatisticsWriter
from delaytasks.run.celery_context import check_time_limits
from delaytasks.worker.dispatcher import Dispatcher, UnfinishedDrains
from delaytasks.worker.patches import let_calls_wake, stop_reading
from delaytasks.worker.pool import freeze_loaded_objects
from delaytasks.worker.processes import Processes, logical_queues, processes_of
from delaytasks.worker.quick_loops import LeasesLoop, PoliciesLoop, ServiceWatch
from delaytasks.worker.sweep import SweepLoop
from delaytasks.worker.task_events import wants_task_events
from delaytasks.worker.wheel import Wheel

if TYPE_CHECKING:
    from delaytasks.broker.redis_timer import RedisPoller
    from delaytasks.client import DelayTasks
    from delaytasks.operate.metrics import MetricsEndpoint
    from delaytasks.runtime import Runtime
    from delaytasks.settings import Address

logger = get_logger(__name__)

#: How long a turn of the loop of policies asks other workers for help: with a slow broker, each
#: queue takes up to the time limit of a message, and meanwhile no pause is read.
HELP_S = 0.2


class WorkerRuntime:
    """Keeps near entries, sends chunks to the pool, sweeps, and renews leases.

    `celery_worker` is Celery's worker, or a worker that does without a broker. With the timer
    `direct` it looks for near tasks in the table. A test replaces a part by setting its attribute
    before `loops` is used.
    """

    def __init__(self, runtime: Runtime, processes: Processes, celery_worker: Any) -> None:
        self.runtime = runtime
        self.processes = processes
        self.celery_worker = celery_worker
        self.settings = runtime.settings
        self.events = runtime.events
        self.clock = runtime.clock
        self.store = runtime.store
        self.registry = runtime.registry
        self.service_watch = ServiceWatch(runtime.timer)
        call_thread = CallThread(self.events) if celery_worker.hub is None else None
        self.call_soon = (call_thread or celery_worker.hub).call_soon
        #: What the worker has run; None if the setting `statistics` is off.
        self.statistics = StatisticsWriter(runtime) if self.settings.statistics else None
        self.dispatcher = Dispatcher(self)
        self.wheel: Wheel[Entry] = Wheel(self.clock, self.dispatcher.take, self.events)
        self.sweep_loop = SweepLoop(self)
        self.leases_loop = LeasesLoop(self)
        self.policies_loop = PoliciesLoop(self)
        #: Takes entries from the timer, unless messages bring them.
        self.poller: TablePoller | RedisPoller | None = None
        if runtime.direct_timer is not None:
            self.poller = TablePoller(self)
        elif runtime.redis_timer is not None:
            # Imported here, since other deployments need no Redis client.
            from delaytasks.broker.redis_timer import RedisPoller

            self.poller = RedisPoller(self, runtime.redis_timer)
        self.loops = [
            self.wheel.loop,
            self.dispatcher.loop,
            self.sweep_loop.loop,
            self.leases_loop.loop,
            self.policies_loop.loop,
        ]
        for part in (call_thread, self.statistics):
            if part is not None:
                self.loops.append(part.loop)
        if self.poller is not None:
            self.loops += self.poller.loops
        self._was_connected = False
        self._endpoint: MetricsEndpoint | None = None

    def sends_events(self) -> bool:
        return wants_task_events(getattr(self.celery_worker, "consumer", None))

    def check_timer(self) -> None:
        """Let the timer try its broker if either may be down, since an idle worker arms nothing.

        A poller tries its server by itself.
        """
        if self.poller is None and self.service_watch.is_without_service:
            self.runtime.timer.arm([])

    def check(self) -> None:
        """Raise `ConfigError` if the worker cannot run the tasks of its queues."""
        check_ready(self.runtime)
        queues, pool = self.processes.queues, self.celery_worker.pool
        check_time_limits(self.registry, self.runtime.queues, queues, pool)

    def start(self) -> None:
        self.clock.refresh_if_due()
        # From now on the loop of leases refreshes the clock, so that neither the event loop nor the
        # timing wheel waits for the database.
        self.clock.refreshes_inline = False
        self.processes.memory.obstacles_us[LateReason.NO_WORKER] = self.clock.now_us()
        if self.statistics is not None:
            self.events.subscribe(self.statistics)
            # After the pool has stopped, since its last chunks report until then.
            signals.worker_shutdown.connect(self.write_statistics)
        if self.settings.metrics:
            self._prepare_metrics(self.settings.metrics)
        for loop in self.loops:
            loop.start()

    def _prepare_metrics(self, address: Address) -> None:
        """Add the loop that serves the metrics of this worker."""
        # Imported here, since other deployments need no client of Prometheus.
        from delaytasks.operate.metrics import MetricsEndpoint, WorkerMetrics

        self._endpoint = MetricsEndpoint(address, self.events, WorkerMetrics(self))
        self.loops.append(self._endpoint.loop)

    def stop(self, is_warm: bool = False) -> None:
        """Send back what is kept, and ask other workers to continue the drains of this one.

        Calling this again does no harm. Leases are renewed as long as the process lives, since
        the pool may have to finish tasks. With `is_warm` the caller is the pool's thread, and the
        pool may be changed.
        """
        # The poller stops first. Otherwise it would take what is sent back.
        if self.poller is not None:
            self.poller.stop()
        # The dispatcher closes before the wheel, so that it sends back all that comes from now on.
        waiting, drains = self.dispatcher.close()
        waiting += self.wheel.stop()
        if is_warm:
            waiting += self.dispatcher.recall()
        self.send_back(waiting, drains)
        stop_reading(self.celery_worker.consumer)
        self.write_statistics()
        if self._endpoint is not None:
            self._endpoint.stop()
        # Last, since a worker without a row may have died.
        self.sweep_loop.loop.stop()
        self.leases_loop.sign_off()

    def send_back(
        self, entries: list[Entry], drains: UnfinishedDrains, messages: int | None = None
    ) -> None:
        """Send unfinished work back to the timer, so that other workers get it in time.

        `messages` drain messages are sent for each queue, or those of the constant
        `drain_messages`.
        """
        settings, timer = self.settings, self.runtime.timer
        if entries:
            if timer.arm(entries):
                logger.info("delaytasks: sent back %d near tasks", len(entries))
            else:
                # The next sweep arms all near tasks again.
                self.events.attempt("stop", "forget", self.store.sweeps.forget_armed)
        messages = settings.drain_messages if messages is None else messages
        for queue, priorities in drains:
            timer.request_drain(queue, sorted(priorities), messages, settings.sweep_s)

    def write_statistics(self, **_: Any) -> None:
        """Write what the worker has counted since the last write."""
        if self.statistics is not None:
            self.statistics.write_last()

    def drain_here(self, queue: str, priorities: Sequence[int]) -> None:
        """Start a drain if this worker serves the queue."""
        if serves(self.processes.queues, queue):
            self.dispatcher.start_drain(queue, priorities)

    def watch(self) -> None:
        """Do what a worker does once a second, and what needs no database."""
        self.ask_for_help()
        consumer = getattr(self.celery_worker.consumer, "task_consumer", None)
        if consumer is not None:  # `celery control add_consumer` and `cancel_consumer` change it
            names = (queue.name for queue in consumer.queues)
            self.processes.queues = logical_queues(names, self.settings.namespace)
        if self.service_watch.is_without_service:
            self.processes.memory.obstacles_us[LateReason.BROKER] = self.clock.now_us()
        late_s = self.wheel.late_s
        if late_s > self.settings.grace_s:
            self.events.emit("wheel.late", seconds=late_s)

    def ask_for_help(self) -> None:
        """Ask other workers to drain the queues whose entries were too many for this one.

        The queues that take too long come first in the next turn.
        """
        until = monotonic() + HELP_S
        for drain in self.dispatcher.left_to_table():
            self.send_back([], [drain])
            if monotonic() >= until:
                return

    def connected(self) -> None:
        """Prepare for messages. Celery calls this at the start and after each lost connection."""
        self.service_watch.mark_broker_back()
        self.leases_loop.report_soon()
        if self._was_connected:
            self.recall()
            self.sweep_loop.arm_again()
        self._was_connected = True

    def recall(self) -> None:
        """Restore the chunks that Celery forgot when it lost the broker; send lost ones again."""
        lost = self.dispatcher.recall()
        if lost:
            self.dispatcher.take(lost)

    def info(self) -> dict[str, Any]:
        """Return what `celery inspect stats` shows."""
        in_flight, _ = self.dispatcher.running()
        return {
            "held": len(self.wheel),
            "waiting": self.dispatcher.waiting,
            "chunks": len(in_flight),
            "timer": self.settings.timer_kind,
            "timer_is_up": self.runtime.timer.is_up,
            # `celery inspect` prints the answer as JSON, so it is text.
            "oldest_chunk": from_us(int(min(in_flight))).isoformat() if in_flight else None,
            "loops": {loop.name: loop.info() for loop in self.loops},
            "events": dict(self.events.counts),
        }


class CallThread:
    """Takes the place of the event loop if the broker's transport has no event loop.

    A solo pool runs its chunks in this thread.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.loop = Loop("calls", self._run_calls, events)

    def call_soon(self, call: Callable[[], None]) -> None:
        self._queue.put(call)
        self.loop.wake()

    def _run_calls(self) -> None:
        while True:
            try:
                call = self._queue.get_nowait()
            except Empty:
                return
            self._events.attempt("calls", "call", call)


# -- a worker without a broker: it has a pool, and no consumer ------------------------------------

#: How often the worker asks whether all work is done.
DONE_CHECK_S = 0.1
#: How long the pool waits for the last messages of a process that died.
LOST_PROCESS_WAIT_S = 1.0


class StandaloneWorker:
    """Takes the place of a Celery worker. Without processes of its own it runs tasks in this one.

    It finds its work in the table. `may_detach` is for a worker that runs until it is stopped.
    """

    consumer = None

    def __init__(
        self,
        delays: DelayTasks,
        queues: Sequence[str],
        processes: int | None,
        *,
        may_detach: bool = True,
    ) -> None:
        if delays._runtime.settings.uses_broker:
            # From now on this process contacts neither broker nor Redis, and finds near rows in
            # the table.
            delays._renew_runtime(timer="direct")
        self._parts = parts = delays._runtime
        self._has_processes = processes is not None
        self._is_stopping = False
        self._was_current = getattr(_state._tls, "current_app", None)
        app = parts.celery
        pool_processes = processes_of(app)
        app.set_current()
        self.hostname = f"run{os.getpid()}-{secrets.token_hex(2)}@{socket.gethostname()}"
        # Celery's own code for Django reads it after the signal.
        self.pool_cls = get_implementation("solo" if processes is None else "prefork")
        if processes is not None:
            app.loader.init_worker()
            signals.worker_init.send(sender=self)
        self.hub = Hub()
        set_event_loop(self.hub)
        let_calls_wake(self.hub, from_own_thread=processes is None)
        self.pool = self._make_pool(app, processes)
        if processes is not None:
            pool_processes.serve(self.hostname, self.pool, may_detach=may_detach)
        pool_processes.queues = list(queues) or [ALL_QUEUES]
        self.runtime = WorkerRuntime(parts, pool_processes, self)

    def _make_pool(self, app: Any, processes: int | None) -> Any:
        conf = app.conf
        return self.pool_cls(
            processes or 1,
            app=app,
            initargs=(app, self.hostname),
            maxtasksperchild=conf.worker_max_tasks_per_child,
            max_memory_per_child=conf.worker_max_memory_per_child,
            lost_worker_timeout=LOST_PROCESS_WAIT_S,
            max_restarts=100,
            threads=False,
            putlocks=False,  # the dispatcher sends no more chunks than there are processes
        )

    def start(self) -> None:
        """Start the pool and the runtime. Raise `ConfigError` if the configuration is wrong."""
        if self._has_processes:
            self.runtime.check()
            freeze_loaded_objects()
        self.pool.start()  # it forks, so it starts before there are threads
        self.runtime.start()

    def run(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Run until `stop_soon` is called, or until `is_done` returns True."""
        self.pool.register_with_event_loop(self.hub)
        self.hub.call_repeatedly(DONE_CHECK_S, lambda: None)  # so that the loop turns
        loop = self.hub.create_loop()
        while not (self._is_stopping or is_done()):
            next(loop)

    def stop_soon(self) -> None:
        """End `run`. Signal handlers may call this."""
        self._is_stopping = True

    def stop(self) -> None:
        """Send back what is kept, and wait for running tasks."""
        self.runtime.stop()
        self.pool.stop()
        # Undo what concerns the whole process, which may continue with other work.
        for loop in self.runtime.loops:
            loop.stop()
        self._parts.clock.refreshes_inline = True
        self._parts.policy_cache.is_led = False
        self.hub.close()
        set_event_loop(None)
        signals.worker_shutdown.send(sender=self)
        _state._set_current_app(self._was_current)
