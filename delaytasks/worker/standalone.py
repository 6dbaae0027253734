"""A worker without Celery's consumer: the desk and a pool, and no broker. Its main thread is the event loop of a pool
of processes; or it runs tasks itself, as a solo pool has it, and does in between what the desk wants done there."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from celery import _state, signals
from celery.concurrency import get_implementation
from kombu.asynchronous import Hub, set_event_loop

from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.maintenance.sweeper import tell_lapsed
from delaytasks.worker.heap import keep_what_is_loaded
from delaytasks.worker.runtime import WorkerRuntime
from delaytasks.worker.time_limits import check_time_limits

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.sharding.shard import Shard

#: How often it is asked whether all is over.
LOOK_S = 0.1
#: How long the last words of a process that died are waited for.
LOST_S = 1.0


class StandaloneWorker:
    """What a Celery worker is to the desk. Without processes of its own it runs tasks in this one."""

    consumer = None

    def __init__(
        self, delays: DelayTasks, queues: Sequence[str], processes: int | None, looks: bool
    ) -> None:
        """With `looks` it is there for good, and takes its part of what is near; else it does what it is told to."""
        delays.go_direct()
        self._delays = delays
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_stopping = self._is_over = False
        self._was_current = getattr(_state._tls, "current_app", None)
        self.looks = looks
        app = delays.celery
        app.set_current()
        self.hostname = f"drain{os.getpid()}-{secrets.token_hex(2)}@{socket.gethostname()}"
        if processes is not None:
            app.loader.init_worker()
            signals.worker_init.send(sender=self)
        self.hub = None if processes is None else set_event_loop(Hub())
        self.pool = self._make_pool(app, processes)
        if processes is not None:
            delays.processes.serve(self.hostname, self.pool)
        delays.processes.leaves_rows = looks
        delays.processes.queues = list(queues) or [ALL_QUEUES]
        self.runtime = WorkerRuntime(delays, self)

    def _make_pool(self, app: Any, processes: int | None) -> Any:
        conf, kind = app.conf, get_implementation("solo" if processes is None else "prefork")
        return kind(
            processes or 1,
            app=app,
            initargs=(app, self.hostname),
            maxtasksperchild=conf.worker_max_tasks_per_child,
            max_memory_per_child=conf.worker_max_memory_per_child,
            lost_worker_timeout=LOST_S,
            max_restarts=100,
            threads=False,
            putlocks=False,  # the dispatcher sends no more chunks than there are processes
        )

    def call_soon(self, call: Callable[[], None]) -> None:
        """As a hub has it, where there is none."""
        self._calls.put(call)

    def start(self) -> None:
        """`ConfigError` if it can not do what it is for."""
        if self.looks:
            self._delays.check_ready()
            check_time_limits(self._delays, self.pool)
        if self.hub is not None:
            keep_what_is_loaded()
        self.pool.start()  # forks, before there are threads
        self.runtime.start()

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Until somebody stops it, or all is over, which is asked when there is nothing else to do."""
        if self.hub is not None:
            self._run_hub(self.hub, is_over)
            return
        while not self._is_stopping:
            try:
                call = self._calls.get(timeout=LOOK_S)
            except Empty:
                if is_over():
                    return
            else:
                call()

    def _run_hub(self, hub: Hub, is_over: Callable[[], bool]) -> None:
        def look() -> None:
            self._is_over = is_over()

        self.pool.register_with_event_loop(hub)
        hub.call_repeatedly(LOOK_S, look)
        loop = hub.create_loop()
        while not (self._is_stopping or self._is_over):
            next(loop)

    def stop_soon(self) -> None:
        """Also for signal handlers."""
        self._is_stopping = True

    def stop(self) -> None:
        """Gives back what is held, and waits for what runs."""
        self.runtime.stop()
        self.pool.stop()
        self._close()

    def abandon(self) -> None:
        """What runs now is given up: others may have it, as if these processes had died."""
        self.runtime.stop()
        delays = self._delays
        pids = self._pids()
        for pid in pids:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        self.pool.terminate()
        names = [delays.processes.name(pid) for pid in pids]
        delays.routes.each(partial(self._release, names))
        self._close()

    def _release(self, names: Sequence[str], shard: Shard) -> None:
        lapsed = shard.store.leases.release(names, self._delays.settings.max_lost_leases)
        tell_lapsed(self._delays.events, lapsed)

    def _pids(self) -> Sequence[int]:
        try:
            return (self.pool.info or {}).get("processes") or [os.getpid()]
        except AttributeError:
            return []  # it has stopped

    def _close(self) -> None:
        """The process may go on with something else."""
        for loop in self.runtime.watchdog.loops:
            loop.stop()
        for shard in self._delays.shards:
            shard.clock.refreshes_inline = True
            shard.policies.is_led = False
        if self.hub is not None:
            self.hub.close()
            set_event_loop(None)
        signals.worker_shutdown.send(sender=self)
        _state._set_current_app(self._was_current)
