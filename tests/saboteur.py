"""A module of a worker that breaks its loops from inside, when a test asks for it by remote control."""

from __future__ import annotations

import threading
from typing import Any

from celery.worker.control import control_command

from delaytasks.worker.pool import is_forgotten


@control_command(args=[("loop", str), ("way", str)])
def break_loop(state: Any, loop: str, way: str) -> dict[str, str]:
    """The loop's next turn dies, or hangs for ever."""
    [victim] = [one for one in state.consumer.controller.delays_desk.watchdog.loops if one.name == loop]
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
    """What Celery does when its connection breaks just after chunks went into the pool; how many it forgets."""
    consumer = state.consumer
    desk = consumer.controller.delays_desk
    dispatcher = desk.dispatcher
    dispatcher.drain("default", [0])
    dispatcher.pump()
    consumer.pool.flush()
    forgotten = sum(is_forgotten(result) for _, result in dispatcher._sent.values())
    desk.connected()
    return {"forgotten": forgotten}
