"""The instance of `DelayTasks` under test: how it differs from production, and its runs."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from delaytasks.core.celery_calls import Callback, Message
from delaytasks.core.text import count
from delaytasks.processors.event_loop import result_of, run_coroutine
from delaytasks.runtime import runtime_of
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
)
from delaytasks.storage.migrations import url_of
from delaytasks.storage.simulated_time import SimulatedTime
from delaytasks.storage.store import Store
from delaytasks.testing.clock import SettableClock, SettableTime
from delaytasks.testing.runs import Run, TestRunner
from delaytasks.testing.senders import NoTimer, RecordingCallbacks, RecordingPublisher, SentTask
from delaytasks.worker.celery_tasks import processes_of

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.runtime import Runtime

T = TypeVar("T")
#: A chunk may take this long: a developer may stop in a debugger.
CHUNK_IN_TEST_S = 3600.0


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
        runtime_of(delays).celery.loader.import_default_modules()
        source = self._source or delays._test_connections()
        self._source = source
        with ExitStack() as opening:
            runtime = delays._make_runtime(**self._settings())
            self._replace_parts(runtime, source)
            opening.callback(runtime.close)
            before = delays._exchange_runtime(runtime, is_in_test=True)
            opening.callback(delays._exchange_runtime, before, is_in_test=False)
            opening.enter_context(time.on_engines())
            if source is not None:
                opening.enter_context(source.rewriting(time))
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
        settings = {"chunk_time_budget_s": CHUNK_IN_TEST_S, "lease_s": 4 * CHUNK_IN_TEST_S}
        return {**settings, "horizon_s": None} if self._runs_inline else settings

    def _replace_parts(self, runtime: Runtime, source: ConnectionSource | None) -> None:
        settings = runtime.settings
        database = SimulatedDatabase if source is None else partial(BorrowedDatabase, source)
        url, remedy = url_of(settings), runtime.tables_remedy
        runtime.store = Store(url, settings, runtime.cipher, database, remedy)
        runtime.clock = SettableClock(self.time, runtime.ask_now)
        runtime.timer = NoTimer(self._run_inline if self._runs_inline else lambda: None)
        runtime.direct_timer = runtime.redis_timer = runtime.background_timer = None
        runtime.callbacks = RecordingCallbacks(
            self.sent_callbacks, self.sent_messages, runtime.celery, settings, runtime.clock
        )
        runtime.message_publisher = RecordingPublisher(self.sent_tasks)
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


class TesterPart:
    """A part of `DelaysTester`."""

    def __init__(self, instance: InstanceInTest) -> None:
        self._instance = instance
