"""The module-level functions: methods of the default `DelayTasks`.

A new method of `DelayTasks` gets a line in the list below and its name in `__all__`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from celery import _state

from delaytasks.client import DelayTasks
from delaytasks.core.errors import ConfigError

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

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


def instance_of_process() -> DelayTasks:
    """Return the instance given to `set_default`, else that of Celery's current app.

    Without either, it is the standalone instance. For tests, which have no Celery app at hand.
    """
    own: DelayTasks | None = getattr(_current_app(), "delaytasks", None)
    return default() if own is None or _default is not None else own


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
    """The methods of `DelayTasks` on the runtime of the default instance."""

    def __init__(self) -> None:
        """Make an object without state, registry and Celery app of its own."""

    @property
    def _runtime(self) -> Runtime:
        return default()._runtime

    @property
    def _is_made(self) -> bool:
        has_instance = _default is not None or "delaytasks.celery" in sys.modules
        return has_instance and default()._is_made


methods = _Default()
schedule_delay = methods.schedule_delay
aschedule_delay = methods.aschedule_delay
schedule_at = methods.schedule_at
aschedule_at = methods.aschedule_at
schedule_many = methods.schedule_many
aschedule_many = methods.aschedule_many
schedule_callback = methods.schedule_callback
aschedule_callback = methods.aschedule_callback
schedule_message = methods.schedule_message
aschedule_message = methods.aschedule_message
apply_async = methods.apply_async
aapply_async = methods.aapply_async
using = methods.using
new_id = methods.new_id
cancel = methods.cancel
acancel = methods.acancel
reschedule = methods.reschedule
areschedule = methods.areschedule
touch = methods.touch
atouch = methods.atouch
touch_many = methods.touch_many
atouch_many = methods.atouch_many
rerun = methods.rerun
arerun = methods.arerun
get = methods.get
aget = methods.aget
attempts = methods.attempts
aattempts = methods.aattempts
find = methods.find
afind = methods.afind
cancel_many = methods.cancel_many
acancel_many = methods.acancel_many
reschedule_many = methods.reschedule_many
areschedule_many = methods.areschedule_many
rerun_many = methods.rerun_many
arerun_many = methods.arerun_many
audit = methods.audit
aaudit = methods.aaudit
policies = methods.policies
apolicies = methods.apolicies
pause = methods.pause
apause = methods.apause
resume = methods.resume
aresume = methods.aresume
set_policy = methods.set_policy
aset_policy = methods.aset_policy
clear_policy = methods.clear_policy
aclear_policy = methods.aclear_policy
wait = methods.wait
await_ = methods.await_


if TYPE_CHECKING:
    processor = methods.processor
else:
    # Registering a processor makes no wiring.
    def processor(tag, **options):
        return default().processor(tag, **options)

    processor.__doc__ = DelayTasks.processor.__doc__


__all__ = [
    "aapply_async",
    "aattempts",
    "aaudit",
    "acancel",
    "acancel_many",
    "aclear_policy",
    "afind",
    "aget",
    "apause",
    "apolicies",
    "apply_async",
    "arerun",
    "arerun_many",
    "areschedule",
    "areschedule_many",
    "aresume",
    "aschedule_at",
    "aschedule_callback",
    "aschedule_delay",
    "aschedule_many",
    "aschedule_message",
    "aset_policy",
    "atouch",
    "atouch_many",
    "attempts",
    "audit",
    "await_",
    "cancel",
    "cancel_many",
    "clear_policy",
    "find",
    "get",
    "new_id",
    "pause",
    "policies",
    "processor",
    "rerun",
    "rerun_many",
    "reschedule",
    "reschedule_many",
    "resume",
    "schedule_at",
    "schedule_callback",
    "schedule_delay",
    "schedule_many",
    "schedule_message",
    "set_policy",
    "touch",
    "touch_many",
    "using",
    "wait",
]
