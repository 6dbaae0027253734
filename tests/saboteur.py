"""A module for workers: it breaks their loops on a remote control command."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
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


@control_command(args=[("kills", bool), ("away_s", float)])
def lose_broker(state: Any, kills: bool = False, away_s: float = 0) -> dict[str, int]:
    """Act as Celery does if its connection breaks just after chunks went into the pool.

    Return the number of chunks that it forgets. Optionally, their processes are killed before they
    report. The reconnection takes `away_s`, while the event loop continues.
    """
    consumer = state.consumer
    runtime = consumer.controller.delays_runtime
    dispatcher = runtime.dispatcher
    pool = consumer.pool._pool
    processes = list(pool._pool)
    if kills:
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
    dispatcher.start_drain("default", [0])
    dispatcher.pump()
    if kills or away_s:
        consumer.hub.consolidate_callback(list(pool._all_inqueues))  # into their pipes
    if kills:
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        pool.maintain_pool()
    consumer.pool.flush()
    forgotten = sum(is_forgotten(sent.result) for sent in dispatcher._pool.sent.values())
    if away_s:
        connect = consumer.ensure_connected.func
        never = SimpleNamespace(ensure_connection=None)
        connect(consumer, lambda _: threading.Event().wait(away_s), never)
    runtime.connected()
    return {"forgotten": forgotten}
