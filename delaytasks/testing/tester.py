"""`DelaysTester`, with which users test their code: it runs tasks on a clock that the test sets,
records messages, and compares what was scheduled with what a test expects.

The last sections replace the time, connections, messages and processors of production.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import ANY

from kombu import Message as BrokerMessage
from sqlalchemy import URL, Connection, Engine, event, select
from sqlalchemy.util import await_only, greenlet_spawn
from sqlalchemy.util.concurrency import in_greenlet

from delaytasks.broker.link import Outgoing
from delaytasks.celery import current_delays
from delaytasks.db.database import Database, is_on_the_loop
from delaytasks.db.engines import masked
from delaytasks.db.migrations import url_of
from delaytasks.db.sessions import ConnectionSource, synchronous
from delaytasks.db.store import Store
from delaytasks.loops import twin
from delaytasks.model.clock import STARTED_MS, Clock, from_us, to_us, wall_ms
from delaytasks.model.errors import ConfigError, SessionUnusableError, UnknownTagError
from delaytasks.model.inputs import MAX_PRIORITY, Delay, check_delay, check_instant
from delaytasks.model.moves import LIVE, WAITING, Done, Outcome, Status
from delaytasks.model.task import DelayedTask, Settlement
from delaytasks.model.text import DEFERRALS, count
from delaytasks.operate.texts import show_from_now
from delaytasks.registry import ProcessorSpec, Registry
from delaytasks.run.calls import result_of, run_coroutine
from delaytasks.run.observers import Observer
from delaytasks.runtime import Runtime, runtime_of
from delaytasks.worker.processes import processes_of

if TYPE_CHECKING:
    from sqlalchemy.orm import Session
    from typing_extensions import Self

    from delaytasks.callbacks.sending import Callback, Message
    from delaytasks.client import DelayTasks

T = TypeVar("T")

# -- What ran in a test, and the loop that runs it on a clock that the test sets -------------------


#: The most tasks that one chunk claims.
CHUNK_ROWS = 100
#: One call runs no more tasks than this: a task that schedules itself would never let it end.
MAX_RUNS = 10_000


@dataclass(frozen=True)
class Run:
    """One run of a task.

    Attributes
    ----------
    task
        The task as it was when the run began.
    outcome
        What became of the task: `"succeed"`, `"fail"`, `"schedule_retry"`, `"snooze"`,
        `"withdraw"` (cancelled), `"expire"`, or `"give_back"` if it could not run.
    at
        The time of the run by the test's clock.
    error
        The exception that the processor raised, or None.
    """

    task: DelayedTask
    outcome: str
    at: datetime
    error: BaseException | None = None


class TestRunner(Observer):
    """Sweeps and runs for one tester, and keeps the runs."""

    __test__ = False

    def __init__(self, runtime: Runtime, clock: SettableClock) -> None:
        self.runs: list[Run] = []
        self._runtime, self._clock = runtime, clock
        self._runner = processes_of(runtime.celery).build_runner(self)
        #: When to look again at the waitlists of limited tags.
        self._rechecks: list[datetime] = []
        #: The number of runs before the call that is under way.
        self._earlier = 0
        self._has_looked = False

    def ended(self, settlement: Settlement, took_s: float, error: BaseException | None) -> None:
        self.runs.append(Run(settlement.task, settlement.move, self._clock.now(), error))

    def not_called(self, settlement: Settlement, claimed: datetime) -> None:
        why = settlement.error or ""
        if why.startswith(DEFERRALS["no_processor"]):
            why += "; if the task is of another application, give the tests a database of their own"
        error = None if settlement.move == "expire" else UnknownTagError(why, "tag")
        self.ended(settlement, 0, error)

    def new_runs(self, work: Callable[[], None]) -> list[Run]:
        """Do the work, and return the runs of it."""
        if not self._has_looked:
            if self._clock.now_us() >= STARTED_MS * 1000:  # else this test's own tasks look older
                _refuse_earlier_tasks(self._runtime.store)
            self._has_looked = True
        self._earlier = len(self.runs)
        work()
        return self.runs[self._earlier :]

    def run_due(self) -> None:
        """Run what is due now, until nothing is left."""
        if self._runtime.registry.schedules:
            from delaytasks.recurring.recurring import follow

            follow(self._runtime)
        self._runtime.make_recurring_tasks()
        self._runtime.sweeper.release_resumed()
        while self._pass():
            if len(self.runs) - self._earlier > MAX_RUNS:
                raise AssertionError(
                    f"more than {MAX_RUNS:,} tasks ran in one call, and more are due: does a "
                    "processor schedule its own task again? Otherwise go forward in smaller steps"
                )

    def fast_forward(self, until: datetime) -> None:
        """Run everything that falls due up to `until`, each at its due time, and end there."""
        self.run_due()
        while (at := self._next_due(until)) is not None:
            self._clock.move_to(at)
            self.run_due()
            if any(run.outcome == "give_back" for run in self.runs[self._earlier :]):
                return
        if self._clock.now() < until:
            self._clock.move_to(until)
            self.run_due()

    def _pass(self) -> bool:
        """Run a chunk of each queue; return whether a task was claimed, and ran or was held."""
        has_claimed = False
        self._rechecks = []
        for queue in sorted({level.queue for level in self._runtime.store.sweeps.levels(0)}):
            report = self._runner.run_due(queue, range(MAX_PRIORITY + 1), CHUNK_ROWS)
            has_claimed |= report.claimed > 0
            self._rechecks += [
                self._clock.now() + timedelta(seconds=waitlist.recheck_s)
                for waitlist in report.waitlists
                if not waitlist.open
            ]
        return has_claimed

    def _next_due(self, until: datetime) -> datetime | None:
        """Return the next time at which something is to do, up to `until`."""
        runtime, now = self._runtime, self._clock.now()
        sweeps, settings = runtime.store.sweeps, runtime.settings
        times = [from_us(task.due_us) for task in sweeps.first_due_between(now, until, 1)]
        next_occurrence = sweeps.first_occurrence()
        if next_occurrence is not None:
            made_at = next_occurrence - timedelta(seconds=settings.recurring_lead_s)
            # What could not be made now is tried again as often as beat sweeps.
            again = now + timedelta(seconds=settings.sweep_s)
            times.append(made_at if made_at > now else again)
        times += self._rechecks
        times += [at for at in runtime.policy_cache.known.ends if at > now]
        return min((at for at in times if at <= until), default=None)


def _refuse_earlier_tasks(store: Store) -> None:
    """Raise an error if the database has live tasks that were scheduled before this process began.

    They are probably those of a running application, and the test would run them.
    """
    t = store.schema.tasks.c
    is_earlier = t.status.in_(sorted(map(int, LIVE))), t.create_time < from_us(STARTED_MS * 1000)
    query = select(t.tag, t.id).where(*is_earlier).limit(1)
    url, earlier = store.database.autocommitted(lambda c: (c.engine.url, c.execute(query).first()))
    if earlier is not None:
        raise ConfigError(
            f"the database {masked(url)} has live tasks that were scheduled before these tests "
            f"began, such as {earlier.id} (tag {earlier.tag!r}), and a test would run them: give "
            "the tests a database of their own, or begin with tester.clear()"
        )


# -- Compares what was scheduled with what a test expects, and describes the difference -----------


#: How far a due time may be from the expected one: some time passes between call and assertion.
TOLERANCE = timedelta(seconds=1)
#: The most tasks that a message shows.
MAX_TASKS_SHOWN = 5


class Expectation:
    """What a test expects of a scheduled task, at the test's present time."""

    def __init__(self, now: datetime, **fields: Any) -> None:
        self._now = now
        self._fields = {name: value for name, value in fields.items() if value is not ANY}

    def differences(self, task: DelayedTask) -> list[str]:
        """Return a line for each value in which the task differs."""
        lines = []
        for name, value in self._fields.items():
            if name == "within":
                differs = task.due > self._now + check_delay(value) + TOLERANCE
            elif name == "at":
                differs = abs(task.due - value) > TOLERANCE
            else:
                differs = getattr(task, name) != value
            if differs:
                got = self._due(task) if name in ("within", "at") else repr(getattr(task, name))
                wanted = value if name == "within" else repr(value)
                lines.append(f"{name}: expected {wanted}, got {got}")
        return lines

    def message(self, title: str, tasks: Sequence[DelayedTask]) -> str:
        """Return the message of an assertion: the tasks that wait, the most similar first."""
        wanted = ", ".join(f"{name}={value!r}" for name, value in self._fields.items())
        are = "is" if len(tasks) == 1 else "are"
        lines = [f"{title} {wanted}; {count(len(tasks), 'task')} {are} waiting"]
        closest = sorted(tasks, key=lambda task: len(self.differences(task)))
        for task in closest[:MAX_TASKS_SHOWN]:
            key = "" if task.key is None else f" key={task.key!r}"
            lines.append(f"  {task.tag}{key} body={task.body!r} due {self._due(task)}")
            lines += [f"    {line}" for line in self.differences(task)]
        return "\n".join(lines)

    def _due(self, task: DelayedTask) -> str:
        return f"{show_from_now(task.due, self._now)} ({task.due.isoformat(timespec='seconds')})"


# -- The tester -----------------------------------------------------------------------------------


#: A chunk may take this long: a developer may stop in a debugger.
CHUNK_S = 3600.0


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

    Examples
    --------
    >>> with DelaysTester(delays) as tester:
    ...     place_order(7)
    ...     tester.assert_scheduled("order.close", key="7", within="30m")
    ...     tester.fast_forward("30m")
    """

    def __init__(self, delays: DelayTasks | None = None, *, bind: Any = None) -> None:
        self._delays = delays if delays is not None else current_delays()
        self._source = None if bind is None else source_of(bind)
        self._clock = SettableClock()
        self._runner: TestRunner | None = None
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
        with ExitStack() as opening:
            runtime = delays._make_runtime(_chunk_time_budget_s=CHUNK_S, lease=4 * CHUNK_S)
            self._replace_parts(runtime)
            opening.callback(runtime.close)
            before = delays._exchange_runtime(runtime, is_in_test=True)
            opening.callback(delays._exchange_runtime, before, is_in_test=False)
            opening.enter_context(simulated_time(self._clock))
            #: Runs the coroutines of processors if the test has no loop of its own.
            self._loop = opening.enter_context(closing(asyncio.new_event_loop()))
            self._runner = TestRunner(runtime, self._clock)
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
        page = self._delays.find(limit=1000, **filters)
        found = page.tasks
        while page.cursor is not None:
            page = self._delays.find(cursor=page.cursor, limit=1000, **filters)
            found += page.tasks
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
        expected = Expectation(self.now, tag=tag, **fields, **times)
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
        expected = Expectation(self.now, tag=tag, key=key, body=body)
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

    # -- how the instance differs from production --------------------------------------------------

    def _replace_parts(self, runtime: Runtime) -> None:
        settings, source = runtime.settings, self._source
        database = SimulatedDatabase if source is None else partial(BorrowedDatabase, source)
        url, remedy = url_of(settings), runtime.tables_remedy
        runtime.store = Store(url, settings, runtime.cipher, database, remedy)
        runtime.clock = self._clock
        runtime.registry = SequentialRegistry(runtime.registry)
        # Arms nothing, since the test itself runs the tasks.
        timer: Any = SimpleNamespace(is_up=True, arm=lambda entries: True)
        runtime.timer = runtime.producer_timer = timer
        runtime.direct_timer = runtime.redis_timer = None
        callbacks: Any = _keeping(self.sent_callbacks)
        callbacks.content = runtime.http_callbacks.content  # checks them as in production
        runtime.http_callbacks = callbacks
        runtime.queue_callbacks = _keeping(self.sent_messages)
        link: Any = SimpleNamespace(publish=self._keep_tasks, close=lambda: None)
        runtime.confirming_links = link
        if source is not None:
            runtime.processor_contexts = [source.around_processor, *runtime.processor_contexts]
            runtime.in_framework = source.in_framework or runtime.in_framework

    def _keep_tasks(self, messages: Sequence[Outgoing]) -> list[Exception | None]:
        """Keep the messages of Celery tasks, as if the broker had them."""
        self.sent_tasks += map(SentTask.of, messages)
        return [None] * len(messages)

    @property
    def _started(self) -> TestRunner:
        if self._runner is None:
            raise RuntimeError("the tester is not started: use `with DelaysTester(...) as tester`")
        return self._runner

    def _run(self, work: Callable[[], None], raises: bool) -> list[Run]:
        __tracebackhide__ = True
        context = contextvars.copy_context()
        context.run(run_coroutine.set, self._run_coroutine)
        new = context.run(self._started.new_runs, work)
        last = {run.task.id: run for run in new}
        for run in last.values():
            if raises and run.error is not None:
                raise run.error
        return new

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
            return await_only(asyncio.ensure_future(coroutine))
        if asyncio._get_running_loop() is None:
            return self._loop.run_until_complete(coroutine)
        # A synchronous call in an asynchronous test, whose loop waits for this call.
        context = contextvars.copy_context()
        context.run(run_coroutine.set, None)
        return context.run(result_of, coroutine)


def _keeping(sent: list[Any]) -> Callable[[Any, DelayedTask], Outcome]:
    """Return a function that keeps what it should send."""

    def keep(message: Any, task: DelayedTask) -> Outcome:
        sent.append(message)
        return Done()

    return keep


# -- The time of a test, which the clock and the statements read ----------------------------------


class SettableClock(Clock):
    """The time of one tester, which producers and runners read.

    It continues with the host's clock, which freezegun and time-machine replace, and asks no
    database. It is in whole milliseconds, because SQLite's clock has no more.
    """

    is_due = False

    def __init__(self) -> None:
        super().__init__()
        self._offset_us = 0

    def now_us(self) -> int:
        return wall_ms() * 1000 + self._offset_us

    def move_to(self, instant: datetime) -> None:
        """Continue at `instant`, rounded up to a millisecond so that what is due then is due."""
        self._offset_us = (-(-to_us(instant) // 1000) - wall_ms()) * 1000


#: What marks a statement as one of ours: the names of the tables, or the label of the time.
_OUR_NAMES = ("yb_delay_", "db_now")
#: The statement clock of each database as `delaytasks.db.types` writes it, and the notation of
#: an instant in its place.
_CLOCKS = {
    "postgresql": ("clock_timestamp()", "CAST('{}+00:00' AS TIMESTAMPTZ)"),
    "mysql": ("UTC_TIMESTAMP(6)", "CAST('{}' AS DATETIME(6))"),
    "mariadb": ("UTC_TIMESTAMP(6)", "CAST('{}' AS DATETIME(6))"),
    "sqlite": ("%f000', 'now'", "%f000', '{:.23}'"),  # milliseconds
}


@contextmanager
def simulated_time(clock: Clock) -> Iterator[None]:
    """Let the statements of all engines of this process, the application's included, read `clock`
    in place of the database's clock.

    The text of a statement changes with each instant, so statements must not be prepared.
    """

    def rewrite(
        connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any
    ) -> tuple[str, Any]:
        function, literal = _CLOCKS.get(connection.dialect.name, ("", ""))
        if function and function in statement and any(name in statement for name in _OUR_NAMES):
            instant = from_us(clock.now_us()).strftime("%Y-%m-%d %H:%M:%S.%f")
            statement = statement.replace(function, literal.format(instant))
        return statement, parameters

    event.listen(Engine, "before_cursor_execute", rewrite, retval=True)
    try:
        yield
    finally:
        event.remove(Engine, "before_cursor_execute", rewrite)


# -- The connections on which a test runs the statements of delaytasks ----------------------------


def source_of(given: Any) -> ConnectionSource:
    """Return the connections of what a test passes as `bind`.

    Raises
    ------
    ConfigError
        If it is neither an engine, nor a connection, nor a session.
    """
    from sqlalchemy.orm import Session

    bind = synchronous(given)
    if isinstance(bind, Session) and isinstance(bind.bind, Connection):
        # A rollback of the session's own savepoint must not undo what the tester has written.
        bind = bind.bind
    if not isinstance(bind, (Engine, Connection, Session)):
        raise ConfigError(
            "bind= takes a SQLAlchemy Engine, Connection or Session, or an asynchronous one of "
            f"them, not {type(given).__name__}"
        )
    connect = bind.begin if isinstance(bind, Engine) else partial(_in_savepoint, bind)
    return ConnectionSource(connect, in_framework=on_the_loop)


@contextmanager
def _in_savepoint(bind: Connection | Session) -> Iterator[Connection]:
    connection = bind if isinstance(bind, Connection) else bind.connection()
    if connection.dialect.is_async and not in_greenlet():
        raise SessionUnusableError(
            "bind= is asynchronous: await the twin of the tester's method, such as arun_due"
        )
    with connection.begin_nested():
        yield connection


async def on_the_loop(call: Callable[[], T]) -> T:
    """Return `call()`, which runs in a greenlet of the event loop's thread."""
    result: T = await greenlet_spawn(call)
    return result


class SimulatedDatabase(Database):
    """Connections of our own, whose statements read the test's clock."""

    def __init__(self, url: str, pool_size: int, tables_remedy: str) -> None:
        in_a_test = "call delaytasks.testing.create_tables(connection) in the test"
        super().__init__(url, pool_size, f"{in_a_test}, or {tables_remedy}")
        # The text of a prepared statement cannot change with the time.
        self.can = replace(self.can, prepare=False)


class BorrowedDatabase(SimulatedDatabase):
    """Runs every statement on the connections of a test."""

    def __init__(self, source: ConnectionSource, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._source = source

    def remedy_at(self, url: URL) -> str:
        return self.tables_remedy  # the test's connection need not be on the URL of the settings

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with self._source.connect() as connection:
            # As on our own engines: psycopg 3 and asyncpg do not count rows otherwise.
            yield connection.execution_options(preserve_rowcount=True)

    def stream(self, query: Any, size: int, may_take_long: bool = False) -> Iterator[Any]:
        rows = self.rows(query)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def repeat(self, work: Callable[[Any], T], connect: Any, *_: Any, **__: Any) -> T:
        """Call `work` once, in this thread: after an error the test's transaction cannot go on."""
        on = connect if connect is nullcontext else self.begin
        return super().repeat(work, on, tries=1, may_switch=False)


# -- What would be sent is kept -------------------------------------------------------------------


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

    @classmethod
    def of(cls, message: Outgoing) -> SentTask:
        """Return the task of a message in Celery's protocol."""
        options = message.options
        headers, kind = options["headers"], options["content_type"]
        encoding = {"content_type": kind, "content_encoding": options["content_encoding"]}
        decode: Any = BrokerMessage
        args, kwargs, _ = decode(message.body, headers=headers, accept={kind}, **encoding).payload
        name, queue = headers["task"], options["routing_key"]
        return cls(name, headers["id"], list(args), dict(kwargs), queue, headers)


class SequentialRegistry(Registry):
    """The registered processors, none of which runs its tasks in threads of its own.

    A test has one connection, and its transaction belongs to one thread.
    """

    def __init__(self, registry: Registry) -> None:
        self.__dict__ = registry.__dict__  # what a test registers is in both of them

    def get(self, tag: str) -> ProcessorSpec | None:
        found = super().get(tag)
        return found if found is None else replace(found, in_flight=None)
