"""Cancels, reschedules or reruns all tasks that a filter matches, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from delaytasks.core.actors import actor_of
from delaytasks.core.bulk import (
    AuditEntry,
    BulkOptions,
    BulkResult,
    bulk_filter_of,
)
from delaytasks.core.durations import Delay
from delaytasks.core.errors import InvalidQueryError, InvalidScheduleError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.filters import Filters
from delaytasks.core.ids import check_id, shard_of
from delaytasks.core.inputs import check_page_limit
from delaytasks.core.interfaces import To
from delaytasks.core.states import Status
from delaytasks.operations.bulk_run import BulkRun

if TYPE_CHECKING:
    from delaytasks.routing.shard import Shard
    from delaytasks.sharding.router import Router

#: An operation whose last step is older has ended, since its process died.
RUNNING_S = 60.0
_NO_FILTERS = BulkOptions.__annotations__.keys() - Filters.__annotations__.keys()


class BulkOperations:
    def __init__(self, router: Router, events: Events) -> None:
        self._router = router
        self._events = events

    def cancel(self, options: BulkOptions) -> BulkResult:
        return self._run("cancel", lambda _: None, options)

    def reschedule(
        self,
        delay: Delay | None,
        at: datetime | None,
        by: Delay | None,
        spread: Delay | None,
        options: BulkOptions,
    ) -> BulkResult:
        if [delay, at, by, spread].count(None) != 3:
            raise InvalidScheduleError(
                "give a delay, an instant (at), a shift (by) or a period (spread), one of the four"
            )

        def to(shard: Shard) -> To:
            if spread is not None:
                return shard.producer.spread_of(spread)
            if by is not None:
                return shard.producer.shift_of(by)
            return shard.producer.due_of(delay, at)

        return self._run("reschedule", to, options)

    def rerun(self, delay: Delay | None, audit: object, options: BulkOptions) -> BulkResult:
        if audit is None:
            return self._run(
                "rerun", lambda shard: shard.producer.due_of(0 if delay is None else delay), options
            )
        options = {**options, "status": options.get("status") or Status.CANCELLED}

        def to(shard: Shard) -> To:
            return timedelta() if delay is None else shard.producer.due_of(delay)

        return self._run("rerun", to, options, self._cancel_of(audit))

    def _cancel_of(self, audit: object) -> AuditEntry:
        """Return the entry of a cancel of many tasks that has ended."""
        id = check_id(audit.id if isinstance(audit, AuditEntry) else audit)
        shard = self._shard(id)
        entry = shard.store.bulk.audited(id)
        if entry is None:
            raise InvalidQueryError(f"there is no audit entry {id}; it may have been purged")
        if entry.action != "cancel":
            raise InvalidQueryError(
                f"audit entry {id} is of the operation {entry.action!r}; only the tasks of a "
                "cancel can be rerun by their audit entry"
            )
        is_recent = shard.clock.now() - entry.seen_at < timedelta(seconds=RUNNING_S)
        if entry.state == "running" and is_recent:
            raise InvalidQueryError(
                f"audit entry {id} is of an operation that still runs: wait until it has ended"
            )
        return entry

    def _shard(self, id: int) -> Shard:
        """Return the shard that an id names, or else the first one."""
        shards, number = self._router.shards, shard_of(id)
        return shards[number] if number < len(shards) else shards[0]

    def audit(self, limit: int, before: int | None = None) -> list[AuditEntry]:
        """Return the newest entries, or those older than the entry `before`.

        The order is that of the ids, which contain the time in milliseconds.
        """
        check_page_limit(limit)
        stores = [shard.store.bulk for shard in self._router.shards]
        found = [entry for store in stores for entry in store.audit(limit, before)]
        return sorted(found, key=lambda entry: entry.id, reverse=True)[:limit]

    def record(
        self,
        action: str,
        what: dict[str, Any],
        actor: str,
        *,
        is_refused: bool = False,
        task: int | None = None,
    ) -> None:
        """Write an audit entry about one action of a person, such as a pause.

        The entry is in the database of the task with the id `task`, or else in the first one.
        """
        shard = self._shard(task or 0)
        now, refused = shard.clock.now(), int(is_refused)
        state = "failed" if is_refused else "done"
        shard.store.bulk.begin(
            AuditEntry(
                shard.new_id(), action, what, actor, state, now, now, now, 1, 1 - refused, refused
            )
        )

    def _run(
        self,
        move: str,
        to: Callable[[Shard], To],
        options: BulkOptions,
        cancelled: AuditEntry | None = None,
    ) -> BulkResult:
        """Find the tasks of every shard, then move them. A shard that is down is left out.

        With `cancelled`, the tasks are those that this operation has cancelled.
        """
        filters = {name: value for name, value in options.items() if name not in _NO_FILTERS}
        which = bulk_filter_of(move, filters, options.get("everything", False))
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

        searched = shards if cancelled is None else [self._shard(cancelled.id)]
        for shard in searched:
            number = shard.number
            with unless_down(number):
                run = BulkRun(shard, which, to(shard), self._events, cancelled)
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
