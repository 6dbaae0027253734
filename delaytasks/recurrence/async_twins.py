"""The asynchronous twins of the methods of `Recurring`.

`python -m tests.async_twins` writes this module from `delaytasks/recurrence/api.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from typing_extensions import Unpack

    from delaytasks.core.task import DelayTask
    from delaytasks.recurrence.definition import RecurringOptions
    from delaytasks.recurrence.schedule import RecurringSchedule


class AsyncRecurringTwins:
    """For coroutines: each method has the parameters, the result and the errors of its twin."""

    if TYPE_CHECKING:

        async def _call_async(self, name: str, /, *arguments: Any, **options: Any) -> Any: ...

    async def afollow_code(self) -> None:
        """Store the declarations of this process now, as workers do at their start.

        This is the asynchronous twin of `follow_code`.
        """
        await self._call_async("follow_code")

    async def aset(
        self,
        name: str,
        tag: Any,
        body: Any = None,
        *,
        cron: Any = None,
        session: Any = None,
        actor: str | None = None,
        **options: Unpack[RecurringOptions],
    ) -> RecurringSchedule:
        """Store a recurring schedule, or replace the one of this name.

        This is the asynchronous twin of `set`.
        """
        result: RecurringSchedule = await self._call_async(
            "set", name, tag, body, cron=cron, session=session, actor=actor, **options
        )
        return result

    async def aremove(
        self, name: str, *, session: Any = None, actor: str | None = None
    ) -> RecurringSchedule:
        """Delete a schedule, and cancel its tasks that wait for later occurrences.

        This is the asynchronous twin of `remove`.
        """
        result: RecurringSchedule = await self._call_async(
            "remove", name, session=session, actor=actor
        )
        return result

    async def apause(
        self, name: str, *, session: Any = None, actor: str | None = None
    ) -> RecurringSchedule:
        """Make no more tasks of a schedule, and cancel those that wait for later occurrences.

        This is the asynchronous twin of `pause`.
        """
        result: RecurringSchedule = await self._call_async(
            "pause", name, session=session, actor=actor
        )
        return result

    async def aresume(
        self, name: str, *, session: Any = None, actor: str | None = None
    ) -> RecurringSchedule:
        """End a pause. The schedule continues with its next occurrence.

        This is the asynchronous twin of `resume`.
        """
        result: RecurringSchedule = await self._call_async(
            "resume", name, session=session, actor=actor
        )
        return result

    async def arun(self, name: str, *, session: Any = None) -> DelayTask:
        """Make one task of a schedule that is due now. Its occurrences stay as they are.

        This is the asynchronous twin of `run`.
        """
        result: DelayTask = await self._call_async("run", name, session=session)
        return result

    async def aget(self, name: str) -> RecurringSchedule:
        """Read a schedule.

        This is the asynchronous twin of `get`.
        """
        result: RecurringSchedule = await self._call_async("get", name)
        return result

    async def alist(
        self,
        *,
        tag: str | None = None,
        prefix: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[RecurringSchedule]:
        """Read schedules in the order of their names.

        This is the asynchronous twin of `list`.
        """
        result: list[RecurringSchedule] = await self._call_async(
            "list", tag=tag, prefix=prefix, after=after, limit=limit
        )
        return result

    async def anext(
        self, name: str, count: int = 5, *, after: datetime | None = None
    ) -> Sequence[datetime]:
        """Return the next occurrences of a schedule, in UTC, whether or not it is paused.

        This is the asynchronous twin of `next`.
        """
        result: Sequence[datetime] = await self._call_async("next", name, count, after=after)
        return result
