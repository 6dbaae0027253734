"""`DelaysTester`, with which users test their code: it runs tasks, travels in time and records
messages."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from pprint import pformat
from typing import TYPE_CHECKING, Any, TypeVar

from kombu.compression import decompress
from kombu.serialization import loads

from delaytasks.broker.link import Outgoing
from delaytasks.celery import current_delays
from delaytasks.db.database import is_on_the_loop
from delaytasks.db.migrations import url_of
from delaytasks.db.sessions import ConnectionSource
from delaytasks.db.store import Store
from delaytasks.model.inputs import Delay, check_delay, check_instant, show_from_now
from delaytasks.model.moves import WAITING, Done, Outcome, Status
from delaytasks.model.task import DelayedTask, Entry
from delaytasks.model.text import count
from delaytasks.run.calls import result_of, run_coroutine
from delaytasks.runtime import Runtime, runtime_of
from delaytasks.testing.connections import (
    BorrowedDatabase,
    SimulatedDatabase,
    SimulatedTime,
    awaited_on_the_loop,
    calling_after_sessions,
    on_the_loop,
    source_of,
)
from delaytasks.testing.runs import MovesTime, Run, SettableClock, SettableTime, TestRunner
from delaytasks.worker.processes import processes_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from delaytasks.callbacks.callback_calls import Message
    from delaytasks.callbacks.http import Callback
    from delaytasks.client import DelayTasks


# -- Compares what was scheduled with what a test expects, and describes the difference -----------


#: How far a due time may be from the expected one: some time passes between call and assertion.
TOLERANCE = timedelta(seconds=1)
#: The most tasks that a message shows.
MAX_TASKS_SHOWN = 5


class _Any:
    """Matches each value."""

    def __repr__(self) -> str:
        return "ANY"


#: The default of expectations: the field is not compared.
ANY: Any = _Any()


@dataclass(frozen=True)
class Expectation:
    """What a test expects of a scheduled task; `ANY` matches every value."""

    tag: str
    key: Any = ANY
    body: Any = ANY
    queue: Any = ANY
    priority: Any = ANY
    meta: Any = ANY
    #: The due time is at most this long after the test's present time.
    within: Delay | None = None
    #: The due time, give or take a second.
    at: datetime | None = None

    def __post_init__(self) -> None:
        if self.within is not None and self.at is not None:
            raise TypeError("within= and at= exclude each other")

    def differences(self, task: DelayedTask, now: datetime) -> list[str]:
        """Return a line for each field in which the task differs."""
        lines = []
        if task.tag != self.tag:
            lines.append(f"tag: expected {self.tag!r}, got {task.tag!r}")
        for name in ("key", "queue", "priority", "meta"):
            expected, got = getattr(self, name), getattr(task, name)
            if expected is not ANY and expected != got:
                lines.append(f"{name}: expected {expected!r}, got {got!r}")
        if self.body is not ANY and self.body != task.body:
            lines += _body_lines(self.body, task.body)
        lines += self._due_lines(task, now)
        return lines

    def _due_lines(self, task: DelayedTask, now: datetime) -> list[str]:
        in_text = f"{show_from_now(task.due, now)} ({task.due.isoformat(timespec='seconds')})"
        if (
            self.within is not None
            and task.due - now > check_delay(self.within, math.inf) + TOLERANCE
        ):
            return [f"due: expected within {self.within}, got {in_text}"]
        if self.at is not None and abs(task.due - self.at) > TOLERANCE:
            return [f"due: expected {self.at.isoformat()}, got {in_text}"]
        return []

    def __str__(self) -> str:
        given = [f"{self.tag!r}"]
        for name in ("key", "body", "queue", "priority", "meta"):
            if (value := getattr(self, name)) is not ANY:
                given.append(f"{name}={value!r}")
        given += [
            f"{name}={value!r}"
            for name in ("within", "at")
            if (value := getattr(self, name)) is not None
        ]
        return ", ".join(given)


def missing_text(expected: Expectation, tasks: Sequence[DelayedTask], now: datetime) -> str:
    """Return the message for an expected task that was not scheduled."""
    same = [task for task in tasks if task.tag == expected.tag]
    lines = [f"no waiting task matches {expected}"]
    if not tasks:
        return lines[0] + "; no task is waiting"
    if not same:
        lines.append(f"no task of this tag is waiting; {_count(tasks)}:")
        lines += [f"  {line_of(task, now)}" for task in tasks[:MAX_TASKS_SHOWN]]
        return "\n".join(lines)
    nearest = sorted(same, key=lambda task: len(expected.differences(task, now)))
    lines.append(f"{_count(same)} of this tag, the most similar first:")
    for task in nearest[:MAX_TASKS_SHOWN]:
        lines.append(f"  {line_of(task, now)}")
        lines += [f"    {line}" for line in expected.differences(task, now)]
    return "\n".join(lines)


def present_text(expected: Expectation, found: Sequence[DelayedTask], now: datetime) -> str:
    """Return the message for tasks that should not have been scheduled."""
    lines = [f"expected no waiting task to match {expected}; {_count(found)}:"]
    lines += [f"  {line_of(task, now)}" for task in found[:MAX_TASKS_SHOWN]]
    return "\n".join(lines)


def line_of(task: DelayedTask, now: datetime) -> str:
    key = "" if task.key is None else f" key={task.key!r}"
    return f"{task.tag}{key} body={task.body!r} due {show_from_now(task.due, now)}"


def _count(tasks: Sequence[DelayedTask]) -> str:
    return f"{count(len(tasks), 'task')} {'is' if len(tasks) == 1 else 'are'} waiting"


def _body_lines(expected: Any, got: Any) -> list[str]:
    """Return the values that differ; of two dictionaries only the items that differ."""
    if isinstance(expected, dict) and isinstance(got, dict):
        return [
            f"body[{name!r}]: expected {_item(expected, name)}, got {_item(got, name)}"
            for name in _names([expected, got])
            if _item(expected, name) != _item(got, name)
        ]
    return [f"body: expected {pformat(expected)}, got {pformat(got)}"]


def _item(values: dict[Any, Any], name: Any) -> str:
    return repr(values[name]) if name in values else "nothing"


def _names(dictionaries: Iterable[dict[Any, Any]]) -> list[Any]:
    return list(dict.fromkeys(name for one in dictionaries for name in one))


# -- Take the place of the timer, the broker and HTTP in a test, and keep what would be sent ------


@dataclass(frozen=True)
class SentTask:
    """A Celery task that waited as a row and was published.

    Attributes
    ----------
    name, id
        The name and the id of the Celery task.
    args, kwargs
        Its arguments.
    queue
        The routing key of its message.
    headers
        The headers of its message.
    """

    name: str
    id: str
    args: list[Any]
    kwargs: dict[str, Any]
    queue: str
    headers: Mapping[str, Any]


class NoTimer:
    """Arms nothing, since the test itself runs the tasks. Calls `on_armed` after each commit."""

    is_up = True

    def __init__(self, on_armed: Callable[[], None]) -> None:
        self._on_armed = on_armed

    def arm(self, entries: Iterable[Entry]) -> bool:
        self._on_armed()
        return True

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        return True


class RecordingLink:
    """Keeps the messages of Celery tasks."""

    def __init__(self, sent: list[SentTask]) -> None:
        self._sent = sent

    def publish(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        self._sent += map(_sent_task, messages)
        return [None] * len(messages)

    def close(self) -> None: ...


def _sent_task(message: Outgoing) -> SentTask:
    options, body = message.options, message.body
    headers, kind = options["headers"], options["content_type"]
    if headers.get("compression"):
        body = decompress(body, headers["compression"])  # type: ignore[no-untyped-call]
    args, kwargs, _ = loads(  # type: ignore[no-untyped-call]
        body, kind, options["content_encoding"], accept={kind}
    )
    return SentTask(
        headers["task"], headers["id"], list(args), dict(kwargs), options["routing_key"], headers
    )


class RecordingCallbacks:
    """Checks callbacks as in production, and keeps them instead of sending them."""

    def __init__(self, make_real: Callable[[], Any], sent: list[Any]) -> None:
        self._make_real = make_real
        self._sent = sent

    def content(self, *arguments: Any) -> Any:
        return self._make_real().content(*arguments)

    def __call__(self, content: Any, task: DelayedTask) -> Outcome:
        self._sent.append(content)
        return Done()

    def close(self) -> None: ...


# -- The instance of `DelayTasks` under test: how it differs from production, and its runs --------


T = TypeVar("T")
#: A chunk may take this long: a developer may stop in a debugger.
CHUNK_IN_TEST_S = 3600.0


@cache
def _import_modules(loader: Any) -> None:
    """Import the modules with processors, once: in Django, it runs all system checks."""
    loader.import_default_modules()


class InstanceInTest:
    """Replaces the clock, the broker and the senders of a `DelayTasks`, and runs its tasks."""

    def __init__(
        self, delays: DelayTasks, source: ConnectionSource | None, runs_inline: bool
    ) -> None:
        self.delays = delays
        self.time = SettableTime()
        self.sent_tasks: list[SentTask] = []
        self.sent_callbacks: list[Callback] = []
        self.sent_messages: list[Message] = []
        self._source = source
        self._runs_inline = runs_inline
        self._opened = ExitStack()
        self._runner: TestRunner | None = None
        self._is_running = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        delays, time = self.delays, SimulatedTime(self.time.now_us)
        _import_modules(runtime_of(delays).celery.loader)
        source = self._source or delays._test_connections()
        self._source = source
        with ExitStack() as opening:
            runtime = delays._make_runtime(**self._settings())
            self._replace_parts(runtime, source)
            opening.callback(runtime.close)
            before = delays._exchange_runtime(runtime, is_in_test=True)
            opening.callback(delays._exchange_runtime, before, is_in_test=False)
            opening.enter_context(time.on_engines())
            if self._runs_inline:
                opening.enter_context(calling_after_sessions(self._run_inline))
            self._runner = TestRunner(runtime, processes_of(runtime.celery), self.time)
            self._opened = opening.pop_all()

    def stop(self) -> None:
        self._runner = None
        self._opened.close()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def require_started(self) -> None:
        if self._runner is None:
            raise RuntimeError("the tester is not started: use `with DelaysTester(...) as tester`")

    @property
    def runner(self) -> TestRunner:
        self.require_started()
        assert self._runner is not None
        return self._runner

    def run(self, work: Callable[[], None], raises: bool) -> list[Run]:
        __tracebackhide__ = True
        runner = self.runner
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

    async def awaited(self, call: Callable[[], T]) -> T:
        """Return `call()`, which runs where the test's connection may be used."""
        __tracebackhide__ = True
        in_framework = None if self._source is None else self._source.in_framework
        result: T = await (in_framework or on_the_loop)(call)
        return result

    def _settings(self) -> dict[str, Any]:
        settings = {"_chunk_time_budget_s": CHUNK_IN_TEST_S, "lease": 4 * CHUNK_IN_TEST_S}
        return {**settings, "horizon": None} if self._runs_inline else settings

    def _replace_parts(self, runtime: Runtime, source: ConnectionSource | None) -> None:
        settings = runtime.settings
        database = SimulatedDatabase if source is None else partial(BorrowedDatabase, source)
        url, remedy = url_of(settings), runtime.tables_remedy
        runtime.store = Store(url, settings, runtime.cipher, database, remedy)
        runtime.clock = SettableClock(self.time, runtime.ask_now)
        runtime.timer = NoTimer(self._run_inline if self._runs_inline else lambda: None)
        runtime.producer_timer = runtime.timer
        runtime.producer.call_timer = lambda call, entries: call(entries)
        runtime.direct_timer = runtime.redis_timer = None
        for name, sent in (
            ("http_callbacks", self.sent_callbacks),
            ("queue_callbacks", self.sent_messages),
        ):
            make = partial(getattr(Runtime, name).func, runtime)
            setattr(runtime, name, RecordingCallbacks(make, sent))
        link: Any = RecordingLink(self.sent_tasks)
        runtime.confirming_links = link
        if source is not None:
            runtime.processor_contexts = [source.around_processor, *runtime.processor_contexts]
            runtime.in_framework = source.in_framework or runtime.in_framework

    def _run_inline(self) -> None:
        """Run all waiting tasks, each as if it were due."""
        if not self._is_running and self._runner is not None:
            self.run(self._runner.run_all, True)

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
            error.add_note(f"{count(len(errors) - 1, 'more task')} failed")
    raise error


def create_tables(connection: Any, delays: DelayTasks | None = None) -> None:
    """Create the tables of delaytasks that do not exist, without migrations.

    Parameters
    ----------
    connection
        A SQLAlchemy Connection. Its transaction is not committed.
    delays
        The instance. By default that of the process.

    Examples
    --------
    >>> create_tables(db.session.connection())
    """
    runtime_of(delays or current_delays()).store.schema.metadata.create_all(connection)


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
        self._instance = instance = InstanceInTest(
            delays if delays is not None else current_delays(),
            None if bind is None else source_of(bind),
            run_inline,
        )
        #: The Celery tasks that waited as rows and were sent, in their order.
        self.sent_tasks: list[SentTask] = instance.sent_tasks
        #: The HTTP callbacks that were sent.
        self.sent_callbacks: list[Callback] = instance.sent_callbacks
        #: The messages to queues that were sent.
        self.sent_messages: list[Message] = instance.sent_messages

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
        self._instance.start()
        return self

    def stop(self) -> None:
        """End the test: the instance is again as it was before `start`.

        Examples
        --------
        >>> tester.stop()
        """
        self._instance.stop()

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
        self._instance.require_started()
        runtime_of(self._instance.delays).store.clear()

    # -- look at scheduled tasks -------------------------------------------------------------------

    def scheduled(
        self,
        tag: str | None = None,
        *,
        key: str | None = None,
        status: Status | str | Sequence[Status | str] | None = None,
    ) -> list[DelayedTask]:
        """Return tasks in the order of their due times.

        Parameters
        ----------
        tag, key
            Only the tasks of this tag, and with this key.
        status
            One status, or several. By default the tasks that wait.

        Returns
        -------
        list of DelayedTask
            The tasks.

        Examples
        --------
        >>> [task] = tester.scheduled("order.close", key="7")
        >>> task.body
        {'order': 7}
        """
        self._instance.require_started()
        filters: dict[str, Any] = {"tag": tag, "key": key, "status": status or WAITING}
        found: list[DelayedTask] = []
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
    ) -> DelayedTask:
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
        DelayedTask
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

    async def ascheduled(self, tag: str | None = None, **filters: Any) -> list[DelayedTask]:
        """Await `scheduled`.

        Examples
        --------
        >>> [task] = await tester.ascheduled("order.close")
        """
        return await self._instance.awaited(partial(self.scheduled, tag, **filters))

    async def aassert_scheduled(self, tag: str, **expected: Any) -> DelayedTask:
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

    # -- run tasks ---------------------------------------------------------------------------------

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

    # -- the time of the test ----------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of the test, by which tasks are due.

        It goes on with the clock of the host, and stands still if freezegun or time-machine stop
        that clock.
        """
        return self._instance.time.now()

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
        self._instance.time.move_to(check_instant(instant))

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
        self._instance.time.move_with(traveller)
