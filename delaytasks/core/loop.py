"""A thread that repeats one call, continues after errors, and can be replaced by a new thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events, is_outage

#: The rest after a turn that failed.
FAILED_REST_S = 1.0
#: The shortest time after which a turn counts as stuck, because a machine may be busy.
LEAST_STUCK_S = 2.0


class ReplacedError(BaseException):
    """Ends a turn of a thread that was replaced.

    It is no `Exception`, so that code which continues after errors does not catch it.
    """


class Life:
    """One thread of a loop."""

    def __init__(self, run: Callable[[Life], None], name: str) -> None:
        self.wake = threading.Event()
        #: When the current turn began, or last made progress. None while the loop rests.
        self.began: float | None = None
        self.thread = threading.Thread(
            target=run, args=(self,), name=f"delaytasks-{name}", daemon=True
        )


class Loop:
    """Calls `turn` again and again in a thread of its own.

    `turn` returns the seconds to rest after it, or None to rest until `wake` is called.

    A turn without progress for `stuck_s` seconds is stuck. Python cannot kill a thread, so `look`
    starts a new one, which first calls `reconnect`: the old thread may wait for a connection whose
    other side no longer answers. The old thread begins no further turn. It ends after its current
    turn, or at its next `beat`.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        events: Events,
        stuck_s: float = math.inf,
        reconnect: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._turn = turn
        self._events = events
        self._stuck_s = max(stuck_s, LEAST_STUCK_S)
        self._reconnect = reconnect
        self._lock = threading.Lock()
        self._life: Life | None = None
        self.is_running = False
        self._turned_at: float | None = None
        self._restarts = 0
        #: The text of the last error.
        self._told = ""
        #: Factor of `stuck_s`. It doubles with each restart, so that a slow database does not cause
        #: more and more threads.
        self._patience = 1

    def start(self) -> None:
        with self._lock:
            self.is_running = True
            self._begin(self._run)

    def wake(self) -> None:
        """Start the next turn without a further rest."""
        if self._life is not None:
            self._life.wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop after the current turn, and wait up to `timeout_s` seconds for its end."""
        with self._lock:
            self.is_running = False
        if self._life is not None:
            self._life.wake.set()
            self._life.thread.join(timeout_s)

    def beat(self) -> None:
        """Report progress of a long turn. Raises `ReplacedError` if the thread was replaced."""
        with self._lock:
            life = self._life
            if life is not None:
                if life.thread is not threading.current_thread():
                    raise ReplacedError
                life.began = monotonic()

    def look(self) -> None:
        """Replace the thread if it is dead or stuck."""
        with self._lock:
            life = self._life
            if life is None or not self.is_running:
                return
            if not life.thread.is_alive():
                reason, run = "dead", self._run
            elif (
                life.began is not None and monotonic() - life.began > self._stuck_s * self._patience
            ):
                reason, run = "stuck", self._run_reconnected
                self._patience *= 2
            else:
                return
            self._restarts += 1
            self._begin(run)
        self._events.emit("loop.restarted", loop=self.name, reason=reason)

    def info(self) -> dict[str, Any]:
        life, turned_at = self._life, self._turned_at
        return {
            "is_alive": life is not None and life.thread.is_alive(),
            "turned_s_ago": None if turned_at is None else round(monotonic() - turned_at, 3),
            "restarts": self._restarts,
        }

    def _begin(self, run: Callable[[Life], None]) -> None:
        self._life = Life(run, self.name)
        self._life.thread.start()

    def _run_reconnected(self, life: Life) -> None:
        if self._reconnect is not None:
            self._events.attempt(self.name, "reconnect", self._reconnect)
        self._run(life)

    def _run(self, life: Life) -> None:
        while self._may_turn(life):
            rest_s: float | None = FAILED_REST_S
            try:
                rest_s = self._turn()
            except ReplacedError:
                return
            except BaseException as error:
                self._tell(error)
                if not isinstance(error, Exception):
                    return  # SystemExit and the like are meant to end this thread
            if self._is_resting(life):
                life.wake.wait(rest_s)

    def _tell(self, error: BaseException) -> None:
        """Emit `loop.failed`. A repeated error, which may repeat for hours, has no traceback."""
        text = f"{type(error).__name__}: {error}"
        cause = error if text != self._told or is_outage(error) else None
        self._told = text
        self._events.emit("loop.failed", loop=self.name, error=text, cause=cause)

    def _may_turn(self, life: Life) -> bool:
        with self._lock:
            if not self.is_running or life is not self._life:
                return False
            life.wake.clear()
            life.began = self._turned_at = monotonic()
            return True

    def _is_resting(self, life: Life) -> bool:
        with self._lock:
            life.began = None
            if not self.is_running or life is not self._life:
                return False
            self._patience = 1
            return True
