"""Cancels, reschedules or retries all tasks that a filter matches, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from delaytasks.core.actors import actor_of
from delaytasks.core.bulk import AuditEntry, BulkOptions, BulkResult, Filters, filter_of
from delaytasks.core.errors import InvalidScheduleError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.inputs import check_page_limit
from delaytasks.core.interfaces import To
from delaytasks.operations.bulk_run import BulkRun

if TYPE_CHECKING:
    from delaytasks.routing.shard import Shard
    from delaytasks.sharding.router import Router

_NO_FILTERS = BulkOptions.__annotations__.keys() - Filters.__annotations__.keys()


class BulkOperations:
    def __init__(self, router: Router, events: Events) -> None:
        self._router = router
        self._events = events

    def cancel(
        self,
        options: BulkOptions,
    ) -> BulkResult:
        return self._run("cancel", lambda _: None, options)

    def reschedule(
        self,
        delay: float | timedelta | None,
        when: datetime | None,
        by: float | timedelta | None,
        options: BulkOptions,
    ) -> BulkResult:
        if (delay is not None) + (when is not None) + (by is not None) != 1:
            raise InvalidScheduleError(
                "give a delay, an instant (when) or a shift (by), one of the three"
            )

        def to(shard: Shard) -> To:
            if by is not None:
                return shard.producer.shift_of(by)
            return shard.producer.due_of(delay, when)

        return self._run("reschedule", to, options)

    def retry(
        self,
        delay: float | timedelta,
        options: BulkOptions,
    ) -> BulkResult:
        return self._run("retry", lambda shard: shard.producer.due_of(delay), options)

    def audit(self, limit: int) -> list[AuditEntry]:
        check_page_limit(limit)
        found = [entry for shard in self._router.shards for entry in shard.store.bulk.audit(limit)]
        return sorted(found, key=lambda entry: entry.started_at, reverse=True)[:limit]

    def _run(self, move: str, to: Callable[[Shard], To], options: BulkOptions) -> BulkResult:
        """Find the tasks of every shard, then move them. A shard that is down is left out."""
        filters = {name: value for name, value in options.items() if name not in _NO_FILTERS}
        which = filter_of(move, filters, options.get("everything", False))
        who, on_progress = actor_of(options.get("actor")), options.get("on_progress")
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
                run = BulkRun(shard, which, to(shard), self._events)
                run.find()
                runs[number] = run
        for number, run in runs.items() if not options.get("dry_run") else ():
            with unless_down(number):
                run.move(shards[number].new_id(), who, report)
        return so_far()


def _sum(results: Sequence[BulkResult], missing: tuple[int, ...]) -> BulkResult:
    return BulkResult(
        sum(each.matched for each in results),
        sum(each.changed for each in results),
        sum(each.refused for each in results),
        min(each.started for each in results),
        tuple(id for each in results for id in each.runs),
        missing,
    )
