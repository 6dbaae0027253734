"""Cancels, reschedules or reruns all tasks that a filter matches."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from delaytasks.core.actors import actor_of
from delaytasks.core.bulk import (
    AuditEntry,
    BulkOptions,
    BulkResult,
    OnProgress,
    bulk_filter_of,
)
from delaytasks.core.durations import Delay
from delaytasks.core.errors import InvalidQueryError, InvalidScheduleError
from delaytasks.core.filters import Filters
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import check_page_limit
from delaytasks.core.interfaces import To
from delaytasks.core.states import Status
from delaytasks.operations.bulk_run import BulkRun

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

#: An operation whose last step is older has ended, since its process died.
RUNNING_S = 60.0
_NO_FILTERS = BulkOptions.__annotations__.keys() - Filters.__annotations__.keys()


class BulkOperations:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._store = runtime.store.bulk

    def cancel(self, options: BulkOptions) -> BulkResult:
        return self._run("cancel", None, options)

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

        producer = self._runtime.producer
        to: To
        if spread is not None:
            to = producer.spread_of(spread)
        elif by is not None:
            to = producer.shift_of(by)
        else:
            to = producer.due_of(delay, at)
        return self._run("reschedule", to, options)

    def rerun(self, delay: Delay | None, audit: object, options: BulkOptions) -> BulkResult:
        producer = self._runtime.producer
        if audit is None:
            return self._run("rerun", producer.due_of(0 if delay is None else delay), options)
        options = {**options, "status": options.get("status") or Status.CANCELLED}
        to = timedelta() if delay is None else producer.due_of(delay)
        return self._run("rerun", to, options, self._cancel_of(audit))

    def _cancel_of(self, audit: object) -> AuditEntry:
        """Return the entry of a cancel of many tasks that has ended."""
        id = check_id(audit.id if isinstance(audit, AuditEntry) else audit)
        entry = self._store.audited(id)
        if entry is None:
            raise InvalidQueryError(f"there is no audit entry {id}; it may have been purged")
        if entry.action != "cancel":
            raise InvalidQueryError(
                f"audit entry {id} is of the operation {entry.action!r}; only the tasks of a "
                "cancel can be rerun by their audit entry"
            )
        is_recent = self._runtime.clock.now() - entry.seen_at < timedelta(seconds=RUNNING_S)
        if entry.state == "running" and is_recent:
            raise InvalidQueryError(
                f"audit entry {id} is of an operation that still runs: wait until it has ended"
            )
        return entry

    def audit(self, limit: int, before: int | None = None) -> list[AuditEntry]:
        """Return the newest entries, or those older than the entry `before`.

        The order is that of the ids, which contain the time in milliseconds.
        """
        check_page_limit(limit)
        return self._store.audit(limit, before)

    def record(
        self,
        action: str,
        what: dict[str, Any],
        actor: str,
        *,
        is_refused: bool = False,
        task: int | None = None,
    ) -> None:
        """Write an audit entry about one action of a person, such as a pause."""
        now, refused = self._runtime.clock.now(), int(is_refused)
        state = "failed" if is_refused else "done"
        id = self._runtime.new_id()
        self._store.begin(
            AuditEntry(id, action, what, actor, state, now, now, now, 1, 1 - refused, refused)
        )

    def _run(
        self,
        move: str,
        to: To,
        options: BulkOptions,
        cancelled: AuditEntry | None = None,
    ) -> BulkResult:
        """Find the tasks, then move them.

        With `cancelled`, the tasks are those that this operation has cancelled.
        """
        filters = {name: value for name, value in options.items() if name not in _NO_FILTERS}
        which = bulk_filter_of(move, filters, options.get("everything", False))
        who = actor_of(options.get("actor"))
        run = BulkRun(self._runtime, which, to, cancelled)
        run.find()
        if not options.get("dry_run"):
            self._move(run, who, options.get("on_progress"))
        return run.result

    def _move(self, run: BulkRun, who: str, on_progress: OnProgress | None) -> None:
        def report() -> None:
            if on_progress is not None:
                on_progress(run.result)

        run.move(self._runtime.new_id(), who, report)
