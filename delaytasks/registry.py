"""What is registered for a tag: a processor with its options, and the handle of its function.

`@delays.processor(tag)` checks the options and the function, keeps both as a `ProcessorSpec` in the
`Registry` of the instance, and returns a `Processor`, which schedules tasks of the tag.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypedDict, TypeVar

from delaytasks.loops import twin
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
from delaytasks.model.moves import RetriesByError, RetryRule, RetrySchedule, retries_by_error
from delaytasks.model.task import DelayedTask, new_task, new_task_of
from delaytasks.model.text import shown

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


#: The checks of the options. A checked duration is in seconds, in the field `max_late_s` for
#: example.
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "queue": check_queue,
    "retries": retries_by_error,
    "keep_result": bool,
    "body_version": check_version,
    "batch": partial(check_integer, argument="batch", least=1, most=MAX_BATCH),
    "in_flight": partial(check_integer, argument="in_flight", least=1, most=MAX_SLOTS),
    "max_late": partial(check_wait, argument="max_late"),
    "soft_time_limit": partial(check_wait, argument="soft_time_limit", may_be_zero=False),
    "time_limit": partial(check_wait, argument="time_limit", may_be_zero=False),
}


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    tag: str
    function: Callable[..., Any]
    wants_task: bool
    queue: str | None = None
    retries: RetriesByError = field(default_factory=dict)
    max_late_s: float | None = None
    keep_result: bool = False
    schema: Callable[..., Any] | None = None
    #: The newest version of the bodies that the function takes; None if they have no versions.
    body_version: int | None = None
    limit_key: Callable[[Any], str | None] | None = None
    batch: int | None = None
    in_flight: int | None = None
    soft_time_limit_s: float | None = None
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        soft_s, hard_s = self.soft_time_limit_s, self.time_limit_s
        if soft_s is not None and hard_s is not None and soft_s >= hard_s:
            raise InvalidInputError(
                f"a soft_time_limit of {soft_s:g} s comes too late for a time_limit of {hard_s:g} "
                "s: make it shorter",
                "soft_time_limit",
            )
        if self.has_time_limits and self.in_flight is not None:
            raise ValueError(
                f"time limits are for processors that run alone, and {_name(self.function)} is "
                "async or has in_flight: use timeouts instead"
            )

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

    def retry_schedule_for(
        self, kind: type[BaseException], task: DelayedTask
    ) -> RetrySchedule | None:
        """Return the retry schedule of a task whose run raised such an error; None: it is FAILED.

        | the error is                                   | the retry schedule                    |
        |------------------------------------------------|---------------------------------------|
        | `BodyRefusedError`                             | none: the next run would refuse it    |
        | of a type for which the tag says None          | none                                  |
        | of a type for which the tag has a schedule     | the task's own one, or else this one  |
        | another `Exception`                            | the task's own one, if it has one     |
        | `SystemExit` or another that is no `Exception` | none                                  |

        The nearest base class that the tag names decides; a tag with one schedule names
        `Exception`. Some errors are not looked up here: `TaskRun.settlement` and `of_error` treat
        those of a cancelled task and of a lease that ends. `ends_process` finds those that end the
        worker, whose rows are recovered.
        """
        if issubclass(kind, BodyRefusedError):
            return None
        own = task.retry_schedule
        for base in kind.__mro__:
            if base in self.retries:
                of_tag = self.retries[base]
                return of_tag and (own or of_tag)
        return own if issubclass(kind, Exception) else None


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
        check_tag(tag)
        given = _checked(options)

        def register(function: F) -> F:
            known = self._processors.get(tag)
            if known is not None and _place(known.function) != _place(function):
                raise ConfigError(
                    f"tag {tag!r} has the processor {_name(known.function)} already; give "
                    f"{_name(function)} another"
                )
            _refuse_generator_function(function)
            slots = {"in_flight": ASYNC_SLOTS} if inspect.iscoroutinefunction(function) else {}
            spec = ProcessorSpec(tag, function, _wants_task(function), **{**slots, **given})
            self._processors[tag] = spec
            self.time_limits.pop(tag, None)
            if spec.time_limit_s is not None:
                self.time_limits[tag] = spec.time_limit_s
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

    def queue_of(self, tag: str) -> str | None:
        processor = self._processors.get(tag)
        return None if processor is None else processor.queue

    def queues(self) -> set[str]:
        return {p.queue for p in self._processors.values() if p.queue is not None}

    def __iter__(self) -> Iterator[ProcessorSpec]:
        return iter(self._processors.values())


def _checked(options: ProcessorOptions) -> dict[str, Any]:
    """Return the fields of `ProcessorSpec` that options give; None means that one is not given."""
    known, given = ProcessorOptions.__annotations__.keys() - {"aliases"}, dict[str, Any]()
    for name, value in options.items():
        if name not in known:
            names = ", ".join(sorted(known))
            raise TypeError(f"a processor has no option {name} (known: {names})")
        if value is not None:
            field = name if name in ProcessorSpec.__slots__ else f"{name}_s"
            given[field] = _CHECKS[name](value) if name in _CHECKS else value
    return given


def tags_of(tag: str, aliases: Collection[str]) -> tuple[str, ...]:
    """Return the tag and the aliases of a processor."""
    if isinstance(aliases, (str, bytes)) or not isinstance(aliases, Collection):
        raise InvalidInputError(f"aliases is a list of tags, not {shown(aliases)}", "aliases")
    return (tag, *aliases)


def _refuse_generator_function(function: Callable[..., Any]) -> None:
    """Raise an error for a function whose call would run none of its code."""
    for called in (function, type(function).__call__):
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise TypeError(
                f"{_name(function)} contains `yield`, so a call of it would run none of its code: "
                "a processor is a function or an `async def` function that ends with `return`"
            )


def _wants_task(function: Callable[..., Any]) -> bool:
    """Whether the function is `f(body, task)`; arguments with defaults do not count."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = sum(
        parameter.kind in positional and parameter.default is parameter.empty
        for parameter in inspect.signature(function).parameters.values()
    )
    if required not in (1, 2):
        raise TypeError(
            "a processor takes (body) or (body, task), and with batch= (tasks) or (bodies, tasks); "
            f"{_name(function)} takes {required} arguments"
        )
    return required == 2


def _place(function: Callable[..., Any]) -> object:
    """Return the same for a function of a module that is run as __main__ and imported as well."""
    code = getattr(function, "__code__", None)
    return function if code is None else (code.co_filename, code.co_firstlineno, code.co_name)


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
