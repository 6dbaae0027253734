"""The methods of `DelaysTester` that run tasks."""

from __future__ import annotations

from functools import partial

from delaytasks.core.inputs import Delay, check_delay
from delaytasks.testing.instance_in_test import TesterPart
from delaytasks.testing.runs import Run


class TaskRuns(TesterPart):
    """Runs the tasks that are due."""

    @property
    def runs(self) -> list[Run]:
        """All runs of tasks since `start`, in their order."""
        return self._instance.runner.runs

    def run_due(self, *, raises: bool = True) -> list[Run]:
        """Run the tasks that are due, and those that they schedule without a delay.

        Parameters
        ----------
        raises
            Whether to raise the exception of a task that failed, or that waits for a retry.

        Returns
        -------
        list of Run
            What ran, in order.

        Raises
        ------
        Exception
            The exception of the first processor whose task failed, after all tasks ran.
        UnknownTagError
            If a task has a tag without a processor.

        Examples
        --------
        >>> tester.run_due()
        """
        __tracebackhide__ = True
        return self._instance.run(self._instance.runner.run_due, raises)

    def fast_forward(self, delay: Delay, *, raises: bool = True) -> list[Run]:
        """Move the time forward, and run everything that falls due in between, in order.

        Each task runs at its due time. Retries, recurring schedules and the tasks that processors
        schedule are included.

        Parameters
        ----------
        delay
            Seconds, text such as `"30m"`, or a timedelta.
        raises
            Whether to raise the exception of a task that failed, or that still waits for a retry
            at the end.

        Returns
        -------
        list of Run
            What ran, in order.

        Raises
        ------
        Exception
            See `run_due`.

        Examples
        --------
        >>> tester.fast_forward("30m")
        """
        __tracebackhide__ = True
        instance = self._instance
        until = instance.time.now() + check_delay(delay, instance.delays.settings.max_delay_s)
        return instance.run(partial(instance.runner.fast_forward, until), raises)

    # -- asynchronous tests -----------------------------------------------------------------------

    async def arun_due(self, *, raises: bool = True) -> list[Run]:
        """Await `run_due`. Processors that are coroutines run in the event loop of the test.

        Examples
        --------
        >>> await tester.arun_due()
        """
        __tracebackhide__ = True
        return await self._instance.awaited(partial(self.run_due, raises=raises))

    async def afast_forward(self, delay: Delay, *, raises: bool = True) -> list[Run]:
        """Await `fast_forward`. Processors that are coroutines run in the event loop of the test.

        Examples
        --------
        >>> await tester.afast_forward("30m")
        """
        __tracebackhide__ = True
        return await self._instance.awaited(partial(self.fast_forward, delay, raises=raises))
