"""`DelaysTester`, with which users test their code: it runs tasks, travels in time and records
messages."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from kombu.compression import decompress
from kombu.serialization import loads

from delaytasks.broker.link import Outgoing
from delaytasks.celery import current_delays
from delaytasks.db.database import is_on_the_loop
from delaytasks.db.migrations import url_of
from delaytasks.db.store import Store
from delaytasks.loops import twin
from delaytasks.model.inputs import Delay, check_delay, check_instant, show_from_now
from delaytasks.model.moves import WAITING, Done, Outcome, Status
from delaytasks.model.task import DelayedTask, Entry
from delaytasks.model.text import count
from delaytasks.run.calls import result_of, run_coroutine
from delaytasks.runtime import Runtime, runtime_of
from delaytasks.testing.connections import (
    BorrowedDatabase,
    SimulatedDatabase,
    awaited_on_the_loop,
    calling_after_sessions,
    on_the_loop,
    simulated_time,
    source_of,
)
from delaytasks.testing.runs import MovesTime, Run, SequentialRegistry, SettableClock, TestRunner
from delaytasks.worker.processes import processes_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from delaytasks.callbacks.sending import Callback, HttpCallbacks, Message
    from delaytasks.client import DelayTasks


# -- Compares what was scheduled with what a test expects, and describes the difference -----------


#: How far a due time may be from the expected one: some time passes between call and assertion.
TOLERANCE = timedelta(seconds=1)
#: The most tasks that a message shows.
MAX_TASKS_SHOWN = 5


class _Named:
    """A value that messages show by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: The default of expectations: the field is not compared.
ANY: Any = _Named("ANY")
_NOTHING: Any = _Named("nothing")


class Expectation:
    """What a test expects of a scheduled task, at the test's present time."""

    def __init__(self, now: datetime, tag: str, **fields: Any) -> None:
        self._now = now
        self._tag = tag
        self._fields = {name: value for name, value in fields.items() if value is not ANY}

    def differences(self, task: DelayedTask) -> list[str]:
        """Return a line for each value in which the task differs."""
        lines = self._lines("tag", self._tag, task)
        for name, value in self._fields.items():
            lines += self._lines(name, value, task)
        return lines

    def _lines(self, name: str, value: Any, task: DelayedTask) -> list[str]:
        if name in ("within", "at"):
            latest = self._now + check_delay(value) if name == "within" else value
            is_late = task.due > latest + TOLERANCE
            if not (is_late or (name == "at" and task.due < latest - TOLERANCE)):
                return []
            due = f"{show_from_now(task.due, self._now)} ({task.due.isoformat(timespec='seconds')})"
            return [f"due: expected {name} {value}, got {due}"]
        got = getattr(task, name)
        if value == got:
            return []
        if isinstance(value, dict) and isinstance(got, dict):
            pairs = {
                item: (value.get(item, _NOTHING), got.get(item, _NOTHING))
                for item in {**value, **got}
            }
            return [
                f"{name}[{item!r}]: expected {wanted!r}, got {found!r}"
                for item, (wanted, found) in pairs.items()
                if wanted != found
            ]
        return [f"{name}: expected {value!r}, got {got!r}"]

    def __str__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in self._fields.items())
        return ", ".join([repr(self._tag), *fields])

    def message(self, title: str, tasks: Sequence[DelayedTask]) -> str:
        """Return the message of an assertion: the tasks that wait, the most similar first."""
        are = "is" if len(tasks) == 1 else "are"
        lines = [f"{title} {self}; {count(len(tasks), 'task')} {are} waiting"]
        others = {task.id: (task.tag != self._tag, len(self.differences(task))) for task in tasks}
        for task in sorted(tasks, key=lambda task: others[task.id])[:MAX_TASKS_SHOWN]:
            key = "" if task.key is None else f" key={task.key!r}"
            due = show_from_now(task.due, self._now)
            lines.append(f"  {task.tag}{key} body={task.body!r} due {due}")
            lines += [f"    {line}" for line in self.differences(task)]
        return "\n".join(lines)


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

    def __init__(self, real: HttpCallbacks, sent: list[Callback]) -> None:
        self.content = real.content
        self._sent = sent

    def __call__(self, callback: Callback, task: DelayedTask) -> Outcome:
        self._sent.append(callback)
        return Done()


# -- The tester -----------------------------------------------------------------------------------


#: A chunk may take this long: a developer may stop in a debugger.
CHUNK_IN_TEST_S = 3600.0


@cache
def _import_modules(loader: Any) -> None:
    """Import the modules with processors, once: in Django, it runs all system checks."""
    loader.import_default_modules()


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
        self._delays = delays if delays is not None else current_delays()
        self._source = None if bind is None else source_of(bind)
        self._runs_inline = run_inline
        self._clock = SettableClock()
        self._runner: TestRunner | None = None
        self._is_running = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened = ExitStack()
        #: The Celery tasks that waited as rows and were sent, in their order.
        self.sent_tasks: list[SentTask] = []
        #: The HTTP callbacks that were sent.
        self.sent_callbacks: list[Callback] = []
        #: The messages to queues that were sent.
        self.sent_messages: list[Message] = []

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
        delays = self._delays
        _import_modules(runtime_of(delays).celery.loader)
        self._source = self._source or delays._test_connections()
        settings = {"_chunk_time_budget_s": CHUNK_IN_TEST_S, "lease": 4 * CHUNK_IN_TEST_S}
        with ExitStack() as opening:
            runtime = delays._make_runtime(
                **settings, **({"horizon": None} if self._runs_inline else {})
            )
            self._replace_parts(runtime)
            opening.callback(runtime.close)
            before = delays._exchange_runtime(runtime, is_in_test=True)
            opening.callback(delays._exchange_runtime, before, is_in_test=False)
            opening.enter_context(simulated_time(self._clock.now_us))
            if self._runs_inline:
                opening.enter_context(calling_after_sessions(self._run_inline))
            self._runner = TestRunner(runtime, processes_of(runtime.celery), self._clock)
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
        _ = self._started
        runtime_of(self._delays).store.clear()

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
        _ = self._started
        filters: dict[str, Any] = {"tag": tag, "key": key, "status": status or WAITING}
        found: list[DelayedTask] = []
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
        fields = {"key": key, "body": body, "queue": queue, "priority": priority, "meta": meta}
        times = {"within": ANY if within is None else within, "at": ANY if at is None else at}
        expected = Expectation(self.now, tag, **fields, **times)
        waiting = self.scheduled()
        for task in waiting:
            if not expected.differences(task):
                return task
        raise AssertionError(expected.message("no waiting task matches", waiting))

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
        expected = Expectation(self.now, tag, key=key, body=body)
        found = [task for task in self.scheduled(tag) if not expected.differences(task)]
        if found:
            raise AssertionError(expected.message("expected no waiting task to match", found))

    ascheduled = twin(scheduled)
    aassert_scheduled = twin(assert_scheduled)
    aassert_not_scheduled = twin(assert_not_scheduled)

    # -- run tasks ---------------------------------------------------------------------------------

    @property
    def runs(self) -> list[Run]:
        """All runs of tasks since `start`, in their order."""
        return self._started.runs

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
        return self._run(self._started.run_due, raises)

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
        until = self.now + check_delay(delay)
        return self._run(partial(self._started.fast_forward, until), raises)

    arun_due = twin(run_due)
    afast_forward = twin(fast_forward)

    # -- the time of the test ----------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time of the test, by which tasks are due.

        It goes on with the clock of the host, and stands still if freezegun or time-machine stop
        that clock.
        """
        return self._clock.now()

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
        self._clock.move_to(check_instant(instant))

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
        self._clock.move_with(traveller)

    # -- how the instance differs from production --------------------------------------------------

    def _replace_parts(self, runtime: Runtime) -> None:
        settings, source = runtime.settings, self._source
        database = SimulatedDatabase if source is None else partial(BorrowedDatabase, source)
        url, remedy = url_of(settings), runtime.tables_remedy
        runtime.store = Store(url, settings, runtime.cipher, database, remedy)
        runtime.clock = self._clock
        registry: Any = SequentialRegistry(runtime.registry)
        runtime.registry = registry
        runtime.timer = NoTimer(self._run_inline if self._runs_inline else lambda: None)
        runtime.producer_timer = runtime.timer
        runtime.producer.call_timer = lambda call, entries: call(entries)
        runtime.direct_timer = runtime.redis_timer = None
        callbacks: Any = RecordingCallbacks(runtime.http_callbacks, self.sent_callbacks)
        runtime.http_callbacks = callbacks
        runtime.queue_callbacks = self._keep_message
        link: Any = RecordingLink(self.sent_tasks)
        runtime.confirming_links = link
        if source is not None:
            runtime.processor_contexts = [source.around_processor, *runtime.processor_contexts]
            runtime.in_framework = source.in_framework or runtime.in_framework

    def _keep_message(self, message: Message, task: DelayedTask) -> Outcome:
        self.sent_messages.append(message)
        return Done()

    @property
    def _started(self) -> TestRunner:
        if self._runner is None:
            raise RuntimeError("the tester is not started: use `with DelaysTester(...) as tester`")
        return self._runner

    def _run(self, work: Callable[[], None], raises: bool) -> list[Run]:
        __tracebackhide__ = True
        self._is_running = True
        try:
            context = contextvars.copy_context()
            context.run(run_coroutine.set, self._run_coroutine)
            new = context.run(self._started.new_runs, work)
        finally:
            self._is_running = False
        if raises:
            _raise_failures(new)
        return new

    def _run_inline(self) -> None:
        """Run all waiting tasks, each as if it were due."""
        if not self._is_running and self._runner is not None:
            self._run(self._runner.run_all, True)

    async def _run_async(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method where the test's connection may be used."""
        __tracebackhide__ = True
        in_framework = None if self._source is None else self._source.in_framework
        return await (in_framework or on_the_loop)(partial(method, *args, **options))

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
