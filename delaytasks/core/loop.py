"""A thread that repeats one call, continues after errors, and can be replaced by a new thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.core.events import Events

#: The rest after a turn that failed.
FAILED_REST_S = 1.0
#: The shortest time after which a turn counts as stuck, because a machine may be busy.
LEAST_STUCK_S = 2.0


class ReplacedError(BaseException):
    """Ends a turn of a thread that was replaced.

    It is no `Exception`, so that code which continues after errors does not catch it.
    """


class LoopThread:
    """One thread of a loop."""

    def __init__(self, run: Callable[[LoopThread], None], name: str) -> None:
        #: When the current turn began, or last made progress. None while the loop rests.
        self.began: float | None = None
        self.thread = threading.Thread(
            target=run, args=(self,), name=f"delaytasks-{name}", daemon=True
        )


class Loop:
    """Calls `turn` again and again in a thread of its own.

    `turn` returns the seconds to rest after it, or None to rest until `wake` is called or the event
    `wake` is set.

    A turn without progress for `stuck_s` seconds is stuck. Python cannot kill a thread, so `check`
    starts a new one, which first calls `reconnect`: the old thread may wait for a connection whose
    other side no longer answers. The old thread begins no further turn. It ends after its current
    turn, or at its next `report_progress`.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        events: Events,
        stuck_s: float = math.inf,
        reconnect: Callable[[], None] | None = None,
        wake: threading.Event | None = None,
    ) -> None:
        self.name = name
        self._turn = turn
        self._events = events
        self._stuck_s = max(stuck_s, LEAST_STUCK_S)
        self._reconnect = reconnect
        self._wake = wake or threading.Event()
        self._lock = threading.Lock()
        self._current: LoopThread | None = None
        self.is_running = False
        self._turned_at: float | None = None
        self._restarts = 0
        #: Factor of `stuck_s`. It doubles with each restart, so that a slow database does not cause
        #: more and more threads.
        self._patience = 1

    def start(self) -> None:
        with self._lock:
            self.is_running = True
            self._begin(self._run)

    def wake(self) -> None:
        """Start the next turn without a further rest."""
        self._wake.set()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop after the current turn, and wait up to `timeout_s` seconds for its end."""
        with self._lock:
            self.is_running = False
        self._wake.set()
        if self._current is not None:
            self._current.thread.join(timeout_s)

    def report_progress(self) -> None:
        """Report progress of a long turn. Raises `ReplacedError` if the thread was replaced."""
        with self._lock:
            thread = self._current
            if thread is not None:
                if thread.thread is not threading.current_thread():
                    raise ReplacedError
                thread.began = monotonic()

    def check(self) -> None:
        """Replace the thread if it is dead or stuck."""
        with self._lock:
            thread = self._current
            if thread is None or not self.is_running:
                return
            stuck_s = self._stuck_s * self._patience
            if not thread.thread.is_alive():
                reason, run = "dead", self._run
            elif thread.began is not None and monotonic() - thread.began > stuck_s:
                reason, run = "stuck", self._run_reconnected
                self._patience *= 2
            else:
                return
            self._restarts += 1
            self._begin(run)
        self._events.emit("loop.restarted", loop=self.name, reason=reason)

    def info(self) -> dict[str, Any]:
        thread, turned_at = self._current, self._turned_at
        return {
            "is_alive": thread is not None and thread.thread.is_alive(),
            "turned_s_ago": None if turned_at is None else round(monotonic() - turned_at, 3),
            "restarts": self._restarts,
        }

    def _begin(self, run: Callable[[LoopThread], None]) -> None:
        self._current = LoopThread(run, self.name)
        self._current.thread.start()

    def _run_reconnected(self, thread: LoopThread) -> None:
        if self._reconnect is not None:
            self._events.attempt(self.name, "reconnect", self._reconnect)
        self._run(thread)

    def _run(self, thread: LoopThread) -> None:
        while self._may_turn(thread):
            rest_s: float | None = FAILED_REST_S
            try:
                rest_s = self._turn()
            except ReplacedError:
                return
            except BaseException as error:
                self._events.failed(self.name, error)
                if not isinstance(error, Exception):
                    return  # SystemExit and the like are meant to end this thread
            if self._is_resting(thread):
                self._wake.wait(rest_s)

    def _may_turn(self, thread: LoopThread) -> bool:
        with self._lock:
            if not self.is_running or thread is not self._current:
                return False
            self._wake.clear()
            thread.began = self._turned_at = monotonic()
            return True

    def _is_resting(self, thread: LoopThread) -> bool:
        with self._lock:
            thread.began = None
            if not self.is_running or thread is not self._current:
                return False
            self._patience = 1
            return True
