"""Makes a Celery app serve a `DelayTasks`: tasks, bootsteps, beat, and rows for delayed calls."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from weakref import WeakKeyDictionary

import celery
from celery import Task, signals
from celery.app import utils
from celery.utils.functional import maybe_list
from celery.utils.imports import symbol_by_name
from celery.utils.log import get_logger
from kombu.transport import TRANSPORT_ALIASES

from delaytasks.broker.arming import RUN, SWEEP
from delaytasks.model.errors import ConfigError
from delaytasks.model.text import some_values
from delaytasks.settings import PREFIX, secret_names

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.runtime import Runtime


# -- rows for delayed calls -----------------------------------------------------------------------
#
# `Task.apply_async`, signatures, canvas and `Task.retry` all call the app's `send_task`. Without
# the setting `durable_eta`, and for calls without a delay, it does what it did before.


logger = get_logger(__name__)
_forced_app: ContextVar[Any] = ContextVar("delaytasks_forced_app", default=None)


class CeleryCall(NamedTuple):
    """The first parameters of a Celery app's `send_task`, in their order."""

    name: str
    args: Any = None
    kwargs: Any = None
    countdown: Any = None
    eta: Any = None
    task_id: str | None = None
    producer: Any = None
    connection: Any = None


@contextmanager
def forced(app: Any) -> Iterator[None]:
    """Let each call of a task of `app` inside the block become a row."""
    token = _forced_app.set(app)
    try:
        yield
    finally:
        _forced_app.reset(token)


def _is_durable(delays: DelayTasks, call: CeleryCall, task: Any, asked: Any) -> bool:
    """Return whether a delayed call becomes a row; `task` is the Celery task if it is known."""
    own = getattr(task, "durable_eta", None) if asked is None else asked
    if own is not None:
        return bool(own)
    runtime = delays._runtime
    least_s = runtime.settings.durable_eta_s
    return least_s is not None and (not least_s or runtime.celery_tasks.delay_s(call) >= least_s)


class RevokesRows:
    """Cancels waiting rows before workers revoke the tasks."""

    app: Any

    def broadcast(
        self, command: str, arguments: Mapping[str, Any] | None = None, *args: Any, **options: Any
    ) -> Any:
        try:
            if command in ("revoke", "terminate"):
                ids = {**options, **(arguments or {})}["task_id"]
                self.app.delaytasks._runtime.celery_tasks.revoke(maybe_list(ids))
        finally:
            # Also if the database is unavailable, since a worker may have the message already.
            replies = super().broadcast(command, arguments, *args, **options)  # type: ignore[misc]
        return replies


def intercept(app: Any, delays: DelayTasks) -> None:
    """Let calls with a delay become rows of `delays`, and let `revoke` cancel these rows."""
    send = app.send_task

    @wraps(send)
    def send_task(*args: Any, durable_eta: bool | None = None, **options: Any) -> Any:
        first, more = args[: len(CeleryCall._fields)], args[len(CeleryCall._fields) :]
        named = {name: options.pop(name) for name in CeleryCall._fields if name in options}
        call, is_forced = CeleryCall(*first, **named), _forced_app.get() is app
        if call.countdown or call.eta or is_forced:
            task = options.get("task_type") or app.tasks.get(call.name)
            if is_forced or _is_durable(delays, call, task, durable_eta):
                return delays._runtime.celery_tasks.send(send, call, *more, **options)
        return send(*call, *more, **options)

    app.send_task = send_task
    app.control_cls = partial(_make_control, app.control_cls)
    app.__dict__.pop("control", None)  # made by the previous class


def _make_control(kind: Any, **options: Any) -> Any:
    """Return an object of the app's class of remote control that revokes rows, too."""
    return type("DurableControl", (RevokesRows, symbol_by_name(kind)), {})(**options)


# -- the two Celery tasks -------------------------------------------------------------------------


class CarrierTask(Task):
    """A task that only carries a message to a worker, where a strategy receives it.

    Beat sends it as producers send their messages: as JSON without compression and events, to the
    queue of the sweeps, in bounded time, whatever the configuration of the app says.
    """

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> None:
        runtime: Runtime = self.app.delaytasks._runtime
        message: tuple[list[Any], dict[str, Any]] = (list(args or ()), {"task": self.name})
        runtime.publisher.send(runtime.settings.default_queue, [message])


def register_tasks(celery_app: Any) -> None:
    """Add our tasks to a Celery app."""

    def received_by_a_strategy(*args: Any) -> None: ...

    for name, strategy in ((RUN, "run_strategy"), (SWEEP, "sweep_strategy")):
        # With `shared`, all Celery apps of the process would have a task of this instance.
        options = {"shared": False, "ignore_result": True, "base": CarrierTask}
        task = celery_app.task(received_by_a_strategy, name=name, **options)
        task.Strategy = f"delaytasks.worker.consumer:{strategy}"


# -- attach ---------------------------------------------------------------------------------------

#: The newest release of Celery that delaytasks is tested with. A worker with a newer one logs a
#: warning.
NEWEST_TESTED_CELERY = (5, 7)


#: The transport of a machine without a broker. It is imported when it is used.
TRANSPORT_ALIASES["delaytasks-files"] = "delaytasks.broker.files:Transport"


def file_broker_url(data_dir: str) -> str:
    """Return the broker URL of a machine without a broker."""
    return f"delaytasks-files://localhost/{quote(str(Path(data_dir).absolute()))}"


#: Each `DelayTasks`, the newest last, and whether its Celery app may be the current one.
_attached: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


#: The tags that `delaytasks.processor` gave to the standalone instance, since there was no other.
standalone_tags: list[str] = []


def newest_attached() -> Any:
    """Return the newest `DelayTasks` whose Celery app may be the current one, or None."""
    return next((delays for delays, is_so in reversed([*_attached.items()]) if is_so), None)


def attach(celery_app: Any, delays: DelayTasks) -> None:
    """Register the tasks and worker steps of `delays`, a `DelayTasks`, with its Celery app."""
    if getattr(celery_app, "delaytasks", None) is not None:
        raise ConfigError(
            f"{celery_app!r} has delayed tasks already: one DelayTasks per Celery app"
        )
    if standalone_tags and celery_app.set_as_current:
        raise ConfigError(
            f"processors were registered before DelayTasks was made, and belong to no app: "
            f"{some_values(standalone_tags, 5)}; import their modules after it, or set "
            "Celery(set_as_current=False)"
        )
    celery_app.delaytasks = delays
    _attached[delays] = celery_app.set_as_current
    register_tasks(celery_app)
    intercept(celery_app, delays)
    uid = "delaytasks.warn_of_untested_celery"
    signals.celeryd_after_setup.connect(warn_of_untested_celery, weak=False, dispatch_uid=uid)
    logging.getLogger("celery.beat").addFilter(show_sweeps_at_debug)
    mask_settings()
    celery_app.steps["worker"].add("delaytasks.worker.consumer:DelaysStep")
    celery_app.steps["consumer"].add("delaytasks.worker.patches:GuardStep")
    celery_app.steps["consumer"].add("delaytasks.worker.patches:ReconnectStep")

    def add_to_beat(sender: Any, **_: Any) -> None:
        # Imported here: a process that only registers processors does not need it.
        from delaytasks.operate.checks import add_sweeps

        add_sweeps(sender, delays._runtime)

    celery_app.on_after_finalize.connect(add_to_beat, weak=False)
    if celery_app.finalized:  # the signal was sent before
        add_to_beat(celery_app)

    def format_log(logger: Any, **_: Any) -> None:
        """Let the handlers of a logger print documents, if the settings say so."""
        settings = delays._runtime.settings
        if settings.log_format == "json":
            from delaytasks.logging import LogFormatter

            for handler in logger.handlers:
                handler.setFormatter(LogFormatter())

    # The signals refer to this receiver weakly, and the app holds it: an app that is no longer used
    # is freed with it.
    celery_app.delaytasks_format_log = format_log
    # Celery sends these after it has made its handlers; not if the application makes its own.
    signals.after_setup_logger.connect(format_log)
    signals.after_setup_task_logger.connect(format_log)


def show_sweeps_at_debug(record: logging.LogRecord) -> bool:
    """Log `Scheduler: Sending due task … (delaytasks.sweep)`, which beat logs at INFO, at DEBUG."""
    is_sweep = isinstance(record.args, tuple) and SWEEP in record.args
    if is_sweep and record.levelno == logging.INFO:
        record.levelno, record.levelname = logging.DEBUG, logging.getLevelName(logging.DEBUG)
        return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
    return True


def warn_of_untested_celery(**_: Any) -> None:
    """Let a worker log a warning if Celery is newer than `NEWEST_TESTED_CELERY`."""
    if tuple(celery.VERSION[:2]) > NEWEST_TESTED_CELERY:
        newest = "{}.{}".format(*NEWEST_TESTED_CELERY)
        logger.warning(
            "delaytasks: Celery %s is installed, and the newest release that it was tested with is "
            "%s: upgrade delaytasks, or run: pip install 'celery~=%s.0'",
            celery.__version__,
            newest,
            newest,
        )


def mask_settings() -> None:
    """Extend Celery's pattern of hidden settings, for all apps of this process."""
    known: re.Pattern[str] = utils.HIDDEN_SETTINGS
    names = [PREFIX + name for name in secret_names() if not known.search(PREFIX + name)]
    if names:
        utils.HIDDEN_SETTINGS = re.compile("|".join([known.pattern, *names]), known.flags)
