"""Sweeps in a thread of the worker's main process, so that no sweep waits for the pool.

It sweeps when a message of beat requests it, or when no worker has swept for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from delaytasks.loops import Loop
from delaytasks.maintenance.sweeper import ONLY_DRAINING_PREFIX, POLLING_PREFIX
from delaytasks.model.clock import monotonic
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.interfaces import Timer
from delaytasks.model.text import DEFER_MAX_S
from delaytasks.model.workers import ServiceTimes
from delaytasks.settings import SILENT_SWEEPS

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime


#: How often a worker looks for sweep partitions that no worker swept. Without beat a sweep comes at
#: most this much later than `self_sweep_s`.
STALE_CHECK_S = 1.0
#: The longest rest between two turns of the loop.
SWEEP_LOOP_REST_S = 1.0
#: How often a worker with declarations compares them with the table.
FOLLOW_S = 60.0


class ServiceWatch:
    """Records when a worker lost a service, for the worker's row.

    Each attribute is written as a whole, so that several threads may use it.

    Parameters
    ----------
    timer
        The timer of the worker.
    check_timer
        Lets a timer that is down try its server, since an idle worker arms nothing.
    """

    def __init__(self, timer: Timer, check_timer: Callable[[], object]) -> None:
        self._timer = timer
        self._check_timer = check_timer
        self._broker_lost_at: float | None = None
        self._timer_lost_at: float | None = None
        self._beat_at = monotonic()

    def mark_broker_lost(self) -> None:
        if self._broker_lost_at is None:
            self._broker_lost_at = monotonic()

    def mark_broker_back(self) -> None:
        if self._broker_lost_at is not None:
            self._beat_at = monotonic()  # no message of beat could arrive in the meantime
        self._broker_lost_at = None

    def mark_beat(self) -> None:
        """Record a message of beat."""
        self._beat_at = monotonic()

    def times(self, reads_beat: bool) -> ServiceTimes:
        """Return the present times. `reads_beat`: the worker consumes beat's messages."""
        if not self._timer.is_up:
            self._check_timer()
        now = monotonic()
        if self._timer.is_up:
            self._timer_lost_at = None
        elif self._timer_lost_at is None:
            self._timer_lost_at = now
        broker_lost_at, timer_lost_at = self._broker_lost_at, self._timer_lost_at
        return ServiceTimes(
            None if broker_lost_at is None else now - broker_lost_at,
            None if timer_lost_at is None else now - timer_lost_at,
            now - self._beat_at if reads_beat else None,
        )


class DatabaseContact:
    """Measures for how long this process has reached the database without an interruption.

    A process that did not reach the database cannot tell a worker that died from one that could
    not report. A process that was suspended cannot tell either.
    """

    def __init__(self, gap_s: float) -> None:
        """After `gap_s` without an answer the contact begins anew."""
        self._gap_s = gap_s
        self._since = self._answered_at = float("-inf")

    def mark_answered(self) -> None:
        now = monotonic()
        if now - self._answered_at > self._gap_s:
            self._since = now
        self._answered_at = now

    def mark_failed(self) -> None:
        self._answered_at = float("-inf")

    @property
    def seconds(self) -> float:
        now = monotonic()
        return 0.0 if now - self._answered_at > self._gap_s else now - self._since


class SweepLoop:
    """The sweeps of a worker.

    If the worker polls the table it looks for near tasks in the table itself, and counts as one of
    the workers that share them.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker
        self._runtime = runtime = worker.runtime
        self._store = runtime.store
        self._settings = settings = runtime.settings
        self._events = runtime.events
        self._processes = worker.processes
        self._lock = threading.Lock()
        self._requested: set[int] = set()
        self._must_forget = threading.Event()
        self._reported_at = self._checked_at = self._own_drains_at = float("-inf")
        self._followed_at: float | None = None
        self._started_at = monotonic()
        # The loop asks the database about once in `sweep_s`, and rests for up to a second more.
        self._contact = DatabaseContact(SILENT_SWEEPS * settings.sweep_s / 2 + SWEEP_LOOP_REST_S)
        self._workers: set[tuple[str, object]] = set()
        self._polls_table = worker.polls_table and not settings.uses_broker
        without_broker = POLLING_PREFIX if self._polls_table else ONLY_DRAINING_PREFIX
        self._pool_prefix = "" if settings.uses_broker else without_broker
        #: Without a broker no message can request a sweep, so none is waited for.
        self._patience_s = settings.sweep_s if self._polls_table else settings.self_sweep_s
        # One statement on a large table may take long. A stage of many reports its progress.
        stuck_s = 2 * settings.self_sweep_s
        self.loop = Loop("sweep", self._turn, self._events, stuck_s, self._store.close)

    def request(self, sweep_partition: int | None) -> None:
        """Sweep this sweep partition soon, or all of them."""
        every = range(self._settings.sweep_partitions)
        with self._lock:
            self._requested.update(every if sweep_partition is None else [sweep_partition])
        self.loop.wake()

    def forget_armed(self) -> None:
        """Make the next sweep arm all near tasks again, since the timer may have lost some."""
        self._must_forget.set()
        self.loop.wake()

    def stop(self) -> None:
        self.loop.stop()
        hostname = self._worker.celery_worker.hostname
        self._events.attempt("sweep", "sign off", lambda: self._store.workers.remove(hostname))

    def _turn(self) -> float:
        """Take one turn. A stage that fails is repeated in the next turn and stops no other one."""
        attempt = partial(self._events.attempt, "sweep")
        is_due = monotonic() - self._reported_at >= self._settings.sweep_s
        if is_due and not attempt("report", self._report_alive):
            self._contact.mark_failed()
        # A worker without a broker looks for overdue tasks anyway.
        is_due = monotonic() - self._own_drains_at >= self._settings.self_sweep_s
        if is_due and self._settings.uses_broker:
            attempt("own queues", self._start_own_drains)
        if self._must_forget.is_set():
            attempt("forget", self._forget_armed_rows)
        with self._lock:
            requested, self._requested = self._requested, set()
        for sweep_partition in sorted(requested):
            if not attempt(
                f"sweep partition {sweep_partition}", partial(self._sweep, sweep_partition)
            ):
                self._contact.mark_failed()
                with self._lock:
                    self._requested.add(sweep_partition)
        is_due = monotonic() - self._checked_at >= min(STALE_CHECK_S, self._patience_s / 2)
        if is_due and not attempt("stale", self._sweep_stale):
            self._contact.mark_failed()
        if self._followed_at is None or monotonic() - self._followed_at >= FOLLOW_S:
            attempt("recurring", self._follow_declared_schedules)
        return min(self._settings.sweep_s, SWEEP_LOOP_REST_S)

    def _sweep(self, sweep_partition: int) -> None:
        self._runtime.sweeper.sweep(
            sweep_partition, self._note_answer, self._contact.seconds, self._start_drain
        )

    def _start_own_drains(self) -> None:
        """Start drains of this worker's overdue queues, at its start and then every `self_sweep_s`.

        Without a broker, the worker that sweeps can drain only the queues that it serves itself.
        """
        self._runtime.sweeper.start_own_drains(self._processes.queues, self._start_drain)
        self._own_drains_at = monotonic()

    def _start_drain(self, queue: str, priorities: Sequence[int]) -> bool:
        """Start a drain in this worker; return False if the worker does not serve it."""
        is_served = queue in self._processes.queues
        if is_served:
            self._worker.dispatcher.start_drain(queue, priorities)
        return is_served

    def _note_answer(self) -> None:
        """Called at each step of a sweep, after the database has answered."""
        self.loop.report_progress()
        self._contact.mark_answered()

    def _report_alive(self) -> None:
        """Write this worker's row, and read which workers are alive."""
        store, settings, celery_worker = self._store, self._settings, self._worker.celery_worker
        reads_beat = settings.uses_broker and settings.default_queue in self._processes.queues
        services = self._worker.service_watch.times(reads_beat)
        store.workers.report(
            celery_worker.hostname,
            self._processes.queues,
            self._pool_prefix + type(celery_worker.pool).__module__.rpartition(".")[2],
            int(celery_worker.pool.limit or 1),
            int(self._runtime.clock.offset_s * 1e6),
            [processor.tag for processor in self._runtime.registry],
            services,
            len(self._worker.dispatcher.in_flight),
        )
        self._reported_at = monotonic()
        self._contact.mark_answered()
        workers = {(worker["name"], worker["started_at"]) for worker in store.workers.all()}
        if workers != self._workers:
            # A worker that begins, or that is left alone, may be the first one that knows a tag.
            self._bring_forward()
            self._workers = workers

    def _bring_forward(self) -> None:
        """Bring forward the rows that other workers deferred, and that this one can run."""
        served = self._processes.queues
        queues = None if ALL_QUEUES in served else served
        keeps_all = self._processes.keeps_time_limits
        tags = [
            each.tag for each in self._runtime.registry if keeps_all or not each.has_time_limits
        ]
        entries = self._store.deferred_rows.bring_forward(tags, queues, DEFER_MAX_S)
        if entries:
            self._events.emit("task.brought_forward", count=len(entries))
            self._runtime.timer.arm(entries)

    def _forget_armed_rows(self) -> None:
        self._must_forget.clear()  # first, since the broker may fail again meanwhile
        try:
            self._store.sweeps.forget_armed()
        except Exception:
            self._must_forget.set()
            raise

    def _sweep_stale(self) -> None:
        """Sweep the sweep partitions that no worker has swept for a while."""
        settings, sweeps = self._settings, self._store.sweeps
        # While the database was away, sweeps that beat requested failed as well. After a start,
        # beat sends its first message up to a sweep interval later.
        is_beat_silent = (
            self._contact.seconds > settings.self_sweep_s
            and monotonic() - self._started_at > settings.self_sweep_s + settings.sweep_s
        )
        stale = sweeps.stale_sweep_partitions(settings.sweep_partitions, self._patience_s)
        for sweep_partition in stale:
            if is_beat_silent and not self._polls_table:
                self._events.emit(
                    "sweep.self",
                    sweep_partition=sweep_partition,
                    remedy="is celery beat running, does the broker answer, and does a worker "
                    "serve the default queue of delaytasks (-Q)?",
                )
            self._sweep(sweep_partition)
        self._checked_at = monotonic()

    def _follow_declared_schedules(self) -> None:
        """Compare the declared schedules with the table.

        Load the package of recurring schedules only if code declares or has declared one.
        """
        is_first, schedules = self._followed_at is None, self._store.due_schedules
        if self._runtime.registry.schedules or (is_first and schedules.has_declared()):
            from delaytasks.recurring.recurring import follow

            follow(self._runtime)
        self._followed_at = monotonic()
