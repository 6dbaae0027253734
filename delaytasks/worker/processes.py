"""The processes of a worker: their names and queues, and the runner of this one."""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from billiard.util import set_pdeathsig
from celery import signals

from delaytasks.model.clock import fork_safe

if TYPE_CHECKING:
    from delaytasks.run.calls import WorkerMemory
    from delaytasks.run.observers import Observer
    from delaytasks.run.runner import Runner
    from delaytasks.runtime import Runtime
    from delaytasks.worker.task_events import TaskEvents


#: Without a main process, a row runs no longer than this part of a lease, and of the time after
#: which a silent worker's rows are recovered. Leases are renewed after a third of their time, and a
#: worker reports after a third of the other one, so another worker does not run the row yet.
ORPHAN_PART = 0.5


class Processes:
    """The name of this process, what it shares with its worker's other processes, and its runners.

    Runners and their parts are built when they are first needed: most processes only schedule, and
    load no module that runs tasks.
    """

    def __init__(self, get_runtime: Callable[[], Runtime]) -> None:
        """`get_runtime` returns the objects of the instance; its first call makes them."""
        self._get_runtime = get_runtime
        self.hostname = f"delaytasks@{socket.gethostname()}"
        self._token = secrets.token_hex(2)
        self.is_worker = False
        #: Whether the worker's pool can keep time limits.
        self.keeps_time_limits = False
        #: The logical queues that this worker serves.
        self.queues: list[str] = []
        #: Whether concurrent tasks may run on when their chunk has ended, while others run.
        self.may_detach = True
        fork_safe(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._runner: Runner | None = None
        self._task_events: TaskEvents | None = None
        #: Whether this process of the pool runs a chunk, and whether its main process is dead.
        self._runs_chunk = self._is_orphan = False

    @cached_property
    def memory(self) -> WorkerMemory:
        """What the main process of a worker tells the processes that it forks from now on."""
        from delaytasks.run.calls import WorkerMemory

        return WorkerMemory.shared()

    @property
    def runtime(self) -> Runtime:
        return self._get_runtime()

    def serve(self, hostname: str, pool: Any, may_detach: bool = True) -> None:
        """Make this process the main process of a worker. Its children inherit the name."""
        from delaytasks.run.calls import WorkerMemory
        from delaytasks.run.celery_context import can_limit_time

        self.hostname = hostname
        self.is_worker = True
        self.may_detach = may_detach
        self.memory = WorkerMemory.shared()  # before the pool's processes are forked
        self.keeps_time_limits = can_limit_time(pool)
        # For the pool's processes, for this one when its pool has stopped, and for cold shutdowns.
        signals.worker_process_shutdown.connect(self._finish, weak=False)
        signals.worker_shutdown.connect(self._finish, weak=False)
        if self.keeps_time_limits:
            signals.worker_process_init.connect(self._outlive_main_process, weak=False)
        atexit.register(self._finish)

    def name(self, pid: int) -> str:
        """Return the value of the `worker` column: the worker and its process.

        The token distinguishes the process from an earlier one with the same id.
        """
        return f"{self.hostname}/{pid}-{self._token}"

    def runner(self, sends_events: bool = False) -> Runner:
        """Return this process's runner, for a job that begins."""
        self.runtime.policy_cache.current()
        with self._lock:
            if self._task_events is None:
                self._task_events = self.task_events()
            if self._runner is None:
                self._runner = self.build_runner()
            self._runner.watch(self._task_events if sends_events else None)
            return self._runner

    def task_events(self) -> TaskEvents:
        """Return what sends Celery events for the tasks of this process."""
        from delaytasks.worker.task_events import TaskEvents

        app, settings = self.runtime.celery, self.runtime.settings
        shows_bodies = settings.event_bodies and not settings.encryption_keys
        return TaskEvents(app, self.hostname, settings.publish_limit_s, shows_bodies)

    def build_runner(self, watcher: Observer | None = None) -> Runner:
        """Return a new runner."""
        # Most producers run no tasks, so they do not import what runs them.
        from delaytasks.limits.admission import Admission
        from delaytasks.run.calls import Host
        from delaytasks.run.celery_context import CeleryTaskContext
        from delaytasks.run.runner import Runner

        runtime = self.runtime
        store = runtime.store
        address = own_address(store.database.url.host)
        claims = store.claims(self.name(os.getpid()), address, runtime.policy_cache)
        admission = Admission(store, claims, runtime.policy_cache, runtime.events)
        task_context = CeleryTaskContext(runtime, self.hostname, self.keeps_time_limits)
        host = Host(
            claims,
            admission,
            runtime.registry,
            task_context,
            task_context.reuse_stack,
            # A process that runs tasks without a worker runs them without limits.
            keeps_time_limits=self.keeps_time_limits or not self.is_worker,
            # The main process of a worker renews the leases of the rows that are left.
            may_detach=self.is_worker and self.may_detach,
            memory=self.memory,
        )
        runner = Runner(runtime, host)
        runner.watch(watcher)
        return runner

    def _outlive_main_process(self, **_: Any) -> None:
        """Let this process of the pool end its chunk if only the main process is killed.

        Celery asks Linux for a SIGKILL then, and the rows would wait until the worker counts as
        dead.
        """
        with suppress(OSError):  # other systems have no signal for this
            signal.signal(signal.SIGUSR2, self._main_process_died)
            set_pdeathsig(signal.SIGUSR2)

    def _main_process_died(self, *_: Any) -> None:
        """Leave in other threads, since this one may hold a lock."""
        settings = self.runtime.settings
        self._is_orphan, left_s = True, min(settings.lease_s, settings.lost_s) * ORPHAN_PART
        threading.Timer(left_s, _kill_this_process).start()
        if not self._runs_chunk:  # rows may still run, whose chunk has ended
            threading.Thread(target=self._leave).start()

    def _leave(self) -> None:
        try:
            self._finish()
        finally:
            _kill_this_process()

    def began_chunk(self) -> None:
        self._runs_chunk = True

    def ended_chunk(self) -> None:
        self._runs_chunk = False
        if self._is_orphan:
            self._leave()

    def _finish(self, **_: Any) -> None:
        """Wait for the tasks that still run although all chunks have ended, and arm what they
        scheduled.
        """
        runner, runtime = self._runner, self.runtime
        if runner is None:
            return
        runner.finish()
        statistics = runner.take_statistics()
        runtime.flush()
        if statistics and runtime.settings.statistics:
            from delaytasks.operate.statistics import StatisticsWriter

            writer = StatisticsWriter(runtime)
            writer.add(statistics)
            writer.write_last()


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def processes_of(celery_app: Any) -> Processes:
    """Return the processes of the instance of a Celery app."""
    processes: Processes = celery_app.delaytasks._processes
    return processes


def logical_queues(names: Iterable[str], namespace: str) -> list[str]:
    """Return our logical queues among a broker's queues."""
    prefix = namespace + "."
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def own_address(toward: str | None) -> int | None:
    """Return this host's IPv4 address as the database sees it, as a number; None with IPv6 only."""
    try:
        # A connected datagram socket sends nothing. It only finds the route of the packets.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((toward or "127.0.0.1", 9))
            return int.from_bytes(socket.inet_aton(probe.getsockname()[0]), "big")
    except OSError:
        return None
