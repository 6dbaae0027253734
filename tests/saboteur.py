"""A module for workers: it breaks their connection to the broker on a remote control command."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery.worker.control import control_command

from delaytasks.worker.pool import is_forgotten


@control_command()
def lose_broker(state: Any) -> dict[str, int]:
    """Act as Celery does if its connection breaks just after chunks went into the pool.

    Their processes are killed before they report. Return the number of forgotten chunks.
    """
    consumer = state.consumer
    runtime = consumer.controller.delays_runtime
    dispatcher = runtime.dispatcher
    pool = consumer.pool._pool
    processes = list(pool._pool)
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    dispatcher.start_drain("default", [0])
    dispatcher.pump()
    consumer.hub.consolidate_callback(list(pool._all_inqueues))  # into their pipes
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    pool.maintain_pool()
    consumer.pool.flush()
    forgotten = sum(is_forgotten(chunk.result) for chunk in dispatcher._pool.chunks.values())
    runtime.connected()
    return {"forgotten": forgotten}
