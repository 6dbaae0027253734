"""Sweeps a shard in a thread of the worker's main process, never behind busy pool processes: when beat's message asks
for it, or when nobody swept for a while."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from delaytasks.core.clock import monotonic
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.loop import Loop
from delaytasks.core.text import DEFER_MAX_S
from delaytasks.maintenance.sweeper import DIRECT, DRAIN, SILENT_SWEEPS
from delaytasks.worker.contact import Contact
from delaytasks.worker.database_pace import DatabasePace

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.sharding.shard import Shard

#: How often a worker asks whether somebody swept. Without beat a sweep comes so much after `self_sweep_s` at most.
CHECK_S = 1.0


class SweepLoop:
    def __init__(self, delays: DelayTasks, shard: Shard, worker: Any) -> None:
        self._delays = delays
        self._shard = shard
        self._worker = worker
        self._lock = threading.Lock()
        self._asked: set[int] = set()
        self._forgets = threading.Event()
        self._seen_at = self._checked_at = float("-inf")
        self._started_at = monotonic()
        self._has_begun = False
        self._pace = DatabasePace(delays.events, shard.number)
        # The loop asks the database about once in `sweep_s`, and rests for up to a second besides.
        self._contact = Contact(SILENT_SWEEPS * delays.settings.sweep_s / 2 + 1)
        self._workers: set[tuple[str, object]] = set()
        #: Whether this worker looks for what is near itself, and is counted among those who do.
        self._is_direct = delays.settings.timer == "direct" and getattr(worker, "looks", True)
        self._kind = (
            DIRECT if self._is_direct else DRAIN if delays.settings.timer == "direct" else ""
        )
        #: Nobody need ask for sweeps where there is no broker.
        self._patience_s = (
            delays.settings.sweep_s if self._is_direct else delays.settings.self_sweep_s
        )
        # A statement on a big table may take its time; what consists of many says after each that it goes on.
        stuck_s = 2 * delays.settings.self_sweep_s
        self.loop = Loop(shard.named("sweep"), self._turn, delays.events, stuck_s, shard.close)

    def request(self, house: int | None) -> None:
        with self._lock:
            self._asked.update(range(self._delays.settings.houses) if house is None else [house])
        self.loop.wake()

    def forget(self) -> None:
        """The broker was away: what waited in it may be lost, and is armed again by the next sweep."""
        self._forgets.set()
        self.loop.wake()

    def stop(self) -> None:
        self.loop.stop()
        try:
            self._shard.store.workers.gone(self._worker.hostname)
        except Exception as error:
            self._delays.events.emit(
                "loop.failed", loop=self.loop.name, error=str(error), cause=error
            )

    def _turn(self) -> float:
        """What fails is told, tried again at the next turn, and keeps nothing else from being done."""
        attempt, settings = (
            partial(self._delays.events.attempt, self.loop.name),
            self._delays.settings,
        )
        if monotonic() - self._seen_at >= settings.sweep_s and not attempt("seen", self._tell_seen):
            self._contact.failed()
        # Those who read by themselves begin with that.
        begin = partial(self._shard.sweeper.begin, self._delays.processes.queues)
        self._has_begun = self._has_begun or bool(self._kind) or attempt("begin", begin)
        if self._forgets.is_set():
            attempt("forget", self._forget_armed)
        with self._lock:
            asked, self._asked = self._asked, set()
        for house in sorted(asked):
            if not attempt(f"house {house}", partial(self._sweep, house)):
                self._contact.failed()
                with self._lock:
                    self._asked.add(house)
        is_due = monotonic() - self._checked_at >= min(CHECK_S, self._patience_s / 2)
        if is_due and not attempt("stale", self._sweep_stale):
            self._contact.failed()
        return min(settings.sweep_s, 1.0)

    def _sweep(self, house: int) -> None:
        self._shard.sweeper.sweep(house, self._go_on, self._contact.seconds)

    def _go_on(self) -> None:
        """Called at each step of a sweep, after the database has answered."""
        self.loop.beat()
        self._contact.answered()

    def _tell_seen(self) -> None:
        delays, pool = self._delays, self._worker.pool
        began = monotonic()
        self._shard.store.workers.seen(
            self._worker.hostname,
            delays.processes.queues,
            self._kind + type(pool).__module__.rpartition(".")[2],
            int(pool.limit or 1),
            int(self._shard.clock.offset_s * 1e6),
            [processor.tag for processor in delays.registry],
        )
        self._seen_at = monotonic()
        self._contact.answered()
        self._pace.took(self._seen_at - began)
        workers = {
            (worker["name"], worker["started_at"]) for worker in self._shard.store.workers.alive()
        }
        if (
            workers != self._workers
        ):  # one that begins, or is left alone, may be the first one that knows a tag
            self._bring_forward()
            self._workers = workers

    def _bring_forward(self) -> None:
        """What others put off since they had no processor for it need not wait for us."""
        delays = self._delays
        keeps_all = delays.processes.keeps_time_limits
        tags = [each.tag for each in delays.registry if keeps_all or not each.has_time_limits]
        queues = None if ALL_QUEUES in delays.processes.queues else delays.processes.queues
        entries = self._shard.store.deferred_rows.bring_forward(tags, queues, DEFER_MAX_S)
        if entries:
            delays.events.emit("task.brought_forward", count=len(entries), shard=self._shard.number)
            delays.inline_timer.arm(entries)

    def _forget_armed(self) -> None:
        self._forgets.clear()  # first: the broker may go away again meanwhile
        try:
            self._shard.store.sweeps.forget_armed()
        except Exception:
            self._forgets.set()
            raise

    def _sweep_stale(self) -> None:
        delays, settings = self._delays, self._delays.settings
        for house in self._shard.store.sweeps.stale_houses(settings.houses, self._patience_s):
            if not self._is_direct and monotonic() - self._started_at > settings.self_sweep_s:
                delays.events.emit(
                    "sweep.self",
                    house=house,
                    shard=self._shard.number,
                    remedy="is celery beat running, and does the broker answer?",
                )
            self._sweep(house)
        self._checked_at = monotonic()
