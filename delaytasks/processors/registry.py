"""Which function processes which tag."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from delaytasks.core.body_schema import BodySchema
from delaytasks.core.errors import (
    BodyRefusedError,
    DuplicateProcessorError,
    InvalidDelayError,
    UnknownTagError,
)
from delaytasks.core.inputs import check_queue, check_tag, check_wait
from delaytasks.core.retry_schedule import MAX_RETRY_DELAY_S, Retries, RetryRule, RetrySchedule
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown
from delaytasks.processors.event_loop import result_of
from delaytasks.processors.thread_slots import MOST_PLACES

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])
#: A chunk has no more rows.
MOST_IN_BATCH = 1000
#: Of `async def` functions that do not say.
ASYNC_PLACES = 100


class ProcessorOptions(TypedDict, total=False):
    """What `@processor(tag, …)` may say about its tag."""

    #: Where its tasks go unless they name a queue.
    queue: str | None
    #: A ladder or its rungs ("15s 3m 10m"), for all exceptions or for each type; none: FAILED at once.
    retry: RetryRule
    #: A run that would begin later than this after its due time is CANCELLED instead.
    expires: float | str | timedelta | None
    #: Keep what the processor returns, as JSON.
    keep_result: bool
    #: It is called for up to so many tasks at once: `f(tasks)`, or `f(bodies, tasks)`.
    batch: int | None
    #: So many calls run side by side in each process; `async def` functions have a hundred places without it.
    in_flight: int | None
    #: What its bodies must be: a dataclass, a pydantic model, or a callable that takes the body.
    schema: Callable[..., Any] | None
    #: Whom a body is for, where limits are counted for each; a task may say it itself.
    concurrency_key: Callable[[Any], str | None] | None
    #: A run that takes longer gets Celery's `SoftTimeLimitExceeded`; one that takes longer than `time_limit` is killed.
    soft_time_limit: float | str | timedelta | None
    time_limit: float | str | timedelta | None


@dataclass(frozen=True, slots=True)
class Processor:
    tag: str
    function: Callable[..., Any]
    queue: str | None
    wants_task: bool
    retries: Retries
    expires_s: float | None
    keep_result: bool
    schema: BodySchema | None
    concurrency_key: Callable[[Any], str | None] | None
    batch: int | None
    in_flight: int | None
    soft_time_limit_s: float | None
    time_limit_s: float | None

    @property
    def has_time_limits(self) -> bool:
        return self.soft_time_limit_s is not None or self.time_limit_s is not None

    def __call__(self, task: DelayTask, body: Any) -> Any:
        if self.schema is not None:
            body = self.schema(body)
        result = self.function(body, task) if self.wants_task else self.function(body)
        return result_of(result) if type(result) is CoroutineType else result

    def given(self, body: Any) -> Any:
        """What the function is given for a body."""
        return body if self.schema is None else self.schema(body)

    def call(self, *arguments: Any) -> Any:
        result = self.function(*arguments)
        return result_of(result) if type(result) is CoroutineType else result

    def body_of(self, task: DelayTask) -> Any:
        return task.body

    def retry_schedule_for(self, error: BaseException, task: DelayTask) -> RetrySchedule | None:
        """What a task climbs whose run ended in `error`. A body that is refused now is refused on each rung."""
        return (
            None
            if isinstance(error, BodyRefusedError)
            else self.retries.retry_schedule_for(type(error), task.retry_schedule)
        )


class Registry:
    def __init__(self) -> None:
        self._processors: dict[str, Processor] = {}
        #: Tags whose runs may be killed, and after how many seconds.
        self.time_limits: dict[str, float] = {}

    def processor(self, tag: str, **options: Unpack[ProcessorOptions]) -> Callable[[F], F]:
        """Registers the decorated function for `tag`: `f(body)`, or `f(body, task)` to see the whole task."""
        unknown = options.keys() - ProcessorOptions.__annotations__.keys()
        if unknown:
            known = ", ".join(ProcessorOptions.__annotations__)
            raise TypeError(
                f"a processor has no option {', '.join(sorted(unknown))} (known: {known})"
            )
        queue, expires, schema = options.get("queue"), options.get("expires"), options.get("schema")
        soft_s, hard_s = _time_limits(options)
        describe = partial(
            Processor,
            tag=check_tag(tag),
            queue=None if queue is None else check_queue(queue),
            retries=Retries.of(options.get("retry")),
            expires_s=None if expires is None else check_wait(expires, MAX_RETRY_DELAY_S),
            keep_result=bool(options.get("keep_result")),
            schema=None if schema is None else BodySchema(tag, schema),
            concurrency_key=options.get("concurrency_key"),
            batch=_bounded("batch", options.get("batch"), MOST_IN_BATCH),
            soft_time_limit_s=soft_s,
            time_limit_s=hard_s,
        )
        in_flight = _bounded("in_flight", options.get("in_flight"), MOST_PLACES)

        def register(function: F) -> F:
            known = self._processors.get(tag)
            if known is not None and not _is_same(known.function, function):
                raise DuplicateProcessorError(
                    f"tag {tag!r} has the processor {_name(known.function)} already; give {_name(function)} another"
                )
            _refuse_generator_function(function)
            places = _places(function, in_flight, soft_s is not None or hard_s is not None)
            wants_task = _wants_task(function, options.get("batch") is not None)
            self._processors[tag] = describe(
                function=function, wants_task=wants_task, in_flight=places
            )
            if hard_s is not None:
                self.time_limits[tag] = hard_s
            return function

        return register

    def give_places(self, tag: str, in_flight: int) -> None:
        """To a processor of our own, once settings are known."""
        self._processors[tag] = replace(self._processors[tag], in_flight=in_flight)

    def get(self, tag: str) -> Processor | None:
        return self._processors.get(tag)

    def demand(self, tag: str) -> Processor:
        processor = self._processors.get(tag)
        if processor is None:
            known = difflib.get_close_matches(tag, self._processors, n=3, cutoff=0.0)
            raise UnknownTagError(
                f"no processor for tag {tag!r} (known: {_listed(known)}); is its module imported?"
            )
        return processor

    def meant_by(self, tag: str) -> str | None:
        """The tag that an unknown one may be a slip of."""
        close = (
            []
            if tag in self._processors
            else difflib.get_close_matches(tag, self._processors, n=1, cutoff=0.75)
        )
        return close[0] if close else None

    def queue_of(self, tag: str) -> str | None:
        processor = self._processors.get(tag)
        return None if processor is None else processor.queue

    def queues(self) -> set[str]:
        return {p.queue for p in self._processors.values() if p.queue is not None}

    def __iter__(self) -> Iterator[Processor]:
        return iter(self._processors.values())


def _time_limits(options: ProcessorOptions) -> tuple[float | None, float | None]:
    """The soft one and the hard one, in seconds."""
    soft_s, hard_s = (
        _time_limit(options.get("soft_time_limit")),
        _time_limit(options.get("time_limit")),
    )
    if soft_s is not None and hard_s is not None and soft_s >= hard_s:
        raise InvalidDelayError(
            f"a soft_time_limit of {soft_s:g} s comes too late for a time_limit of {hard_s:g} s: make it shorter"
        )
    return soft_s, hard_s


def _time_limit(limit: object) -> float | None:
    if limit is None:
        return None
    seconds = check_wait(limit, MAX_RETRY_DELAY_S, "a time limit")
    if seconds == 0:
        raise InvalidDelayError("a time limit of 0 leaves no time to run; None means no limit")
    return seconds


def _bounded(option: str, number: int | None, most: int) -> int | None:
    if number is None or (type(number) is int and 0 < number <= most):
        return number
    raise ValueError(f"{option}={shown(number)}: it is a number from 1 to {most}")


def _places(
    function: Callable[..., Any], in_flight: int | None, has_time_limits: bool
) -> int | None:
    is_async = inspect.iscoroutinefunction(function)
    if has_time_limits and (is_async or in_flight is not None):
        kind = "is async" if is_async else "has in_flight"
        raise ValueError(
            f"time limits are for what runs alone, and {_name(function)} {kind}: give what it waits for a timeout"
        )
    return ASYNC_PLACES if is_async and in_flight is None else in_flight


def _refuse_generator_function(function: Callable[..., Any]) -> None:
    """Raise an error for a function whose call would run none of its code."""
    for called in (function, type(function).__call__):
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError(
                f"{_name(function)} contains `yield`, so a call of it would run none of its code: "
                "a processor is a function or an `async def` function that ends with `return`"
            )


def _wants_task(function: Callable[..., Any], is_batch: bool) -> bool:
    """True for `f(body, task)`. Arguments with defaults are the function's own business."""
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
    """A module that is run as __main__ and imported as well registers its functions twice."""
    if known is function:
        return True
    here, there = getattr(known, "__code__", None), getattr(function, "__code__", None)
    return (
        here is not None
        and there is not None
        and (here.co_filename, here.co_firstlineno, here.co_name)
        == (
            there.co_filename,
            there.co_firstlineno,
            there.co_name,
        )
    )


def _listed(tags: list[str]) -> str:
    return ", ".join(map(repr, tags)) or "none"


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
