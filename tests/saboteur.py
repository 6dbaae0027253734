"""A module for workers: it breaks their loops on a remote control command."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from celery.worker.control import control_command

from delaytasks.worker.pool import is_forgotten


@control_command(args=[("loop", str), ("way", str)])
def break_loop(state: Any, loop: str, way: str) -> dict[str, str]:
    """Make the loop's next turn raise an error or hang forever."""
    loops = state.consumer.controller.delays_runtime.watchdog.loops
    [victim] = [one for one in loops if one.name == loop]
    turn = victim._turn

    def broken() -> float | None:
        victim._turn = turn
        if way == "die":
            raise SystemExit
        threading.Event().wait()
        raise AssertionError("unreachable")

    victim._turn = broken
    victim.wake()
    return {"ok": f"{loop} will {way}"}


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
    forgotten = sum(is_forgotten(sent.result) for sent in dispatcher._pool.sent.values())
    runtime.connected()
    return {"forgotten": forgotten}
