"""What is registered for a tag: a processor with its options, and the handle of its function.

`@delays.processor(tag)` checks the options and the function, keeps both as a `ProcessorSpec` in the
`Registry` of the instance, and returns a `Processor`, which schedules tasks of the tag.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypedDict, TypeVar

from delaytasks.model.body import check_version
from delaytasks.model.errors import (
    BodyRefusedError,
    ConfigError,
    InvalidInputError,
    UnknownTagError,
)
from delaytasks.model.inputs import (
    MAX_SLOTS,
    Delay,
    check_integer,
    check_queue,
    check_tag,
    check_wait,
    processor_tag,
)
from delaytasks.model.moves import MAX_RETRY_DELAY_S, Retries, RetryRule, RetrySchedule
from delaytasks.model.task import DelayedTask, new_task, new_task_of
from delaytasks.model.text import shown
from delaytasks.twins import twin

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.client import DelayTasks
    from delaytasks.model.task import OnConflict, TaskOptions

# -- the options of a processor, and the registry -------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])
#: The most rows of a batch, since a chunk has at most as many.
MAX_BATCH = 200
#: The beginning of the tags that each registry has.
_INTERNAL = "delaytasks."
#: The slots of an `async def` function without `in_flight`.
ASYNC_SLOTS = 100
#: Characters of the schema's error text. A pydantic error about a long list fills a page.
MAX_REASON_LENGTH = 500


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
    #: The newest version of the bodies that the function takes.
    body_version: int | None
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
    schema: Callable[..., Any] | None
    #: The newest version of the bodies that the function takes; None if they have no versions.
    body_version: int | None
    limit_key: Callable[[Any], str | None] | None
    batch: int | None
    in_flight: int | None
    soft_time_limit_s: float | None
    time_limit_s: float | None

    @property
    def has_time_limits(self) -> bool:
        return self.soft_time_limit_s is not None or self.time_limit_s is not None

    def is_newer(self, version: int) -> bool:
        """Whether only newer code can run a body of this version."""
        return self.body_version is not None and version > self.body_version

    def checked(self, body: Any) -> Any:
        """Return the body as the schema made it, or raise `BodyRefusedError` with the reason."""
        schema = self.schema
        if schema is None:
            return body
        has_fields = is_dataclass(schema)
        try:
            if hasattr(schema, "model_validate"):
                return schema.model_validate(body)
            if has_fields and not isinstance(body, dict):
                raise TypeError(f"an object is needed, not {shown(body)}")
            return schema(**body) if has_fields else schema(body)
        except Exception as error:  # a schema may raise any exception
            name = getattr(schema, "__qualname__", repr(schema))
            why = f"{type(error).__name__}: {error}"[:MAX_REASON_LENGTH]
            raise BodyRefusedError(
                f"{name} refuses the body of a task of tag {self.tag!r}: {why}", "body"
            ) from error

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
        queue, version = options.get("queue"), options.get("body_version")
        soft_s, hard_s = _time_limits(options)
        describe = partial(
            ProcessorSpec,
            tag=check_tag(tag),
            queue=None if queue is None else check_queue(queue),
            retries=Retries.of(options.get("retries")),
            max_late_s=_seconds("max_late", options.get("max_late")),
            on_time_s=_seconds("on_time", options.get("on_time")),
            keep_result=bool(options.get("keep_result")),
            schema=options.get("schema"),
            body_version=None if version is None else check_version(version),
            limit_key=options.get("limit_key"),
            batch=options.get("batch"),
            soft_time_limit_s=soft_s,
            time_limit_s=hard_s,
        )
        in_flight, batch = options.get("in_flight"), options.get("batch")
        if in_flight is not None:
            check_integer(in_flight, "in_flight", 1, MAX_SLOTS)
        if batch is not None:
            check_integer(batch, "batch", 1, MAX_BATCH)

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


# -- the handle of a function ---------------------------------------------------------------------

#: The body that callers schedule.
Body = TypeVar("Body")
P = ParamSpec("P")
Returned = TypeVar("Returned")
Returned_co = TypeVar("Returned_co", covariant=True)


class Processor(Generic[Body, P, Returned_co]):
    """A function that is registered for a tag. It can be called as before, and schedules tasks.

    `@delays.processor(tag)` makes it. Type checkers know the type of the body from the annotation
    of the function's first argument, unless it takes a batch, or what a function as the schema made
    of the body.

    Attributes
    ----------
    tag
        The tag.
    function
        The function itself, as workers call it.

    Examples
    --------
    >>> @delays.processor("order.close")
    ... def close_order(body: Order) -> None: ...
    >>> close_order.schedule(Order(7), "30m", key="7")
    """

    __name__: str

    def __init__(self, delays: DelayTasks, tag: str, function: Callable[P, Returned_co]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._delays = delays
        self.tag = tag
        if inspect.iscoroutinefunction(function) and hasattr(inspect, "markcoroutinefunction"):
            inspect.markcoroutinefunction(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Returned_co:
        """Call the function."""
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the function, such as `delay` if it is a Celery task."""
        if name == "function":  # a copy that is not initialized yet
            raise AttributeError(name)
        return getattr(self.function, name)

    def __reduce__(self) -> str:
        """Pickle the name, as of a function. The processor is an attribute of its module."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    def __repr__(self) -> str:
        return f"<Processor {self.tag!r}: {_name(self.function)}>"

    def schedule(
        self,
        body: Body,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayedTask:
        """Schedule a task of this tag. See `DelayTasks.schedule_delay`.

        Examples
        --------
        >>> close_order.schedule({"order": 7}, "30m", key="7")
        """
        new = new_task(self.tag, body, delay, at, options)
        w = self._delays._runtime
        return w.producer.schedule(new, on_conflict, w.transactions.of_new(session, "aschedule"))

    aschedule = twin(schedule)

    def schedule_many(
        self,
        tasks: Iterable[tuple[Body, Delay | datetime]],
        *,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        on_batch: Callable[[Sequence[DelayedTask]], None] | None = None,
        **options: Unpack[TaskOptions],
    ) -> int:
        """Schedule many tasks of this tag. See `DelayTasks.schedule_many`.

        Parameters
        ----------
        tasks
            Tuples of a body and a delay or an instant.
        **options
            The options of all tasks, such as `priority`.

        Examples
        --------
        >>> send_mail.schedule_many(({"to": user}, "1h") for user in users)
        10000
        """
        new = (new_task_of((self.tag, *task))._replace(**options) for task in tasks)
        return self._delays.schedule_many(
            new, on_conflict=on_conflict, session=session, on_batch=on_batch
        )

    aschedule_many = twin(schedule_many)

    @property
    def _run_async(self) -> Callable[..., Awaitable[Any]]:
        return self._delays._run_async


class Decorator(Protocol):
    """Makes a processor of `f(body)` or `f(body, task)`, whose body has the annotated type."""

    def __call__(
        self, function: Callable[Concatenate[Body, P], Returned], /
    ) -> Processor[Body, Concatenate[Body, P], Returned]: ...
