"""The module-level functions: methods of the default instance, which is made on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from delaytasks.app import DelayTasks
from delaytasks.processors.registry import ProcessorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_default: DelayTasks | None = None


def default() -> DelayTasks:
    """The instance behind the module-level functions: `delaytasks.celery.delays`, unless another one was set."""
    if _default is not None:
        return _default
    from delaytasks.celery import delays

    return delays


def set_default(delays: DelayTasks | None) -> None:
    """Makes the module-level functions use `delays`: for frameworks that make their own instance."""
    global _default
    _default = delays


def _of_default(method: Callable[Concatenate[DelayTasks, P], R]) -> Callable[P, R]:
    @functools.wraps(method)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(default(), *args, **kwargs)

    return function


schedule_delay = _of_default(DelayTasks.schedule_delay)
schedule_at = _of_default(DelayTasks.schedule_at)
schedule_callback = _of_default(DelayTasks.schedule_callback)
schedule_many = _of_default(DelayTasks.schedule_many)
schedule_message = _of_default(DelayTasks.schedule_message)
cancel = _of_default(DelayTasks.cancel)
cancel_many = _of_default(DelayTasks.cancel_many)
reschedule = _of_default(DelayTasks.reschedule)
reschedule_many = _of_default(DelayTasks.reschedule_many)
touch = _of_default(DelayTasks.touch)
touch_many = _of_default(DelayTasks.touch_many)
new_id = _of_default(DelayTasks.new_id)
shard_for = _of_default(DelayTasks.shard_for)
retry = _of_default(DelayTasks.retry)
retry_many = _of_default(DelayTasks.retry_many)
audit = _of_default(DelayTasks.audit)
attempts = _of_default(DelayTasks.attempts)
get = _of_default(DelayTasks.get)
policies = _of_default(DelayTasks.policies)
pause = _of_default(DelayTasks.pause)
resume = _of_default(DelayTasks.resume)
set_policy = _of_default(DelayTasks.set_policy)
clear_policy = _of_default(DelayTasks.clear_policy)
find = _of_default(DelayTasks.find)


def processor(tag: str, **options: Unpack[ProcessorOptions]) -> Callable[[F], F]:
    """As `DelayTasks.processor`, of the default instance."""
    return default().processor(tag, **options)
