"""A module of a worker that breaks its loops from inside, when a test asks for it by remote control."""

from __future__ import annotations

import threading
from typing import Any

from celery.worker.control import control_command


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
