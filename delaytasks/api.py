"""The module-level functions: methods of the default `DelayTasks`.

A new method of `DelayTasks` gets a line in the list below and its name in `__all__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from celery import _state

from delaytasks.client import DelayTasks
from delaytasks.core.errors import ConfigError
from delaytasks.processors.registry import ProcessorOptions
from delaytasks.wiring import wiring_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.wiring import Wiring

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


class _Default(DelayTasks):
    """The methods of `DelayTasks` on the wiring of the default instance."""

    def __init__(self) -> None:
        """Make an object without state, registry and Celery app of its own."""

    @property
    def _wiring(self) -> Wiring:
        return wiring_of(default())


_methods = _Default()
schedule_delay = _methods.schedule_delay
schedule_at = _methods.schedule_at
schedule_many = _methods.schedule_many
schedule_callback = _methods.schedule_callback
schedule_message = _methods.schedule_message
new_id = _methods.new_id
shard_for = _methods.shard_for
cancel = _methods.cancel
reschedule = _methods.reschedule
touch = _methods.touch
touch_many = _methods.touch_many
retry = _methods.retry
get = _methods.get
attempts = _methods.attempts
find = _methods.find
cancel_many = _methods.cancel_many
reschedule_many = _methods.reschedule_many
retry_many = _methods.retry_many
audit = _methods.audit
policies = _methods.policies
pause = _methods.pause
resume = _methods.resume
set_policy = _methods.set_policy
clear_policy = _methods.clear_policy


# Registering a processor makes no wiring.
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
