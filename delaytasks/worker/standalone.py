"""A worker without a broker: it has a worker runtime and a pool, but no consumer.

Its main thread is the event loop of a pool of processes. Or it runs tasks itself, like a solo pool,
and makes the calls of the runtime in between.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from celery import _state, signals
from celery.concurrency import get_implementation
from kombu.asynchronous import Hub, set_event_loop

from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.run.celery_context import check_time_limits
from delaytasks.worker.pool import freeze_loaded_objects, running_pids
from delaytasks.worker.processes import processes_of
from delaytasks.worker.sweep import emit_recovered
from delaytasks.worker.worker_runtime import WorkerRuntime

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.run.runner import Report

#: How often the worker asks whether all work is done.
DONE_CHECK_S = 0.1
#: How long the pool waits for the last messages of a process that died.
LOST_PROCESS_WAIT_S = 1.0


class StandaloneWorker:
    """Takes the place of a Celery worker. Without processes of its own it runs tasks in this one.

    With `polls_table` it runs until it is stopped, and takes its share of the near tasks. Otherwise
    it only drains what it is asked to. `on_report` and `row_budget` are passed to the dispatcher.
    """

    consumer = None

    def __init__(
        self,
        delays: DelayTasks,
        queues: Sequence[str],
        processes: int | None,
        polls_table: bool,
        on_report: Callable[[Report], None] | None = None,
        row_budget: int | None = None,
    ) -> None:
        if delays._runtime.settings.uses_broker:
            # From now on this process contacts neither broker nor Redis, and finds near rows in
            # the table.
            delays._renew_runtime(timer="direct")
        self._parts = parts = delays._runtime
        self._polls_table = polls_table
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_stopping = self._is_done = False
        self._was_current = getattr(_state._tls, "current_app", None)
        app = parts.celery
        pool_processes = processes_of(app)
        app.set_current()
        self.hostname = f"run{os.getpid()}-{secrets.token_hex(2)}@{socket.gethostname()}"
        if processes is not None:
            app.loader.init_worker()
            signals.worker_init.send(sender=self)
        self.hub = None if processes is None else set_event_loop(Hub())
        self.pool = self._make_pool(app, processes)
        if processes is not None:
            pool_processes.serve(self.hostname, self.pool, may_detach=polls_table)
        pool_processes.queues = list(queues) or [ALL_QUEUES]
        self.runtime = WorkerRuntime(
            parts,
            pool_processes,
            self,
            polls_table=polls_table,
            on_report=on_report,
            row_budget=row_budget,
        )

    def _make_pool(self, app: Any, processes: int | None) -> Any:
        conf, kind = app.conf, get_implementation("solo" if processes is None else "prefork")
        return kind(
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

    def call_soon(self, call: Callable[[], None]) -> None:
        """Take the place of the event loop's method if there is no event loop."""
        self._calls.put(call)

    def start(self) -> None:
        """Start the pool and the runtime. Raise `ConfigError` if the configuration is wrong."""
        runtime = self.runtime
        if self._polls_table:
            self._parts.checks.check_ready()
            queues = runtime.processes.queues
            check_time_limits(runtime.registry, self._parts.queues, queues, self.pool)
        if self.hub is not None:
            freeze_loaded_objects()
        self.pool.start()  # it forks, so it starts before there are threads
        runtime.start()

    def run(self, is_done: Callable[[], bool] = lambda: False) -> None:
        """Run until `stop_soon` is called, or until `is_done` returns True in an idle moment."""
        if self.hub is not None:
            self._run_hub(self.hub, is_done)
            return
        while not self._is_stopping:
            try:
                call = self._calls.get(timeout=DONE_CHECK_S)
            except Empty:
                if is_done():
                    return
            else:
                call()

    def _run_hub(self, hub: Hub, is_done: Callable[[], bool]) -> None:
        def check() -> None:
            self._is_done = is_done()

        self.pool.register_with_event_loop(hub)
        hub.call_repeatedly(DONE_CHECK_S, check)
        loop = hub.create_loop()
        while not (self._is_stopping or self._is_done):
            next(loop)

    def stop_soon(self) -> None:
        """End `run`. Signal handlers may call this."""
        self._is_stopping = True

    def stop(self) -> None:
        """Send back what is kept, and wait for running tasks."""
        self.runtime.stop()
        self.pool.stop()
        self._close()

    def abandon(self) -> None:
        """Kill running tasks, and release their rows as if their processes had died."""
        runtime = self.runtime
        runtime.stop()
        pids = running_pids(self.pool)
        for pid in pids:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        self.pool.terminate()
        names = [runtime.processes.name(pid) for pid in pids]
        recovered = runtime.store.leases.release(names, runtime.settings.max_lost_leases)
        emit_recovered(runtime.events, recovered)
        self._close()

    def _close(self) -> None:
        """Undo what concerns the whole process, which may continue with other work."""
        for loop in self.runtime.watchdog.loops:
            loop.stop()
        self._parts.clock.refreshes_inline = True
        self._parts.policy_cache.is_led = False
        if self.hub is not None:
            self.hub.close()
            set_event_loop(None)
        signals.worker_shutdown.send(sender=self)
        _state._set_current_app(self._was_current)
