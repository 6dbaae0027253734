"""Threads: loops, pools, calls with a time limit, and the asynchronous twins."""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from delaytasks.events import Events
from delaytasks.model.clock import fork_safe, monotonic

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.runtime import Runtime

#: The rest after a turn that failed.
FAILED_REST_S = 1.0


class AnswerLimit(threading.local):
    """How long a step of this thread may wait for an answer of the database."""

    #: None for the limit of all other threads.
    seconds: float | None = None


answer_limit = AnswerLimit()


def limit_answers(seconds: float | None) -> None:
    """From now on, let no step of this thread wait longer for an answer, up to a second more."""
    answer_limit.seconds = seconds


class Loop:
    """Calls `turn` again and again in a thread of its own.

    `turn` returns the seconds to rest after it, or None to rest until `wake` is called. After a
    turn that fails, which is reported, the loop rests for `FAILED_REST_S`.

    Nothing watches a loop, so each step of a turn has a time limit: connections whose database is
    silent are cut, after `answer_s` if it is given, and Redis and the broker have limits for their
    sockets.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        events: Events,
        answer_s: float | None = None,
    ) -> None:
        self.name = name
        self._turn = turn
        self._events = events
        self._wake = threading.Event()
        self._answer_s = answer_s
        self._thread: threading.Thread | None = None
        self.is_running = False
        self._turned_at: float | None = None

    def start(self) -> None:
        self.is_running = True
        name = f"delaytasks-{self.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Start the next turn without a further rest."""
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop after the current turn, and wait up to `timeout_s` seconds for its end."""
        self.is_running = False
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def info(self) -> dict[str, float | None]:
        """Return the seconds since the last turn began. The turn may last still."""
        turned_at = self._turned_at
        return {"turned_s_ago": None if turned_at is None else round(monotonic() - turned_at, 3)}

    def _run(self) -> None:
        limit_answers(self._answer_s)
        while True:
            self._wake.clear()  # first, since `stop` may set it meanwhile
            if not self.is_running:
                return
            self._turned_at = monotonic()
            rest_s: float | None = FAILED_REST_S
            try:
                rest_s = self._turn()
            except BaseException as error:  # also `SystemExit`: the worker needs each loop
                self._events.failed(self.name, error)
            if self.is_running:
                self._wake.wait(rest_s)


# -- Calls that may wait for a network, for callers that must not wait ----------------------------


T = TypeVar("T")


def start_thread(
    name: str, work: Callable[[], T], done: Callable[[Future[T]], object]
) -> threading.Thread:
    """Start a thread that does the work, and then calls `done` with the result or the error."""

    def run() -> None:
        answer: Future[T] = Future()
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
        done(answer)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def within(limit_s: float, work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise `TimeoutError` if that takes longer than `limit_s`.

    A thread does the work, and continues after the timeout. If no thread can be started, the caller
    does the work.
    """
    answers: SimpleQueue[Future[T]] = SimpleQueue()
    try:
        start_thread("delaytasks-bounded", work, answers.put)
    except RuntimeError:  # the interpreter is ending
        return work()
    try:
        return answers.get(timeout=max(limit_s, 0.001)).result()
    except Empty:
        raise TimeoutError(f"no answer within {limit_s:g} s") from None


# -- A bounded pool of threads for blocking calls of an event loop --------------------------------


class ThreadPool:
    """Runs up to `size` calls simultaneously. Further calls wait, in their order.

    The first call starts the first thread. A normal end of the process waits for all calls.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        fork_safe(self)

    def after_fork(self) -> None:
        """Forget the threads of the parent process."""
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` in a thread, with the context variables of the caller."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._size, self._name)
            return self._executor.submit(copy_context().run, call)

    def close(self) -> None:
        """Wait for all calls. A later call starts threads again."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


# -- availability ---------------------------------------------------------------------------------

# The availability of a service, with a rest after each failure and a callback for each change.


#: Seconds after a failure in which callers do not try, so that they do not wait for the service.
SERVICE_REST_S = 1.0


class Availability:
    """Calls `on_down(error)` or `on_up()` once for each change. Thread-safe."""

    def __init__(
        self,
        on_down: Callable[[str], None],
        on_up: Callable[[], None] = lambda: None,
        rest_s: float = SERVICE_REST_S,
    ) -> None:
        self._on_down = on_down
        self._on_up = on_up
        self._rest_s = rest_s
        self.is_up = True
        self._rests_until = 0.0
        fork_safe(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def is_resting(self) -> bool:
        return monotonic() < self._rests_until

    def failed(self, error: str) -> None:
        self._rests_until = monotonic() + self._rest_s
        if self._turn(is_up=False):
            self._on_down(error)

    def answered(self) -> None:
        self._rests_until = 0.0
        if not self.is_up and self._turn(is_up=True):
            self._on_up()

    def _turn(self, is_up: bool) -> bool:
        with self._lock:
            is_new, self.is_up = self.is_up is not is_up, is_up
            return is_new


# -- The asynchronous twins of the methods that wait for a database or a broker --------------------

# A twin is one line beside its method: `acancel = twin(cancel)`. It has the parameters of the
# method, its result and its errors, and runs the method without blocking the event loop.


P = ParamSpec("P")


class RunsAsync(Protocol):
    """An object whose methods have twins."""

    @property
    def _run_async(self) -> Callable[..., Awaitable[Any]]:
        """Run a method with its arguments, as `AsyncCalls.run` does."""


Self_ = TypeVar("Self_", bound=RunsAsync)


def twin(
    method: Callable[Concatenate[Self_, P], T],
) -> Callable[Concatenate[Self_, P], Coroutine[Any, Any, T]]:
    """Return the asynchronous twin of a method, for the body of its class.

    Examples
    --------
    >>> acancel = twin(cancel)
    """
    name, code = method.__name__, method.__code__
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    # `AsyncCalls.run` looks for the session of `transaction` if a method can take one.
    default: dict[str, Any] = {"session": None} if "session" in parameters else {}

    @functools.wraps(method)
    async def run(self: Self_, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await self._run_async(getattr(self, name), *args, **{**default, **kwargs})
        return result

    summary = (method.__doc__ or "").partition("\n\n")[0]
    run.__name__ = f"a{name}"
    run.__qualname__ = f"{method.__qualname__.rpartition('.')[0]}.a{name}"
    run.__doc__ = f"{summary}\n\nThis is the asynchronous twin of `{name}`."
    return run


class CallGroup:
    """Methods of a `DelayTasks` that share a name of their own, such as `delays.bulk`."""

    def __init__(self, delays: DelayTasks) -> None:
        self._delays = delays

    @property
    def _runtime(self) -> Runtime:
        return self._delays._runtime

    @property
    def _run_async(self) -> Callable[..., Awaitable[Any]]:
        return self._delays._run_async
