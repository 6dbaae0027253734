"""A thread that takes one turn after another, goes on whatever a turn raises, and can be replaced by a fresh one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events, is_outage

#: After a turn that failed.
FAILED_REST_S = 1.0
#: A machine may be busy: nothing is stuck sooner.
LEAST_STUCK_S = 2.0


class ReplacedError(BaseException):
    """Ends a turn whose loop goes on without it; nothing that goes on after errors may hold it up."""


class Life:
    """One thread of a loop."""

    def __init__(self, run: Callable[[Life], None], name: str) -> None:
        self.wake = threading.Event()
        #: When the turn that is under way began, or last made progress; None while the loop rests.
        self.began: float | None = None
        self.thread = threading.Thread(
            target=run, args=(self,), name=f"delaytasks-{name}", daemon=True
        )


class Loop:
    """`turn` answers how long to rest after it: None is until somebody calls `wake`.

    A turn that shows no progress for `stuck_s` is stuck. No thread can be killed, so a stuck one is left alone: a
    fresh one goes on in its place, after `reconnect`, since what the old one waits for may be a connection on which
    nobody answers any more. The old one can begin no turn, and ends with the one it is in, or at its next `beat`.
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
        #: What was said of the last turn that failed.
        self._told = ""
        #: Each in a row is given twice the time, so that a database that is slow does not get ever more threads.
        self._patience = 1

    def start(self) -> None:
        with self._lock:
            self.is_running = True
            self._begin(self._run)

    def wake(self) -> None:
        """Do the next turn now."""
        if self._life is not None:
            self._life.wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Waits for the turn that is under way."""
        with self._lock:
            self.is_running = False
        if self._life is not None:
            self._life.wake.set()
            self._life.thread.join(timeout_s)

    def beat(self) -> None:
        """Called by a long turn when it makes progress; ends it when it was replaced."""
        with self._lock:
            life = self._life
            if life is not None:
                if life.thread is not threading.current_thread():
                    raise ReplacedError
                life.began = monotonic()

    def look(self) -> None:
        """Puts a fresh thread into the place of one that is dead or stuck."""
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
                    return  # somebody wants this thread to end
            if self._is_resting(life):
                life.wake.wait(rest_s)

    def _tell(self, error: BaseException) -> None:
        """The traceback only of an error that is not that of the turn before: it may be the same for hours."""
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
