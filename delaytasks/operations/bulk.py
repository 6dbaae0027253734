"""Cancels, reschedules or retries all tasks that a filter matches, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.core.actors import actor_of
from delaytasks.core.bulk import AuditEntry, BulkResult, Filter, Filters, OnProgress, filter_of
from delaytasks.core.errors import InvalidScheduleError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.inputs import check_limit
from delaytasks.core.interfaces import To

if TYPE_CHECKING:
    from delaytasks.scheduling.bulk import BulkRun
    from delaytasks.sharding.shard import Shard
    from delaytasks.wiring import Router


class BulkOperations:
    def __init__(self, router: Router, events: Events) -> None:
        self._router = router
        self._events = events

    def cancel(
        self,
        filters: Filters,
        everything: bool,
        dry_run: bool,
        actor: str | None,
        on_progress: OnProgress | None,
    ) -> BulkResult:
        which = filter_of("cancel", filters, everything)
        return self._run(which, lambda _: None, dry_run, actor, on_progress)

    def reschedule(
        self,
        filters: Filters,
        delay: float | timedelta | None,
        when: datetime | None,
        by: float | timedelta | None,
        everything: bool,
        dry_run: bool,
        actor: str | None,
        on_progress: OnProgress | None,
    ) -> BulkResult:
        if (delay is not None) + (when is not None) + (by is not None) != 1:
            raise InvalidScheduleError(
                "give a delay, an instant (when) or a shift (by), one of the three"
            )

        def to(shard: Shard) -> To:
            if by is not None:
                return shard.producer.shift_of(by)
            return shard.producer.due_of(delay, when)

        which = filter_of("reschedule", filters, everything)
        return self._run(which, to, dry_run, actor, on_progress)

    def retry(
        self,
        filters: Filters,
        delay: float | timedelta,
        everything: bool,
        dry_run: bool,
        actor: str | None,
        on_progress: OnProgress | None,
    ) -> BulkResult:
        which = filter_of("retry", filters, everything)
        return self._run(
            which, lambda shard: shard.producer.due_of(delay), dry_run, actor, on_progress
        )

    def audit(self, limit: int) -> list[AuditEntry]:
        check_limit(limit)
        found = [entry for shard in self._router.shards for entry in shard.store.bulk.audit(limit)]
        return sorted(found, key=lambda entry: entry.started_at, reverse=True)[:limit]

    def _run(
        self,
        which: Filter,
        to: Callable[[Shard], To],
        dry_run: bool,
        actor: str | None,
        on_progress: OnProgress | None,
    ) -> BulkResult:
        """Find the tasks of every shard, then move them. A shard that is down is left out."""
        who = actor_of(actor)
        runs: dict[int, BulkRun] = {}
        shards, missing = self._router.shards, dict[int, StoreUnavailableError]()

        @contextmanager
        def unless_down(number: int) -> Iterator[None]:
            try:
                yield
            except StoreUnavailableError as error:
                missing[number] = error
                if len(missing) == len(shards):
                    raise

        def so_far() -> BulkResult:
            return _sum([run.result for run in runs.values()], tuple(missing))

        def report() -> None:
            if on_progress is not None:
                on_progress(so_far())

        for number, shard in enumerate(shards):
            with unless_down(number):
                run = self._bulk_run(shard, which, to(shard))
                run.find()
                runs[number] = run
        for number, run in runs.items() if not dry_run else ():
            with unless_down(number):
                run.move(shards[number].new_id(), who, report)
        return so_far()

    def _bulk_run(self, shard: Shard, which: Filter, to: To) -> BulkRun:
        from delaytasks.scheduling.bulk import BulkRun

        return BulkRun(
            shard.store.bulk, shard.producer, self._events, shard.number, which, to, shard.retry
        )


def _sum(results: Sequence[BulkResult], missing: tuple[int, ...]) -> BulkResult:
    return BulkResult(
        sum(each.matched for each in results),
        sum(each.changed for each in results),
        sum(each.refused for each in results),
        min(each.started for each in results),
        tuple(id for each in results for id in each.runs),
        missing,
    )
