"""The methods of `DelaysTester` that look at scheduled tasks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

from delaytasks.core.inputs import Delay
from delaytasks.core.states import WAITING, Status
from delaytasks.core.task import DelayTask
from delaytasks.testing.expectations import ANY, Expectation, missing_text, present_text
from delaytasks.testing.instance_in_test import TesterPart


class TaskAssertions(TesterPart):
    """Finds scheduled tasks, and fails if they are not as expected."""

    def scheduled(
        self,
        tag: str | None = None,
        *,
        key: str | None = None,
        status: Status | str | Sequence[Status | str] | None = None,
    ) -> list[DelayTask]:
        """Return tasks in the order of their due times.

        Parameters
        ----------
        tag, key
            Only the tasks of this tag, and with this key.
        status
            One status, or several. By default the tasks that wait.

        Returns
        -------
        list of DelayTask
            The tasks.

        Examples
        --------
        >>> [task] = tester.scheduled("order.close", key="7")
        >>> task.body
        {'order': 7}
        """
        self._instance.require_started()
        filters: dict[str, Any] = {"tag": tag, "key": key, "status": status or WAITING}
        found: list[DelayTask] = []
        cursor = None
        while True:
            page = self._instance.delays.find(cursor=cursor, limit=1000, **filters)
            found += page.tasks
            cursor = page.cursor
            if cursor is None:
                return found

    def assert_scheduled(
        self,
        tag: str,
        *,
        key: Any = ANY,
        body: Any = ANY,
        queue: Any = ANY,
        priority: Any = ANY,
        meta: Any = ANY,
        within: Delay | None = None,
        at: datetime | None = None,
    ) -> DelayTask:
        """Fail unless a waiting task matches; the message shows the differences.

        Parameters
        ----------
        tag
            The tag.
        key, body, queue, priority, meta
            What the task must have. What is not given may have any value. The body may be compared
            with an object such as `unittest.mock.ANY`.
        within
            The longest time until the task is due, give or take a second.
        at
            When the task is due, give or take a second.

        Returns
        -------
        DelayTask
            The first task that matches.

        Raises
        ------
        AssertionError
            If no task matches.

        Examples
        --------
        >>> tester.assert_scheduled("order.close", key="7", body={"order": 7}, within="30m")
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        expected = Expectation(tag, key, body, queue, priority, meta, within, at)
        waiting, now = self.scheduled(), self._instance.time.now()
        for task in waiting:
            if not expected.differences(task, now):
                return task
        raise AssertionError(missing_text(expected, waiting, now))

    def assert_not_scheduled(self, tag: str, *, key: Any = ANY, body: Any = ANY) -> None:
        """Fail if a waiting task matches.

        Parameters
        ----------
        tag, key, body
            See `assert_scheduled`.

        Raises
        ------
        AssertionError
            If a task matches.

        Examples
        --------
        >>> tester.assert_not_scheduled("order.close", key="7")
        """
        __tracebackhide__ = True
        expected, now = Expectation(tag, key, body), self._instance.time.now()
        found = [t for t in self.scheduled(tag) if not expected.differences(t, now)]
        if found:
            raise AssertionError(present_text(expected, found, now))

    # -- asynchronous tests -----------------------------------------------------------------------

    async def ascheduled(self, tag: str | None = None, **filters: Any) -> list[DelayTask]:
        """Await `scheduled`.

        Examples
        --------
        >>> [task] = await tester.ascheduled("order.close")
        """
        return await self._instance.awaited(partial(self.scheduled, tag, **filters))

    async def aassert_scheduled(self, tag: str, **expected: Any) -> DelayTask:
        """Await `assert_scheduled`.

        Examples
        --------
        >>> await tester.aassert_scheduled("order.close", within="30m")
        """
        __tracebackhide__ = True
        return await self._instance.awaited(partial(self.assert_scheduled, tag, **expected))

    async def aassert_not_scheduled(self, tag: str, **expected: Any) -> None:
        """Await `assert_not_scheduled`.

        Examples
        --------
        >>> await tester.aassert_not_scheduled("order.close")
        """
        __tracebackhide__ = True
        await self._instance.awaited(partial(self.assert_not_scheduled, tag, **expected))
