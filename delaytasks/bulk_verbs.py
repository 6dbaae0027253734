"""The verbs for many tasks that have something in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from delaytasks.core.actors import actor_of
from delaytasks.core.bulk import AuditEntry, BulkResult, Filter, Filters, filter_of
from delaytasks.core.errors import InvalidScheduleError, StoreUnavailableError
from delaytasks.core.inputs import check_limit
from delaytasks.core.interfaces import To
from delaytasks.verbs import Verbs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.scheduling.bulk import BulkRun
    from delaytasks.sharding.shard import Shard

OnProgress = Callable[[BulkResult], object]


class BulkVerbs(Verbs):
    """All of them find the tasks first, then move them in steps of some hundreds, each a short transaction of its own;
    what a worker or somebody else moves meanwhile is left as it is, and counted.

    The filter is `tag`, `key_prefix`, `status`, `queue`, `since` and `until` (due times), `created_since` and
    `created_until`, `updated_until`; with none of them `everything=True` must be said. `dry_run` only counts.
    `on_progress` is called after each step, with what is done so far. `actor` is who the audit row names, if not the
    user of this process. Run again after whatever stopped it, it goes on.
    """

    def cancel_many(
        self,
        *,
        everything: bool = False,
        dry_run: bool = False,
        actor: str | None = None,
        on_progress: OnProgress | None = None,
        **filters: Unpack[Filters],
    ) -> BulkResult:
        """Cancels the tasks that wait, of those that the filter names."""
        which = filter_of("cancel", filters, everything)
        return self._many(which, lambda _: None, dry_run, actor, on_progress)

    def reschedule_many(
        self,
        delay: float | timedelta | None = None,
        *,
        when: datetime | None = None,
        by: float | timedelta | None = None,
        everything: bool = False,
        dry_run: bool = False,
        actor: str | None = None,
        on_progress: OnProgress | None = None,
        **filters: Unpack[Filters],
    ) -> BulkResult:
        """Gives the tasks that wait, of those that the filter names, another time: all of them `delay` seconds from now
        or the instant `when`, or each `by` so many seconds later (earlier, if negative) than it is due now.

        To go on with a `by` that was stopped, say `updated_until=result.started`, or it shifts some of them twice.
        """
        if (delay is not None) + (when is not None) + (by is not None) != 1:
            raise InvalidScheduleError(
                "give a delay, an instant (when) or a shift (by), one of the three"
            )
        which = filter_of("reschedule", filters, everything)
        if by is not None:
            return self._many(
                which, lambda shard: shard.producer.shift_of(by), dry_run, actor, on_progress
            )
        return self._many(
            which, lambda shard: shard.producer.due_of(delay, when), dry_run, actor, on_progress
        )

    def retry_many(
        self,
        delay: float | timedelta = 0,
        *,
        everything: bool = False,
        dry_run: bool = False,
        actor: str | None = None,
        on_progress: OnProgress | None = None,
        **filters: Unpack[Filters],
    ) -> BulkResult:
        """Runs the FAILED tasks that the filter names again, `delay` seconds from now; with `status="CANCELLED"` those
        that were cancelled. Refused are those whose key another task has by now."""
        which = filter_of("retry", filters, everything)
        return self._many(
            which, lambda shard: shard.producer.due_of(delay), dry_run, actor, on_progress
        )

    def audit(self, *, limit: int = 100) -> list[AuditEntry]:
        """What the bulk verbs did, the newest first: who, which tasks, how many, and how far it came."""
        check_limit(limit)
        found = [entry for shard in self.routes.shards for entry in shard.store.bulk.audit(limit)]
        return sorted(found, key=lambda entry: entry.started_at, reverse=True)[:limit]

    # -- inside -----------------------------------------------------------------------------------

    def _many(
        self,
        which: Filter,
        to: Callable[[Shard], To],
        dry_run: bool,
        actor: str | None,
        on_progress: OnProgress | None,
    ) -> BulkResult:
        """Shard by shard: one that is down is told, and the others are done."""
        who = actor_of(actor)
        runs: dict[int, BulkRun] = {}
        shards, missing = self.routes.shards, dict[int, StoreUnavailableError]()

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

        def tell() -> None:
            if on_progress is not None:
                on_progress(so_far())

        for number, shard in enumerate(shards):
            with unless_down(number):
                run = self._run(shard, which, to(shard))
                run.find()
                runs[number] = run
        for number, run in runs.items() if not dry_run else ():
            with unless_down(number):
                run.move(shards[number].new_id(), who, tell)
        return so_far()

    def _run(self, shard: Shard, which: Filter, to: To) -> BulkRun:
        from delaytasks.scheduling.bulk import BulkRun

        retry = partial(self.routes.databases.retry, shard.number)
        return BulkRun(
            shard.store.bulk, shard.producer, self.events, shard.number, which, to, retry
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
