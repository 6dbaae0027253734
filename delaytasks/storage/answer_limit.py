"""Ends statements whose server gives no answer.

A server that is frozen, or whose storage hangs, still acknowledges what it receives. So no timeout
of TCP ends the wait, and the drivers have none of their own. A thread of each process that uses a
database looks at the connections in use once a second, and shuts the socket of one that has been in
use for too long: the driver raises the error of a lost connection.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from sqlalchemy import Connection, exc

from delaytasks.core.clock import reset_in_child
from delaytasks.storage.engines import socket_of

#: A step of ours, such as a claim or the transaction of a batch, takes a fraction of a second.
ANSWER_LIMIT_S = 30.0
CHECK_S = 1.0
#: The thread ends after so many checks without a connection in use.
IDLE_CHECKS = 60


class Use:
    """One step on a connection, from its first statement to the end of its transaction.

    If the server does not answer, `on_silence` closes other connections to it.
    """

    __slots__ = ("_connection", "_on_silence", "checks", "is_cut")

    def __init__(self, connection: Connection, on_silence: Callable[[], None]) -> None:
        self._connection = connection.connection.driver_connection
        self._on_silence = on_silence
        #: How many checks have seen it: while the whole process is frozen, no time passes.
        self.checks = 0
        self.is_cut = False

    def __enter__(self) -> None:
        _in_use.add(self)

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        _in_use.remove(self)
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
            with socket.socket(fileno=os.dup(socket_of(self._connection))) as own:
                own.shutdown(socket.SHUT_RDWR)
        except Exception:  # each driver has its own error for a connection that is closed already
            pass


class ConnectionsInUse:
    def __init__(self) -> None:
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._uses: set[Use] = set()
        self._is_watched = False

    def add(self, use: Use) -> None:
        with self._lock:
            self._uses.add(use)
            is_watched, self._is_watched = self._is_watched, True
        if not is_watched:
            try:
                threading.Thread(target=self._watch, name="delaytasks-answers", daemon=True).start()
            except RuntimeError:  # the interpreter ends, and starts no thread any more
                self._is_watched = False

    def remove(self, use: Use) -> None:
        with self._lock:
            self._uses.discard(use)

    def _watch(self) -> None:
        idle, rest = 0, threading.Event()
        while idle <= IDLE_CHECKS:
            rest.wait(CHECK_S)
            with self._lock:  # until it is released, no owner closes a socket whose number is used
                for use in self._uses:
                    use.checks += 1
                    if use.checks * CHECK_S > ANSWER_LIMIT_S:
                        use.cut()
                idle = 0 if self._uses else idle + 1
                self._is_watched = idle <= IDLE_CHECKS


_in_use = ConnectionsInUse()
