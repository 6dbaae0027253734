"""Ends statements whose server gives no answer.

A server that is frozen, or whose storage hangs, still acknowledges what it receives. So no timeout
of TCP ends the wait, and only one of the drivers has a timeout of its own. A thread of each process
that uses a database looks at the steps in progress once a second, and shuts the socket of one that
takes too long: the driver raises the error of a lost connection.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from sqlalchemy import Connection, exc

from delaytasks.db.engines import socket_of
from delaytasks.model.clock import reset_in_child

#: Far more than a slow server needs: a step of ours, such as a claim or the transaction of a batch,
#: takes a fraction of a second.
ANSWER_LIMIT_S = 30.0
CHECK_S = 1.0
#: After this number of checks that find no step, the thread ends.
IDLE_CHECKS = 60


class BoundedStep:
    """Steps on a connection, one after another. Each is bounded, for example from the first
    statement of a transaction to its end.

    If the server does not answer, `on_silence` closes other connections to it.
    """

    __slots__ = ("_on_silence", "checks", "connection", "is_cut")

    def __init__(self, connection: Connection, on_silence: Callable[[], None]) -> None:
        self.connection = connection.connection.driver_connection
        self._on_silence = on_silence
        #: How many checks have seen it: while the whole process is frozen, no time passes.
        self.checks = 0
        self.is_cut = False

    def __enter__(self) -> None:
        self.checks, self.is_cut = 0, False
        _in_progress.add(self)

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        _in_progress.remove(self)
        if not self.is_cut:
            return
        self._on_silence()
        if isinstance(error, exc.DBAPIError) and error.orig is not None:
            number = [one for one in error.orig.args[:1] if isinstance(one, int)]
            error.orig.args = (*number, f"the server has not answered for {ANSWER_LIMIT_S:g} s")

    def cut(self) -> None:
        """Shut the socket, whatever library reads it, and leave it to its owner to close it."""
        self.is_cut = True
        try:
            opened = socket.socket(fileno=socket_of(self.connection))
            try:
                opened.shutdown(socket.SHUT_RDWR)
            finally:
                opened.detach()
        except Exception:  # each driver has its own error for a connection that is closed already
            pass


class StepsInProgress:
    def __init__(self) -> None:
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        #: The garbage collector may end a step in a thread that holds it.
        self._lock = threading.RLock()
        #: By the driver's connection: if an exception of a signal handler has kept a step from
        #: leaving, the next one on its connection takes its place.
        self._steps: dict[Any, BoundedStep] = {}
        self._watcher: threading.Thread | None = None

    def add(self, step: BoundedStep) -> None:
        with self._lock:
            self._steps[step.connection] = step
            if self._watcher is None:
                watcher = threading.Thread(
                    target=self._watch, name="delaytasks-answers", daemon=True
                )
                with suppress(RuntimeError):  # no thread can be started: the next step tries again
                    watcher.start()
                    self._watcher = watcher

    def remove(self, step: BoundedStep) -> None:
        with self._lock:
            if self._steps.get(step.connection) is step:
                del self._steps[step.connection]

    def _watch(self) -> None:
        idle, rest = 0, threading.Event()
        while True:
            rest.wait(CHECK_S)  # not by `time.sleep`, which the simulation replaces
            with self._lock:  # until it is released, no step ends and closes its socket
                if self._watcher is not threading.current_thread():
                    return
                for step in list(self._steps.values()):
                    step.checks += 1
                    if step.checks * CHECK_S > ANSWER_LIMIT_S:
                        self.remove(step)
                        step.cut()
                idle = 0 if self._steps else idle + 1
                if idle > IDLE_CHECKS:
                    self._watcher = None


_in_progress = StepsInProgress()
