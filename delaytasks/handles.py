"""`Processor`, the handle that `@delays.processor(tag)` makes of a function."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from delaytasks.model.inputs import Delay
from delaytasks.model.task import DelayedTask, new_task, new_task_of
from delaytasks.twins import twin

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.client import DelayTasks
    from delaytasks.model.filters import TagFilters
    from delaytasks.model.task import CancelResult, OnConflict, Page, TaskOptions

#: The body that callers schedule, and the object that a schema makes of it.
Body = TypeVar("Body")
Converted = TypeVar("Converted")
P = ParamSpec("P")
Returned = TypeVar("Returned")
Returned_co = TypeVar("Returned_co", covariant=True)


class Processor(Generic[Body, P, Returned_co]):
    """A function that is registered for a tag. It can be called as before, and schedules tasks.

    `@delays.processor(tag)` makes it. Type checkers know the type of the body from the annotation
    of the function's first argument, or from `schema`.

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
    >>> close_order.cancel(key="7")
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

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Bind a function that is an attribute of a class, as Python binds functions."""
        if instance is None or not isinstance(self.function, types.FunctionType):
            return self
        return types.MethodType(self, instance)

    def __reduce__(self) -> str:
        """Pickle the name, as of a function. The processor is an attribute of its module."""
        return _name(self.function)

    def __repr__(self) -> str:
        return f"<Processor {self.tag!r}: {self.__module__}.{_name(self.function)}>"

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

    def cancel(
        self, *, key: str, version: int | None = None, running: bool = False, session: Any = None
    ) -> CancelResult:
        """Cancel the task of this tag that has the key. See `DelayTasks.cancel`.

        Examples
        --------
        >>> close_order.cancel(key="7")
        """
        return self._delays.cancel(
            tag=self.tag, key=key, version=version, running=running, session=session
        )

    acancel = twin(cancel)

    def find(
        self,
        *,
        cursor: str | None = None,
        limit: int = 100,
        newest_first: bool = False,
        session: Any = None,
        **filters: Unpack[TagFilters],
    ) -> Page:
        """Read a page of the tasks of this tag. See `DelayTasks.find`.

        Examples
        --------
        >>> [task.id for task in close_order.find(status="FAILED")]
        """
        page: dict[str, Any] = {"cursor": cursor, "limit": limit, "newest_first": newest_first}
        return self._delays.find(tag=self.tag, session=session, **page, **filters)

    afind = twin(find)

    @property
    def _run_async(self) -> Callable[..., Awaitable[Any]]:
        return self._delays._run_async


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


class Decorator(Protocol):
    """Makes a processor of `f(body)` or `f(body, task)`."""

    def __call__(
        self, function: Callable[Concatenate[Body, P], Returned], /
    ) -> Processor[Body, Concatenate[Body, P], Returned]: ...


class SchemaDecorator(Protocol[Body, Converted]):
    """Makes a processor of a function that takes what a schema makes of a body."""

    def __call__(
        self, function: Callable[Concatenate[Converted, P], Returned], /
    ) -> Processor[Body, Concatenate[Converted, P], Returned]: ...


class BatchDecorator(Protocol):
    """Makes a processor of `f(tasks)` or `f(bodies, tasks)`."""

    @overload
    def __call__(
        self, function: Callable[[list[Body], list[DelayedTask]], Returned], /
    ) -> Processor[Body, [list[Body], list[DelayedTask]], Returned]: ...

    @overload
    def __call__(
        self, function: Callable[[list[DelayedTask]], Returned], /
    ) -> Processor[Any, [list[DelayedTask]], Returned]: ...


class SchemaBatchDecorator(Protocol[Body, Converted]):
    """Makes a processor of a batch whose bodies a schema converts."""

    @overload
    def __call__(
        self, function: Callable[[list[Converted], list[DelayedTask]], Returned], /
    ) -> Processor[Body, [list[Converted], list[DelayedTask]], Returned]: ...

    @overload
    def __call__(
        self, function: Callable[[list[DelayedTask]], Returned], /
    ) -> Processor[Body, [list[DelayedTask]], Returned]: ...
