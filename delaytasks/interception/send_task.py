"""Makes a Celery app write rows for tasks with an eta or a countdown.

`Task.apply_async`, signatures, canvas and `Task.retry` all call the app's `send_task`. Without the
setting `durable_eta`, and for calls without a delay, it does what it did before.
"""

from __future__ import annotations

from functools import update_wrapper
from typing import TYPE_CHECKING, Any

from celery.utils.imports import symbol_by_name

from delaytasks.core.celery_calls import CeleryCall, is_forced

if TYPE_CHECKING:
    from delaytasks.runtime import HasRuntime

CONTROL = "celery.app.control:Control"


class DurableSendTask:
    """Takes the place of `send_task` of one Celery app."""

    def __init__(self, app: Any, delays: HasRuntime) -> None:
        self._app = app
        self._delays = delays
        self._send = app.send_task
        update_wrapper(self, self._send)

    def __call__(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: Any = None,
        eta: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        connection: Any = None,
        *more: Any,
        durable_eta: bool | None = None,
        **options: Any,
    ) -> Any:
        call = CeleryCall(name, args, kwargs, countdown, eta, task_id, producer, connection)
        if countdown or eta or is_forced(self._app):
            task = options.get("task_type") or self._app.tasks.get(name)
            tasks = self._delays._runtime.celery_tasks
            if tasks.is_durable(call, task, durable_eta):
                return tasks.send(self._send, call, *more, **options)
        return self._send(*call, *more, **options)


def intercept(app: Any, delays: HasRuntime) -> None:
    """Let calls with a delay become rows of `delays`, and let `revoke` cancel these rows."""
    app.send_task = DurableSendTask(app, delays)
    if app.control_cls == CONTROL:
        app.control_cls = "delaytasks.interception.control:DurableControl"
    else:
        from delaytasks.interception.control import RevokesRows

        app.control_cls = type("DurableControl", (RevokesRows, symbol_by_name(app.control_cls)), {})
    app.__dict__.pop("control", None)  # made by the previous class
