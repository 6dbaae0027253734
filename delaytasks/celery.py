"""The `DelayTasks` of the process, and the functions of the package that use it.

It is found as Celery finds its `current_app`. A process without a Celery app has the standalone
instance, whose `app` `celery -A delaytasks worker` serves. `celeryconfig.py` configures it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from threading import RLock
from typing import TYPE_CHECKING, Any

from celery import Celery, _state

from delaytasks.attachment import file_broker_url, newest_attached, standalone_tags
from delaytasks.client import DelayTasks
from delaytasks.model.errors import ConfigError
from delaytasks.settings import load_settings

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime

_of_project: DelayTasks | None = None
_standalone: DelayTasks | None = None
_making = RLock()
#: The name of the Celery app that Celery makes if it needs one and there is none.
_CELERYS_OWN = "default"


def current_delays() -> DelayTasks:
    """Return the `DelayTasks` of this process, which the functions of the package use.

    It is found as Celery finds its `current_app`. A Django project and a Flask app have their own.
    Otherwise it is the one of Celery's current app, or the newest `DelayTasks(app)` of the process.
    A process without a Celery app has the standalone one, which `celery -A delaytasks worker`
    serves.

    Returns
    -------
    DelayTasks
        The instance.

    Raises
    ------
    ConfigError
        If the process has a Celery app, but none with a `DelayTasks`: the standalone one would
        write to another database.

    Examples
    --------
    >>> current_delays().cancel(tag="order.close", key="7")
    """
    return _of_project or _of_celery() or _the_standalone()


def set_project_delays(delays: DelayTasks | None) -> None:
    """Make `delays` the instance of the process, for web frameworks; None means Celery's again."""
    global _of_project
    _of_project = delays


def _of_celery() -> DelayTasks | None:
    app = _state._tls.current_app or _state.default_app
    own: DelayTasks | None = getattr(app, "delaytasks", None) or newest_attached()
    # A thread without a current app may belong to a process that has one.
    apps = [app, *(each for each in _state._get_active_apps() if each.set_as_current)]
    names = [each.main for each in apps if each is not None and each.main != _CELERYS_OWN]
    if own is None and names:
        raise ConfigError(
            f"the Celery app {names[0] or '(unnamed)'!r} has no DelayTasks: write delays = "
            "DelayTasks(app) where the app is made, and import that module first"
        )
    return own


# -- the standalone instance ----------------------------------------------------------------------


class _StandaloneDelays(DelayTasks):
    _tables_remedy = (
        "run: delaytasks db upgrade (this process has made no other DelayTasks: if your project "
        "has one, import its module first)"
    )


def _the_standalone() -> DelayTasks:
    """Return the instance of a process without another Celery app, made by the first call."""
    global _standalone
    with _making:
        if _standalone is None:
            made = Celery("delaytasks", set_as_current=False)
            # The command `celery` too finds a celeryconfig.py in the current directory.
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            module = os.environ.get("CELERY_CONFIG_MODULE", "celeryconfig")
            if importlib.util.find_spec(module) is not None:
                made.config_from_object(module)
            _standalone = _StandaloneDelays(made)
            if not made.conf.broker_url:
                # Not `delays.settings`, which would make a timer, and that needs a broker.
                folder = load_settings(made.conf, os.environ).data_dir
                made.conf.broker_url = file_broker_url(folder)
        return _standalone


if TYPE_CHECKING:
    app: Celery
    delays: DelayTasks
else:

    def __getattr__(name: str) -> Any:
        """Make the standalone app, or its instance, when it is first used."""
        if name not in ("app", "delays"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _the_standalone() if name == "delays" else _the_standalone()._celery


# -- the functions of the package -----------------------------------------------------------------


class _Current(DelayTasks):
    """The methods of `DelayTasks` on the runtime of the instance of the process."""

    def __init__(self) -> None:
        """Make an object without state, registry and Celery app of its own."""

    @property
    def _runtime(self) -> Runtime:
        return current_delays()._runtime

    @property
    def _is_made(self) -> bool:
        """Return whether a coroutine can use the runtime without reading files."""
        has_instance = _of_project or _standalone or newest_attached()
        return bool(has_instance) and current_delays()._is_made


_methods = _Current()
schedule_delay = _methods.schedule_delay
aschedule_delay = _methods.aschedule_delay

if TYPE_CHECKING:
    processor = _methods.processor
else:
    # Registering a processor makes no runtime.
    def processor(tag: str, **options: Any) -> Any:
        found = _of_project or _of_celery()
        if found is None:
            standalone_tags.append(tag)
        return (found or _the_standalone()).processor(tag, **options)

    processor.__doc__ = DelayTasks.processor.__doc__
