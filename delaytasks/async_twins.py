"""The asynchronous twins of the methods of `DelayTasks`.

`python -m tests.async_twins` writes this module from `delaytasks/client.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from delaytasks.core.policies import UNCHANGED

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from typing_extensions import Unpack

    from delaytasks.core.attempt import Attempt
    from delaytasks.core.bulk import AuditEntry, BulkOptions, BulkResult
    from delaytasks.core.cancel_result import CancelResult
    from delaytasks.core.durations import Delay
    from delaytasks.core.filters import Filters
    from delaytasks.core.interfaces import OnConflict
    from delaytasks.core.new_task import NewTask, ScheduleOptions, TaskOptions
    from delaytasks.core.page import Page
    from delaytasks.core.policies import Policy, Unchanged
    from delaytasks.core.task import DelayTask
    from delaytasks.core.touch_result import TouchResult
    from delaytasks.forecast.result import Forecast
    from delaytasks.maintenance.deploy_check import Finding


class AsyncTwins:
    """For coroutines: each method has the parameters, the result and the errors of its twin."""

    if TYPE_CHECKING:

        async def _call_async(self, name: str, /, *arguments: Any, **options: Any) -> Any: ...

        def _iterate_async(
            self, name: str, /, *arguments: Any, **options: Any
        ) -> AsyncIterator[Any]: ...

    async def aschedule_delay(
        self,
        tag: str,
        body: Any,
        delay: Delay,
        *,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayTask:
        """Schedule a task: run the processor of `tag` with `body`, `delay` from now.

        This is the asynchronous twin of `schedule_delay`.
        """
        result: DelayTask = await self._call_async(
            "schedule_delay", tag, body, delay, on_conflict=on_conflict, session=session, **options
        )
        return result

    async def aschedule_at(
        self,
        tag: str,
        body: Any,
        at: datetime,
        *,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayTask:
        """Schedule a task for an instant.

        This is the asynchronous twin of `schedule_at`.
        """
        result: DelayTask = await self._call_async(
            "schedule_at", tag, body, at, on_conflict=on_conflict, session=session, **options
        )
        return result

    async def aschedule_many(
        self,
        tasks: Iterable[NewTask | tuple[str, Any, Delay | datetime]],
        *,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        on_batch: Callable[[Sequence[DelayTask]], None] | None = None,
    ) -> int:
        """Schedule many tasks in batches of a few thousand.

        This is the asynchronous twin of `schedule_many`.
        """
        result: int = await self._call_async(
            "schedule_many", tasks, on_conflict=on_conflict, session=session, on_batch=on_batch
        )
        return result

    async def aschedule_callback(
        self,
        url: str,
        body: Any,
        delay: Delay,
        *,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> DelayTask:
        """Schedule a POST of `body` as JSON to `url`, repeated until the answer is 2xx.

        This is the asynchronous twin of `schedule_callback`.
        """
        result: DelayTask = await self._call_async(
            "schedule_callback", url, body, delay, headers=headers, **options
        )
        return result

    async def aschedule_message(
        self,
        to: str,
        body: Any,
        delay: Delay,
        *,
        exchange: str = "",
        headers: Mapping[str, str | int | float | bool] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> DelayTask:
        """Schedule a message to a broker queue, repeated until the broker has accepted it.

        This is the asynchronous twin of `schedule_message`.
        """
        result: DelayTask = await self._call_async(
            "schedule_message", to, body, delay, exchange=exchange, headers=headers, **options
        )
        return result

    async def aapply_async(
        self,
        signature: Any,
        args: Any = None,
        kwargs: Any = None,
        *,
        session: Any = None,
        **options: Any,
    ) -> Any:
        """Call a Celery task whose message waits as a row until it is due.

        This is the asynchronous twin of `apply_async`.
        """
        result: Any = await self._call_async(
            "apply_async", signature, args, kwargs, session=session, **options
        )
        return result

    async def acancel(
        self,
        task: int | str | DelayTask | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        version: int | None = None,
        strict: bool = False,
        running: bool = False,
        terminate: bool = False,
        session: Any = None,
    ) -> CancelResult:
        """Cancel a task that waits, and with `running` one that runs.

        This is the asynchronous twin of `cancel`.
        """
        result: CancelResult = await self._call_async(
            "cancel",
            task,
            tag=tag,
            key=key,
            version=version,
            strict=strict,
            running=running,
            terminate=terminate,
            session=session,
        )
        return result

    async def areschedule(
        self,
        task: int | str | DelayTask | None = None,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        tag: str | None = None,
        key: str | None = None,
        version: int | None = None,
        session: Any = None,
    ) -> DelayTask:
        """Give a task that waits another due time.

        This is the asynchronous twin of `reschedule`.
        """
        result: DelayTask = await self._call_async(
            "reschedule", task, delay, at=at, tag=tag, key=key, version=version, session=session
        )
        return result

    async def atouch(
        self,
        task: int | str | DelayTask | None = None,
        delay: Delay | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        session: Any = None,
    ) -> TouchResult[int] | TouchResult[str]:
        """Postpone a timeout: the task is due `delay` from now, unless it is due later already.

        This is the asynchronous twin of `touch`.
        """
        result: TouchResult[int] | TouchResult[str] = await self._call_async(
            "touch", task, delay, tag=tag, key=key, session=session
        )
        return result

    @overload
    async def atouch_many(
        self, tasks: Iterable[int | str | DelayTask], delay: Delay, *, session: Any = None
    ) -> TouchResult[int]: ...

    @overload
    async def atouch_many(
        self, *, tag: str, keys: Iterable[str], delay: Delay, session: Any = None
    ) -> TouchResult[str]: ...

    async def atouch_many(
        self,
        tasks: Iterable[int | str | DelayTask] | None = None,
        delay: Delay | None = None,
        *,
        tag: str | None = None,
        keys: Iterable[str] | None = None,
        session: Any = None,
    ) -> TouchResult[int] | TouchResult[str]:
        """Postpone many timeouts, a few thousand tasks in one statement.

        This is the asynchronous twin of `touch_many`.
        """
        result: TouchResult[int] | TouchResult[str] = await self._call_async(
            "touch_many", tasks, delay, tag=tag, keys=keys, session=session
        )
        return result

    async def arerun(
        self,
        task: int | str | DelayTask | None = None,
        delay: Delay = 0,
        *,
        version: int | None = None,
        session: Any = None,
    ) -> DelayTask:
        """Run a FAILED or CANCELLED task again. Its attempts are counted from 0.

        This is the asynchronous twin of `rerun`.
        """
        result: DelayTask = await self._call_async(
            "rerun", task, delay, version=version, session=session
        )
        return result

    async def aget(
        self,
        task: int | str | DelayTask | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        session: Any = None,
    ) -> DelayTask:
        """Read a task.

        This is the asynchronous twin of `get`.
        """
        result: DelayTask = await self._call_async("get", task, tag=tag, key=key, session=session)
        return result

    async def aattempts(self, task: int | str | DelayTask, *, session: Any = None) -> list[Attempt]:
        """Read the failed attempts of a task.

        This is the asynchronous twin of `attempts`.
        """
        result: list[Attempt] = await self._call_async("attempts", task, session=session)
        return result

    async def afind(
        self,
        *,
        cursor: str | None = None,
        limit: int = 100,
        newest_first: bool = False,
        session: Any = None,
        **filters: Unpack[Filters],
    ) -> Page:
        """Read a page of the tasks that match all given conditions, in the order of due times.

        This is the asynchronous twin of `find`.
        """
        result: Page = await self._call_async(
            "find",
            cursor=cursor,
            limit=limit,
            newest_first=newest_first,
            session=session,
            **filters,
        )
        return result

    async def acancel_many(self, **options: Unpack[BulkOptions]) -> BulkResult:
        """Cancel the waiting tasks that match a filter.

        This is the asynchronous twin of `cancel_many`.
        """
        result: BulkResult = await self._call_async("cancel_many", **options)
        return result

    async def areschedule_many(
        self,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        by: Delay | None = None,
        spread: Delay | None = None,
        **options: Unpack[BulkOptions],
    ) -> BulkResult:
        """Give the waiting tasks that match a filter another due time. See also `cancel_many`.

        This is the asynchronous twin of `reschedule_many`.
        """
        result: BulkResult = await self._call_async(
            "reschedule_many", delay, at=at, by=by, spread=spread, **options
        )
        return result

    async def arerun_many(self, delay: Delay = 0, **options: Unpack[BulkOptions]) -> BulkResult:
        """Run the FAILED tasks that match a filter again. See also `cancel_many`.

        This is the asynchronous twin of `rerun_many`.
        """
        result: BulkResult = await self._call_async("rerun_many", delay, **options)
        return result

    async def aundo(
        self,
        run: int | str | AuditEntry | BulkResult,
        *,
        actor: str | None = None,
        on_progress: Callable[[BulkResult], object] | None = None,
    ) -> BulkResult:
        """Undo `cancel_many` or `reschedule_many`, for tasks that have not moved since.

        This is the asynchronous twin of `undo`.
        """
        result: BulkResult = await self._call_async(
            "undo", run, actor=actor, on_progress=on_progress
        )
        return result

    async def aaudit(self, *, limit: int = 100) -> list[AuditEntry]:
        """Read what `cancel_many`, `reschedule_many` and `rerun_many` have done.

        This is the asynchronous twin of `audit`.
        """
        result: list[AuditEntry] = await self._call_async("audit", limit=limit)
        return result

    async def apolicies(self, *, tag: str | None = None, queue: str | None = None) -> list[Policy]:
        """Read the pauses and limits, with the numbers of paused and running tasks.

        This is the asynchronous twin of `policies`.
        """
        result: list[Policy] = await self._call_async("policies", tag=tag, queue=queue)
        return result

    async def apause(
        self, *, tag: str | None = None, queue: str | None = None, actor: str | None = None
    ) -> Policy:
        """Stop starting tasks of a tag or queue, within about a second.

        This is the asynchronous twin of `pause`.
        """
        result: Policy = await self._call_async("pause", tag=tag, queue=queue, actor=actor)
        return result

    async def aresume(
        self, *, tag: str | None = None, queue: str | None = None, actor: str | None = None
    ) -> Policy:
        """End a pause: HELD tasks wait again, in the order of their due times.

        This is the asynchronous twin of `resume`.
        """
        result: Policy = await self._call_async("resume", tag=tag, queue=queue, actor=actor)
        return result

    async def aset_policy(
        self,
        *,
        tag: str | None = None,
        queue: str | None = None,
        concurrency: int | Unchanged | None = UNCHANGED,
        key_concurrency: int | Unchanged | None = UNCHANGED,
        rate: str | Unchanged | None = UNCHANGED,
        actor: str | None = None,
    ) -> Policy:
        """Limit how many tasks of a tag run simultaneously or start in a period.

        This is the asynchronous twin of `set_policy`.
        """
        result: Policy = await self._call_async(
            "set_policy",
            tag=tag,
            queue=queue,
            concurrency=concurrency,
            key_concurrency=key_concurrency,
            rate=rate,
            actor=actor,
        )
        return result

    async def aclear_policy(
        self, *, tag: str | None = None, queue: str | None = None, actor: str | None = None
    ) -> Policy:
        """Remove the pause and all limits of a tag or queue.

        This is the asynchronous twin of `clear_policy`.
        """
        result: Policy = await self._call_async("clear_policy", tag=tag, queue=queue, actor=actor)
        return result

    async def aforecast(
        self,
        days: float = 7,
        *,
        tag: str | None = None,
        workers: int | None = None,
        processes: int | None = None,
        rate: float | None = None,
        target: Delay = 60,
        step: Delay = 3600,
        max_age: Delay = 0,
    ) -> Forecast:
        """Compute what becomes due in the next days, and how late it starts.

        This is the asynchronous twin of `forecast`.
        """
        result: Forecast = await self._call_async(
            "forecast",
            days,
            tag=tag,
            workers=workers,
            processes=processes,
            rate=rate,
            target=target,
            step=step,
            max_age=max_age,
        )
        return result

    def acheck(self) -> AsyncIterator[Finding]:
        """Find waiting tasks that this code cannot run, before it is deployed.

        This is the asynchronous twin of `check`.
        """
        return self._iterate_async("check")
