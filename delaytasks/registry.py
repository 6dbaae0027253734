"""The registered processors, and the threads and the event loop that call them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from delaytasks.model.body import BodySchema, BodyVersions, Upgrade
from delaytasks.model.clock import monotonic, reset_in_child
from delaytasks.model.errors import (
    BodyRefusedError,
    ConfigError,
    InvalidInputError,
    UnknownTagError,
)
from delaytasks.model.inputs import Delay, check_queue, check_tag, check_wait, processor_tag
from delaytasks.model.outcomes import MAX_RETRY_DELAY_S, Retries, RetryRule, RetrySchedule
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import shown

if TYPE_CHECKING:
    from typing_extensions import Unpack


# -- Threads for concurrent calls of processors; each tag has a limited number of slots -----------


T = TypeVar("T")
#: The most slots of one tag, and the most threads of one process.
MAX_SLOTS = 1000


class ThreadSlots:
    """The slots of a process, which its chunks share.

    A call that finds no idle thread starts one, which stays.
    """

    def __init__(self) -> None:
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._taken: Counter[str] = Counter()
        self._all_taken = 0
        self._threads = ThreadPoolExecutor(MAX_SLOTS, "delaytasks-row")
        #: The calls that ended since the last call of `ended`.
        self._ended, self._seconds = 0, 0.0

    def take(self, tag: str, slots: int, until: float) -> bool:
        """Take one of the tag's slots when one is free.

        Return False if this takes longer than `until`.
        """
        with self._changed:
            if not self._wait(lambda: self._is_free(tag, slots), until):
                return False
            self._taken[tag] += 1
            self._all_taken += 1
            return True

    def give_back(self, tag: str) -> None:
        """Free a slot in which no call was started."""
        with self._changed:
            self._leave(tag)
            self._changed.notify_all()

    def start(
        self, tag: str, slots: int, rows: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> None:
        """Run `call` in a thread for which a slot was taken.

        `done` gets the result after the slot is free.
        """
        self._threads.submit(self._run, tag, slots, rows, call, done)

    def free(self, tag: str, slots: int) -> int:
        with self._changed:
            return min(slots - self._taken[tag], MAX_SLOTS - self._all_taken)

    def wait(self, is_so: Callable[[], bool], until: float | None = None) -> bool:
        """Wait until `is_so` returns True, tested whenever a call has ended.

        Return False after `until`.
        """
        with self._changed:
            return self._wait(is_so, until)

    def notify(self) -> None:
        """Let the callers of `wait` test again."""
        with self._changed:
            self._changed.notify_all()

    def ended(self) -> tuple[int, float]:
        """Return the rows that ended since the last call, and their time divided by the slots."""
        if not self._ended:  # as in a process without concurrent calls
            return 0, 0.0
        with self._changed:
            ended, self._ended, self._seconds = (self._ended, self._seconds), 0, 0.0
            return ended

    def _run(
        self, tag: str, slots: int, rows: int, call: Callable[[], T], done: Callable[[T], None]
    ) -> None:
        began = monotonic()
        answer = call()
        with self._changed:
            self._ended += rows
            self._seconds += (monotonic() - began) / slots
            self._leave(tag)
        done(answer)
        self.notify()

    def _leave(self, tag: str) -> None:
        self._taken[tag] -= 1
        self._all_taken -= 1

    def _is_free(self, tag: str, slots: int) -> bool:
        return self._taken[tag] < slots and self._all_taken < MAX_SLOTS

    def _wait(self, is_so: Callable[[], bool], until: float | None) -> bool:
        while not is_so():
            left = None if until is None else until - monotonic()
            if left is not None and left <= 0:
                return False
            self._changed.wait(left)
        return True


F = TypeVar("F", bound=Callable[..., Any])
#: The most rows of a batch, since a chunk has at most as many.
MAX_BATCH = 200
#: The beginning of the tags that each registry has.
_INTERNAL = "delaytasks."
#: The slots of an `async def` function without `in_flight`.
ASYNC_SLOTS = 100


class CommonOptions(TypedDict, total=False):
    """The options of `@processor(tag, …)` on which the type of the processor does not depend."""

    #: The queue of tasks that name none.
    queue: str | None
    #: A retry schedule or its delays ("15s 3m 10m"), for all exceptions or by type. Without one the
    #: first failure is final.
    retries: RetryRule
    #: A task that would start later than this after its due time is CANCELLED instead.
    max_late: Delay | None
    #: A task that starts later than this after its due time is counted as late.
    on_time: Delay | None
    #: Whether to store what the processor returns, as JSON.
    keep_result: bool
    #: The number of concurrent calls in each process; the default is 100 for `async def` functions
    #: and otherwise 1.
    in_flight: int | None
    #: The version of the bodies that the function takes, and functions that make a body of the next
    #: version from a body of an older one.
    body_version: int | None
    upgrades: Mapping[int, Upgrade]
    #: Former tags of the function, whose rows it runs as well.
    aliases: Collection[str] | None
    #: Returns the limit key of a body, for limits per key; a task may have its own.
    limit_key: Callable[[Any], str | None] | None
    #: A longer run gets Celery's `SoftTimeLimitExceeded`; a run that is longer than `time_limit` is
    #: killed.
    soft_time_limit: Delay | None
    time_limit: Delay | None


class ProcessorOptions(CommonOptions, total=False):
    """The options of `@processor(tag, …)`."""

    #: One call gets at most this number of tasks: `f(tasks)`, or `f(bodies, tasks)`.
    batch: int | None
    #: Checks the bodies: a dataclass, a pydantic model, or a callable that takes the body.
    schema: Callable[..., Any] | None


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    tag: str
    function: Callable[..., Any]
    queue: str | None
    wants_task: bool
    retries: Retries
    max_late_s: float | None
    on_time_s: float | None
    keep_result: bool
    schema: BodySchema | None
    versions: BodyVersions | None
    limit_key: Callable[[Any], str | None] | None
    batch: int | None
    in_flight: int | None
    soft_time_limit_s: float | None
    time_limit_s: float | None

    @property
    def has_time_limits(self) -> bool:
        return self.soft_time_limit_s is not None or self.time_limit_s is not None

    def body_of(self, task: DelayedTask) -> Any:
        """Return the body in the version that the function takes."""
        if self.versions is None:
            return task.body
        return self.versions.upgraded(task.body, task.body_version)

    def checked(self, body: Any) -> Any:
        """Return the body as the schema made it."""
        return body if self.schema is None else self.schema(body)

    def retry_schedule_for(self, error: BaseException, task: DelayedTask) -> RetrySchedule | None:
        """Return the retry schedule of a task whose run ended in `error`."""
        if isinstance(error, BodyRefusedError):  # the next run would refuse it as well
            return None
        return self.retries.retry_schedule_for(type(error), task.retry_schedule)


class Registry:
    def __init__(self) -> None:
        self._processors: dict[str, ProcessorSpec] = {}
        #: Functions that return the recurring schedules which code declares, as
        #: `delaytasks.recurring` defines them.
        self.schedules: list[Callable[[], Any]] = []
        #: The hard time limit of each tag in seconds.
        self.time_limits: dict[str, float] = {}

    def processor(self, tag: str, **options: Unpack[ProcessorOptions]) -> Callable[[F], F]:
        """Register the decorated function, `f(body)` or `f(body, task)`, for `tag`."""
        unknown = options.keys() - ProcessorOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(ProcessorOptions.__annotations__)
            raise TypeError(
                f"a processor has no option {', '.join(sorted(unknown))} (known: {known})"
            )
        queue, schema = options.get("queue"), options.get("schema")
        soft_s, hard_s = _time_limits(options)
        describe = partial(
            ProcessorSpec,
            tag=check_tag(tag),
            queue=None if queue is None else check_queue(queue),
            retries=Retries.of(options.get("retries")),
            max_late_s=_seconds("max_late", options.get("max_late")),
            on_time_s=_seconds("on_time", options.get("on_time")),
            keep_result=bool(options.get("keep_result")),
            schema=None if schema is None else BodySchema(tag, schema),
            versions=BodyVersions.of(tag, options.get("body_version"), options.get("upgrades")),
            limit_key=options.get("limit_key"),
            batch=_bounded("batch", options.get("batch"), MAX_BATCH),
            soft_time_limit_s=soft_s,
            time_limit_s=hard_s,
        )
        in_flight = _bounded("in_flight", options.get("in_flight"), MAX_SLOTS)

        def register(function: F) -> F:
            known = self._processors.get(tag)
            if known is not None and not _is_same(known.function, function):
                raise ConfigError(
                    f"tag {tag!r} has the processor {_name(known.function)} already; give "
                    f"{_name(function)} another"
                )
            _refuse_generator_function(function)
            slots = _slots(function, in_flight, soft_s is not None or hard_s is not None)
            wants_task = _wants_task(function, options.get("batch") is not None)
            self._processors[tag] = describe(
                function=function, wants_task=wants_task, in_flight=slots
            )
            if hard_s is not None:
                self.time_limits[tag] = hard_s
            return function

        return register

    def set_in_flight(self, tag: str, in_flight: int) -> None:
        """Set `in_flight` of a processor of this package after the settings are known."""
        self._processors[tag] = replace(self._processors[tag], in_flight=in_flight)

    def get(self, tag: str) -> ProcessorSpec | None:
        spec = self._processors.get(tag)
        return spec or self._processors.get(processor_tag(tag))

    def check_unknown(self, tag: str, allowed: str | Collection[str]) -> None:
        """Raise `UnknownTagError` for a tag without a processor, unless it may be scheduled.

        `allowed` is the setting `tags`.
        """
        listed = () if isinstance(allowed, str) else allowed
        known = {*listed, *(name for name in self._processors if not name.startswith(_INTERNAL))}
        if tag in listed or allowed == "any" or (allowed == "auto" and not known):
            return
        close = difflib.get_close_matches(tag, known, n=1, cutoff=0.0)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownTagError(
            f"this process has no processor for tag {tag!r}; {hint}Otherwise import its module, "
            "add the tag to the setting tags, or set tags to 'any'",
            "tag",
        )

    def meant_by(self, tag: str) -> str | None:
        """Return the registered tag of which an unknown one may be a misspelling."""
        close = (
            []
            if self.get(tag) is not None
            else difflib.get_close_matches(tag, self._processors, n=1, cutoff=0.75)
        )
        return close[0] if close else None

    def queue_of(self, tag: str) -> str | None:
        processor = self._processors.get(tag)
        return None if processor is None else processor.queue

    def queues(self) -> set[str]:
        return {p.queue for p in self._processors.values() if p.queue is not None}

    def __iter__(self) -> Iterator[ProcessorSpec]:
        return iter(self._processors.values())


def tags_of(tag: str, aliases: Collection[str]) -> tuple[str, ...]:
    """Return the tag and the aliases of a processor."""
    if isinstance(aliases, (str, bytes)) or not isinstance(aliases, Collection):
        raise InvalidInputError(f"aliases is a list of tags, not {shown(aliases)}", "aliases")
    return (tag, *aliases)


def _time_limits(options: ProcessorOptions) -> tuple[float | None, float | None]:
    """Return the soft and the hard time limit in seconds."""
    soft_s = _time_limit("soft_time_limit", options.get("soft_time_limit"))
    hard_s = _time_limit("time_limit", options.get("time_limit"))
    if soft_s is not None and hard_s is not None and soft_s >= hard_s:
        raise InvalidInputError(
            f"a soft_time_limit of {soft_s:g} s comes too late for a time_limit of {hard_s:g} s: "
            "make it shorter",
            "soft_time_limit",
        )
    return soft_s, hard_s


def _time_limit(option: str, limit: object) -> float | None:
    if (seconds := _seconds(option, limit)) == 0:
        raise InvalidInputError(f"{option}=0 leaves no time to run; None means no limit", option)
    return seconds


def _seconds(option: str, duration: object) -> float | None:
    return None if duration is None else check_wait(duration, MAX_RETRY_DELAY_S, option)


def _bounded(option: str, number: int | None, most: int) -> int | None:
    if number is None or (type(number) is int and 0 < number <= most):
        return number
    raise InvalidInputError(f"{option} is a number from 1 to {most}, not {shown(number)}", option)


def _slots(
    function: Callable[..., Any], in_flight: int | None, has_time_limits: bool
) -> int | None:
    is_async = inspect.iscoroutinefunction(function)
    if has_time_limits and (is_async or in_flight is not None):
        kind = "is async" if is_async else "has in_flight"
        raise ValueError(
            f"time limits are for processors that run alone, and {_name(function)} {kind}: "
            "use timeouts instead"
        )
    return ASYNC_SLOTS if is_async and in_flight is None else in_flight


def _refuse_generator_function(function: Callable[..., Any]) -> None:
    """Raise an error for a function whose call would run none of its code."""
    for called in (function, type(function).__call__):
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError(
                f"{_name(function)} contains `yield`, so a call of it would run none of its code: "
                "a processor is a function or an `async def` function that ends with `return`"
            )


def _wants_task(function: Callable[..., Any], is_batch: bool) -> bool:
    """Whether the function is `f(body, task)`; arguments with defaults do not count."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in positional and parameter.default is parameter.empty
    ]
    if len(required) not in (1, 2):
        takes = (
            "(tasks) or (bodies, tasks), as batch= says" if is_batch else "(body) or (body, task)"
        )
        raise TypeError(
            f"a processor takes {takes}; {_name(function)} takes {len(required)} arguments"
        )
    return len(required) == 2


def _is_same(known: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Whether both are one function of a module that is run as __main__ and imported as well."""
    if known is function:
        return True
    here, there = getattr(known, "__code__", None), getattr(function, "__code__", None)
    return (
        here is not None
        and there is not None
        and (here.co_filename, here.co_firstlineno, here.co_name)
        == (there.co_filename, there.co_firstlineno, there.co_name)
    )


def _name(function: Callable[..., Any]) -> str:
    module = getattr(function, "__module__", "?")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


# -- The event loop of a process, in which processors that are `async def` run --------------------


#: The value of a coroutine, or its error.
ResultAndError = tuple[Any, BaseException | None]


#: Runs the coroutines of this context in place of the event loop. A test runs them in its own
#: thread or event loop, where its connections are.
run_coroutine: contextvars.ContextVar[Callable[[Coroutine[Any, Any, Any]], Any] | None] = (
    contextvars.ContextVar("run_coroutine", default=None)
)


class EventLoop:
    """An event loop in a thread of its own, which the first coroutine starts.

    All processors share one loop, and thus its clients and connections. If a coroutine stops the
    loop, the other coroutines on it fail, and the next one starts another loop.
    """

    def __init__(self) -> None:
        self._at_start: list[Callable[[], None]] = []
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        #: The results for which callers wait.
        self._answers: set[Future[ResultAndError]] = set()
        self._running: set[asyncio.Task[None]] = set()

    def result_of(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine with the caller's context variables, and return its result."""
        if (run := run_coroutine.get()) is not None:
            return run(coroutine)
        answer: Future[ResultAndError] = Future()

        def start() -> None:
            if answer.done():  # the loop was stopped before
                coroutine.close()
                return
            task = asyncio.ensure_future(_into(answer, coroutine))
            self._running.add(task)  # the loop itself has weak references only
            task.add_done_callback(self._running.discard)

        try:
            with self._lock:
                self._answers.add(answer)
                self._started().call_soon_threadsafe(start, context=contextvars.copy_context())
            value, error = answer.result()
        finally:  # a soft time limit ends the wait
            self._answers.discard(answer)
        if error is not None:
            raise error
        return value

    def at_start(self, call: Callable[[], None]) -> None:
        """Call it once in the thread of each event loop, before the coroutines that follow."""
        with self._lock:
            if call not in self._at_start:
                self._at_start.append(call)
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(call)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            for call in self._at_start:
                loop.call_soon(call)
            threading.Thread(
                target=self._run, args=(loop,), name="delaytasks-async", daemon=True
            ).start()
            self._loop = loop  # only now: a process may have too many threads
        return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_forever()
        finally:
            self._stopped(loop)

    def _stopped(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the callers that wait for coroutines of this loop fail, and end the coroutines."""
        with self._lock:
            self._loop = None
            answers, self._answers = self._answers, set()
        for answer in list(answers):
            if not answer.done():
                answer.set_result((None, RuntimeError(_STOPPED)))
        with contextlib.suppress(RuntimeError):  # one of them stopped the loop again
            loop.run_until_complete(_cancel_others())
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


_STOPPED = (
    "the event loop of this process was stopped while the coroutine ran: a processor, or a library "
    "that it uses, called `loop.stop()`, which ends all coroutines of the process; remove the call"
)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _into(answer: Future[ResultAndError], coroutine: Coroutine[Any, Any, Any]) -> None:
    """Pass on every exception, since an exit would end the loop and all coroutines in it."""
    result: ResultAndError
    try:
        result = await coroutine, None
    except BaseException as error:
        result = None, error
    if not answer.done():  # the loop was stopped before
        answer.set_result(result)


_of_process = EventLoop()
result_of = _of_process.result_of
at_start = _of_process.at_start


def awaited(value: Any) -> Any:
    """Return what a processor returned; if this is a coroutine, run it and return its result."""
    return result_of(value) if type(value) is CoroutineType else value
