"""The module-level functions: methods of the default `DelayTasks`.

A new method of `DelayTasks` gets a line in the list below and its name in `__all__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from celery import _state

from delaytasks.client import DelayTasks
from delaytasks.core.errors import ConfigError
from delaytasks.processors.registry import ProcessorOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_default: DelayTasks | None = None


def default() -> DelayTasks:
    """Return the instance behind the module-level functions.

    Returns
    -------
    DelayTasks
        The instance given to `set_default`, else the standalone instance
        `delaytasks.celery.delays`.

    Raises
    ------
    ConfigError
        If the Celery app of this process has a `DelayTasks` of its own. The standalone instance
        would write to another database.
    """
    if _default is not None:
        return _default
    from delaytasks.celery import delays

    app = _current_app()
    own = getattr(app, "delaytasks", None)
    if own is not None and own is not delays:
        raise ConfigError(
            f"the functions of the module delaytasks use the standalone instance, and the Celery "
            f"app {app.main or '(unnamed)'!r} has a DelayTasks of its own: call the methods of "
            "that object instead, as in delays.schedule_delay(...)"
        )
    return delays


def set_default(delays: DelayTasks | None) -> None:
    """Make the module-level functions use `delays`; None means the standalone instance again.

    For web frameworks, whose integrations make the instance of the process.
    """
    global _default
    _default = delays


def _current_app() -> Any:
    """Return Celery's current app, and do not make one.

    Celery has a current app for each thread. A thread without one gets the app that was made to be
    the current app of the process.
    """
    current = _state._tls.current_app or _state.default_app
    if current is None:
        made = (app for app in _state._get_active_apps() if app.set_as_current)
        current = next((app for app in made if hasattr(app, "delaytasks")), None)
    return current


def _of_default(method: Callable[Concatenate[DelayTasks, P], R]) -> Callable[P, R]:
    @functools.wraps(method)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(default(), *args, **kwargs)

    return function


schedule_delay = _of_default(DelayTasks.schedule_delay)
schedule_at = _of_default(DelayTasks.schedule_at)
schedule_many = _of_default(DelayTasks.schedule_many)
schedule_callback = _of_default(DelayTasks.schedule_callback)
schedule_message = _of_default(DelayTasks.schedule_message)
new_id = _of_default(DelayTasks.new_id)
shard_for = _of_default(DelayTasks.shard_for)
cancel = _of_default(DelayTasks.cancel)
reschedule = _of_default(DelayTasks.reschedule)
touch = _of_default(DelayTasks.touch)
touch_many = _of_default(DelayTasks.touch_many)
retry = _of_default(DelayTasks.retry)
get = _of_default(DelayTasks.get)
attempts = _of_default(DelayTasks.attempts)
find = _of_default(DelayTasks.find)
cancel_many = _of_default(DelayTasks.cancel_many)
reschedule_many = _of_default(DelayTasks.reschedule_many)
retry_many = _of_default(DelayTasks.retry_many)
audit = _of_default(DelayTasks.audit)
policies = _of_default(DelayTasks.policies)
pause = _of_default(DelayTasks.pause)
resume = _of_default(DelayTasks.resume)
set_policy = _of_default(DelayTasks.set_policy)
clear_policy = _of_default(DelayTasks.clear_policy)


# Not made by `_of_default`, with which mypy would lose the types of the decorated function.
def processor(tag: str, **options: Unpack[ProcessorOptions]) -> Callable[[F], F]:
    return default().processor(tag, **options)


processor.__doc__ = DelayTasks.processor.__doc__


__all__ = [
    "attempts",
    "audit",
    "cancel",
    "cancel_many",
    "clear_policy",
    "find",
    "get",
    "new_id",
    "pause",
    "policies",
    "processor",
    "reschedule",
    "reschedule_many",
    "resume",
    "retry",
    "retry_many",
    "schedule_at",
    "schedule_callback",
    "schedule_delay",
    "schedule_many",
    "schedule_message",
    "set_policy",
    "shard_for",
    "touch",
    "touch_many",
]
