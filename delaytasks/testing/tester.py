"""`DelaysTester`, the object that tests use."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from delaytasks.api import instance_of_process
from delaytasks.core.callbacks import Callback, Message
from delaytasks.core.durations import Delay
from delaytasks.core.inputs import check_delay, check_instant
from delaytasks.core.states import WAITING, Status
from delaytasks.core.task import DelayTask
from delaytasks.environment import Environment
from delaytasks.processors.event_loop import result_of, run_coroutine
from delaytasks.storage.async_sessions import (
    awaited_on_the_loop,
    is_on_the_loop,
    on_the_loop,
)
from delaytasks.storage.borrowed_connections import (
    BorrowedDatabase,
    ConnectionSource,
    SimulatedDatabase,
    calling_after_sessions,
    source_of,
)
from delaytasks.storage.simulated_time import SimulatedTime
from delaytasks.testing.clock import MovesTime, SettableClock, SettableTime
from delaytasks.testing.expectations import ANY, Expectation, missing_text, present_text
from delaytasks.testing.runs import Run, TestRunner
from delaytasks.testing.senders import NoTimer, RecordingCallbacks, RecordingPublisher, SentTask
from delaytasks.wiring import wiring_of
from delaytasks.worker.celery_tasks import processes_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from delaytasks.client import DelayTasks
    from delaytasks.wiring import Wiring

T = TypeVar("T")
#: A chunk may take this long: a developer may stop in a debugger.
CHUNK_S = 3600.0


class DelaysTester:
    """Runs the tasks of a `DelayTasks` in a test, without a broker and without waiting.

    Inside the `with` block, or between `start` and `stop`, the instance writes and runs tasks with
    the same code as in production. Only the clock, the broker and HTTP callbacks are replaced.

    Parameters
    ----------
    delays
        The instance. By default the one of the Django project, of the Flask app, or of the
        current Celery app.
    bind
        The SQLAlchemy Engine, Connection or Session of the test, or an asynchronous one. All
        statements run on it, and in its transaction, which the test rolls back at the end.
        Without it, the tester uses the database of the settings and commits. With Django, it
        always uses Django's connection.
    run_inline
        Run each task when its transaction is committed, whatever its delay.

    Examples
    --------
    >>> with DelaysTester(delays) as tester:
    ...     place_order(7)
    ...     tester.assert_scheduled("order.close", key="7", within="30m")
    ...     tester.fast_forward("30m")
    """

    def __init__(
        self, delays: DelayTasks | None = None, *, bind: Any = None, run_inline: bool = False
    ) -> None:
        self._delays = delays if delays is not None else instance_of_process()
        self._source = None if bind is None else source_of(bind)
        self._runs_inline = run_inline
        self._time = SettableTime()
        self._opened = ExitStack()
        self._runner: TestRunner | None = None
        self._is_running = False
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The Celery tasks that waited as rows and were sent, in their order.
        self.sent_tasks: list[SentTask] = []
        #: The HTTP callbacks that were sent.
        self.sent_callbacks: list[Callback] = []
        #: The messages to queues that were sent.
        self.sent_messages: list[Message] = []

    # -- start and stop ---------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin the test. `with` calls this.

        Returns
        -------
        DelaysTester
            This object.

        Examples
        --------
        >>> class OrderTest(TestCase):
        ...     def setUp(self):
        ...         self.delays = DelaysTester().start()
        ...         self.addCleanup(self.delays.stop)
        """
        delays, time = self._delays, SimulatedTime(self._time.now_us)
        wiring_of(delays).celery.loader.import_default_modules()
        source = self._source or delays._test_connections()
        self._source = source
        with ExitStack() as opening:
            wiring = delays._make_wiring(self._environment(source), **self._settings())
            opening.callback(wiring.close)
            before = delays._exchange_wiring(wiring, is_in_test=True)
            opening.callback(delays._exchange_wiring, before, is_in_test=False)
            opening.enter_context(time.on_engines())
            if source is not None:
                opening.enter_context(source.rewriting(time))
            if self._runs_inline:
                opening.enter_context(calling_after_sessions(self._run_inline))
            self._runner = TestRunner(wiring, processes_of(wiring.celery), self._time)
            self._opened = opening.pop_all()
        return self

    def stop(self) -> None:
        """End the test: the instance is again as it was before `start`.

        Examples
        --------
        >>> tester.stop()
        """
        self._runner = None
        self._opened.close()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def clear(self) -> None:
        """Delete all tasks, schedules and policies, for tests whose transactions are committed.

        Examples
        --------
        >>> tester.clear()
        """
        self._started()
        for shard in self._wiring.shards:
            shard.store.clear()

    # -- time -------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of the test, by which tasks are due.

        It goes on with the clock of the host, and stands still if freezegun or time-machine stop
        that clock.
        """
        return self._time.now()

    def travel_to(self, instant: datetime) -> None:
        """Set the time, forward or back, and run nothing.

        Parameters
        ----------
        instant
            An aware datetime.

        Examples
        --------
        >>> tester.travel_to(datetime(2027, 1, 1, tzinfo=timezone.utc))
        """
        self._time.move_to(check_instant(instant))

    def move_with(self, traveller: MovesTime | None) -> None:
        """Let `fast_forward` and `travel_to` move the time of freezegun or time-machine too.

        The code under test then reads the same time as delaytasks.

        Parameters
        ----------
        traveller
            What `freeze_time` or `time_machine.travel` returns in a `with` block, or the fixture
            of one of their pytest plugins. None ends this.

        Examples
        --------
        >>> with freeze_time("2027-01-01") as frozen, DelaysTester(delays) as tester:
        ...     tester.move_with(frozen)
        ...     tester.fast_forward("1d")
        """
        self._time.move_with(traveller)

    # -- look -------------------------------------------------------------------------------------

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
        self._started()
        filters: dict[str, Any] = {"tag": tag, "key": key, "status": status or WAITING}
        found: list[DelayTask] = []
        cursor = None
        while True:
            page = self._delays.find(cursor=cursor, limit=1000, **filters)
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
        waiting, now = self.scheduled(), self.now
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
        expected, now = Expectation(tag, key, body), self.now
        found = [t for t in self.scheduled(tag) if not expected.differences(t, now)]
        if found:
            raise AssertionError(present_text(expected, found, now))

    # -- run --------------------------------------------------------------------------------------

    @property
    def runs(self) -> list[Run]:
        """All runs of tasks since `start`, in their order."""
        return self._started().runs

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
        return self._run(self._started().run_due, raises)

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
        until = self.now + check_delay(delay, self._wiring.settings.max_delay_s)
        return self._run(partial(self._started().fast_forward, until), raises)

    # -- asynchronous tests -----------------------------------------------------------------------

    async def ascheduled(self, tag: str | None = None, **filters: Any) -> list[DelayTask]:
        """Await `scheduled`.

        Examples
        --------
        >>> [task] = await tester.ascheduled("order.close")
        """
        return await self._awaited(partial(self.scheduled, tag, **filters))

    async def aassert_scheduled(self, tag: str, **expected: Any) -> DelayTask:
        """Await `assert_scheduled`.

        Examples
        --------
        >>> await tester.aassert_scheduled("order.close", within="30m")
        """
        __tracebackhide__ = True
        return await self._awaited(partial(self.assert_scheduled, tag, **expected))

    async def aassert_not_scheduled(self, tag: str, **expected: Any) -> None:
        """Await `assert_not_scheduled`.

        Examples
        --------
        >>> await tester.aassert_not_scheduled("order.close")
        """
        __tracebackhide__ = True
        await self._awaited(partial(self.assert_not_scheduled, tag, **expected))

    async def arun_due(self, *, raises: bool = True) -> list[Run]:
        """Await `run_due`. Processors that are coroutines run in the event loop of the test.

        Examples
        --------
        >>> await tester.arun_due()
        """
        __tracebackhide__ = True
        return await self._awaited(partial(self.run_due, raises=raises))

    async def afast_forward(self, delay: Delay, *, raises: bool = True) -> list[Run]:
        """Await `fast_forward`. Processors that are coroutines run in the event loop of the test.

        Examples
        --------
        >>> await tester.afast_forward("30m")
        """
        __tracebackhide__ = True
        return await self._awaited(partial(self.fast_forward, delay, raises=raises))

    # -- private ----------------------------------------------------------------------------------

    @property
    def _wiring(self) -> Wiring:
        return wiring_of(self._delays)

    def _started(self) -> TestRunner:
        if self._runner is None:
            raise RuntimeError("the tester is not started: use `with DelaysTester(...) as tester`")
        return self._runner

    def _settings(self) -> dict[str, Any]:
        settings = {"chunk_time_budget_s": CHUNK_S, "lease_s": 4 * CHUNK_S}
        return {**settings, "horizon_s": None} if self._runs_inline else settings

    def _environment(self, source: ConnectionSource | None) -> Environment:
        database = SimulatedDatabase if source is None else partial(BorrowedDatabase, source)
        return Environment(
            make_clock=partial(SettableClock, self._time),
            make_database=database,
            timer=NoTimer(self._run_inline if self._runs_inline else lambda: None),
            make_callbacks=partial(RecordingCallbacks, self.sent_callbacks, self.sent_messages),
            publisher=RecordingPublisher(self.sent_tasks),
            processor_contexts=() if source is None else [source.around_processor],
            in_framework=None if source is None else source.in_framework,
        )

    def _run(self, work: Callable[[], None], raises: bool) -> list[Run]:
        __tracebackhide__ = True
        runner = self._started()
        self._is_running = True
        try:
            context = contextvars.copy_context()
            context.run(run_coroutine.set, self._run_coroutine)
            context.run(work)
        finally:
            self._is_running = False
        new = runner.take_new()
        if raises:
            _raise_failures(new)
        return new

    async def _awaited(self, call: Callable[[], T]) -> T:
        """Return `call()`, which runs where the test's connection may be used."""
        __tracebackhide__ = True
        in_framework = None if self._source is None else self._source.in_framework
        result: T = await (in_framework or on_the_loop)(call)
        return result

    def _run_inline(self) -> None:
        """Run all waiting tasks, each as if it were due."""
        if not self._is_running and self._runner is not None:
            self._run(self._runner.run_all, True)

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a processor's coroutine where the connections of the test are."""
        if self._source is not None and self._source.run_coroutine is not None:
            return self._source.run_coroutine(coroutine)
        if is_on_the_loop():
            return awaited_on_the_loop(coroutine)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(coroutine)
        # A synchronous call in an asynchronous test: its loop waits for this call.
        run_coroutine.set(None)
        try:
            return result_of(coroutine)
        finally:
            run_coroutine.set(self._run_coroutine)


def _raise_failures(runs: Sequence[Run]) -> None:
    """Raise the error of the first task whose last run has raised one."""
    __tracebackhide__ = True
    last = {run.task.id: run for run in runs}
    errors = [run for run in last.values() if run.error is not None]
    if not errors:
        return
    error = errors[0].error
    assert error is not None
    if hasattr(error, "add_note"):  # Python 3.11
        task = errors[0].task
        error.add_note(f"raised by the processor of task {task.id} (tag {task.tag!r})")
        if len(errors) > 1:
            error.add_note(f"{len(errors) - 1} more tasks failed")
    raise error
