"""Ends the chunks that Celery's worker leaves running when it stops."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from celery.worker import state

if TYPE_CHECKING:
    from delaytasks.worker.runtime import WorkerRuntime

logger = get_logger(__name__)


def end_chunks_on_cold_shutdown(worker: Any) -> None:
    """Replace `worker.wait_for_soft_shutdown`, which Celery calls when a cold shutdown begins.

    Celery gives running tasks the time of `worker_soft_shutdown_timeout` and then ends them. It
    does not know our chunks and would wait for them forever, so their processes are killed here.
    Other workers recover the rows.
    """
    worker.wait_for_soft_shutdown = partial(
        _shut_down_coldly, worker, worker.wait_for_soft_shutdown
    )


def _shut_down_coldly(worker: Any, wait_for_soft_shutdown: Callable[[], None]) -> None:
    runtime: WorkerRuntime = worker.delays_runtime
    conf = worker.app.conf
    # In a thread of its own, since this one may have locked what `stop` waits for.
    Thread(target=runtime.stop, name="delaytasks-stop", daemon=True).start()
    seconds = conf.worker_soft_shutdown_timeout
    if state.active_requests or conf.worker_enable_soft_shutdown_on_idle:
        wait_for_soft_shutdown()
    elif seconds > 0 and runtime.dispatcher.is_at_work:
        logger.warning("delaytasks: soft shutdown, running tasks have %g seconds", seconds)
        time.sleep(seconds)
    for pid in runtime.dispatcher.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
