"""Who runs what: the worker's processes by name, and the runner of this one."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import signals

from delaytasks.core.forks import reset_in_child
from delaytasks.processors.thread_slots import ThreadSlots
from delaytasks.worker.chunk_counts import Counting
from delaytasks.worker.renewals import Renewals
from delaytasks.worker.task_events import TaskEvents
from delaytasks.worker.time_limits import can_limit_time

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.execution.runner import Runner


class Processes:
    def __init__(self, delays: DelayTasks) -> None:
        self._delays = delays
        self.hostname = f"delaytasks@{socket.gethostname()}"
        self._token = secrets.token_hex(2)
        self.is_worker = False
        self.renewals = Renewals()
        #: Whether the worker's pool can keep time limits.
        self.keeps_time_limits = False
        #: The logical queues that this worker serves.
        self.queues: list[str] = []
        #: Whether rows that run side by side may be left when their chunk is over, and others run.
        self.leaves_rows = True
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._runners: dict[int, Runner] = {}
        self._rows: TaskEvents | None = None
        self._sends_events = False
        self._thread_slots = ThreadSlots()
        self._counting: Counting | None = None

    def serve(self, hostname: str, pool: Any) -> None:
        """This process is the main process of a worker; its children inherit the name."""
        self.hostname = hostname
        self.is_worker = True
        self.renewals = Renewals()  # before the pool's processes are forked
        self.keeps_time_limits = can_limit_time(pool)
        # Of the pool's processes; of this one, when its pool has stopped; and after a cold shutdown.
        signals.worker_process_shutdown.connect(self._finish, weak=False)
        signals.worker_shutdown.connect(self._finish, weak=False)
        atexit.register(self._finish)

    def name(self, pid: int) -> str:
        """What the `worker` column says: the worker, and which of its processes, told apart from any earlier one."""
        return f"{self.hostname}/{pid}-{self._token}"

    def runner(self, shard: int, sends_events: bool) -> Runner:
        """The one of this process for a shard."""
        with self._lock:
            if self._rows is None:
                self._rows = self.row_events()
            runner = self._runners.get(shard) or self._runners.setdefault(
                shard, self._make_runner(shard)
            )
            self._sends_events = sends_events
            return runner

    def counting(self) -> Counting:
        """Counts from now on what becomes of this process's tasks."""
        if self._counting is None:
            self._counting = Counting()
            self._delays.events.subscribe(self._counting)
        return self._counting

    def _finish(self, **_: Any) -> None:
        """Rows that run side by side may be left when all chunks are over."""
        for runner in list(self._runners.values()):
            runner.finish()

    def row_events(self) -> TaskEvents:
        settings = self._delays.settings
        shows_bodies = settings.event_bodies and not settings.encryption_keys
        return TaskEvents(
            self._delays.celery, self.hostname, settings.publish_limit_s, shows_bodies
        )

    def _make_runner(self, number: int) -> Runner:
        # Most producers run no tasks, so they do not import what runs them.
        from delaytasks.execution.pause_filter import PauseFilter
        from delaytasks.execution.runner import Runner
        from delaytasks.worker.celery_context import CeleryTaskContext

        delays = self._delays
        shard = delays.shards[number]
        address = own_address(shard.store.database.url.host)
        claims = shard.store.claims(
            self.name(os.getpid()), address, lambda: shard.policies.current().limited
        )
        task_context = CeleryTaskContext(
            delays.celery, self.hostname, shard.clock, delays.around, self.keeps_time_limits
        )
        return Runner(
            delays.settings,
            claims,
            shard.clock,
            delays.registry,
            delays.inline_timer,
            delays.events,
            task_context,
            delays.transaction_for,
            PauseFilter(shard.policies, shard.store.holding, delays.events),
            # Who runs tasks without a worker runs them without limits.
            keeps_time_limits=self.keeps_time_limits or not self.is_worker,
            thread_slots=self._thread_slots,
            renewed_at=partial(self.renewals.last, number),
            may_leave=self.is_worker
            and self.leaves_rows,  # a worker's main process renews their leases
            kept=task_context.kept,
            watcher=lambda: self._rows if self._sends_events else None,
        )


def own_address(toward: str | None) -> int | None:
    """This host's IPv4 address as a number, as seen from the database's side; None where there is only IPv6."""
    try:
        # A connected datagram socket sends nothing: it only asks which way the packets would go.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((toward or "127.0.0.1", 9))
            return int.from_bytes(socket.inet_aton(probe.getsockname()[0]), "big")
    except OSError:
        return None
