"""Makes forecasts: reads what is due and who is there, and keeps the last results for a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.core.clock import monotonic
from delaytasks.core.durations import Delay
from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.inputs import check_wait
from delaytasks.forecast.combining import ShardForecastInput, combined
from delaytasks.forecast.due_counts import DueCounts
from delaytasks.forecast.measured import measured_durations
from delaytasks.forecast.queries import DueTable
from delaytasks.forecast.question import DAY_S, Question, checked
from delaytasks.forecast.rates import Rates
from delaytasks.forecast.result import Forecast

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.runtime import Runtime as Shard

#: Forecasts that are kept, for callers that accept an older one.
KEPT = 16


class ForecastOperations:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._registry = runtime.registry
        #: The number of processes of a worker, if none is alive and the caller gives no number.
        self._processes = runtime.celery.conf.worker_concurrency
        self._lock = threading.Lock()
        self._kept: dict[Hashable, tuple[float, Forecast]] = {}

    def forecast(
        self,
        days: float,
        tag: str | None,
        workers: int | None,
        processes: int | None,
        rate: float | None,
        target: Delay,
        step: Delay,
        max_age: Delay,
    ) -> Forecast:
        question = checked(days, tag, workers, processes, rate, target, step)
        max_age_s = check_wait(max_age, DAY_S, "max_age")
        # One forecast at a time: callers that come together get the same result.
        with self._lock:
            kept = self._kept.get(question)
            if kept is not None and monotonic() - kept[0] <= max_age_s:
                return kept[1]
            made = self._make(question)
            self._kept.pop(question, None)
            self._kept[question] = (monotonic(), made)
            while len(self._kept) > KEPT:
                self._kept.pop(next(iter(self._kept)))
            return made

    def of_next_week(self) -> Forecast:
        """Make a forecast with the defaults of `DelayTasks.forecast`."""
        return self.forecast(7, None, None, None, None, target=60, step=3600, max_age=0)

    # -- read -------------------------------------------------------------------------------------

    def _make(self, question: Question) -> Forecast:
        now = self._now()
        until = now + timedelta(days=question.days)
        found, missing = self._ask(now, until)
        shards = [each for each in self._runtime.shards if each.number not in missing]
        processes = self._processes or os.cpu_count() or 1
        return combined(
            question,
            now,
            until,
            found,
            missing,
            self._rates(found, question, _durations(shards, now)),
            processes,
        )

    def _now(self) -> datetime:
        """Return the time of the first database that can be reached."""
        *others, last = self._runtime.shards
        for shard in others:
            try:
                return shard.clock.certain_now()
            except StoreUnavailableError:
                continue
        return last.clock.certain_now()

    def _ask(
        self, now: datetime, until: datetime
    ) -> tuple[list[ShardForecastInput], tuple[int, ...]]:
        """Return what the databases have, and the numbers of those that cannot be reached."""
        found: list[ShardForecastInput] = []
        missing: list[int] = []
        for shard in self._runtime.shards:
            try:
                found.append(self._read(shard, now, until))
            except StoreUnavailableError:
                missing.append(shard.number)
                if len(missing) == len(self._runtime.shards):
                    raise
        return found, tuple(missing)

    def _read(self, shard: Shard, now: datetime, until: datetime) -> ShardForecastInput:
        store = shard.store
        due = DueTable(store.database, store.schema).counts(now, until)
        if store.due_schedules.exist((until - now).total_seconds()):
            from delaytasks.forecast.recurring_counts import recurring_counts

            more = recurring_counts(self._runtime.recurring_table, now, until)
            due = DueCounts([*due.counts, *more.counts], due.is_estimate or more.is_estimate)
        workers = store.workers.registered(now, self._settings.silent_s)
        alive = {worker.name: worker for worker in workers if worker.is_alive}
        return ShardForecastInput(due, alive, store.policies.read())

    def _rates(
        self,
        found: Sequence[ShardForecastInput],
        question: Question,
        durations: Mapping[str, float],
    ) -> Rates:
        policies = {
            policy.name: policy for one in found for policy in one.policies if policy.kind == "tag"
        }
        return Rates(self._settings, self._together, durations, question.rate, policies)

    def _together(self, tag: str) -> int:
        """Return how many tasks of a tag a process runs concurrently, or in one batch."""
        processor = self._registry.get(tag)
        return 1 if processor is None else max(processor.in_flight or 1, processor.batch or 1)


def _durations(shards: Sequence[Shard], now: datetime) -> Mapping[str, float]:
    """Return what workers have measured; nothing if a database has no tables of statistics yet."""
    try:
        return measured_durations(shards, now)
    except StoreError:
        return {}
