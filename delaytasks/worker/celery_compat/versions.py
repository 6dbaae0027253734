"""Hides the differences between the releases of Celery and kombu from the other modules.

delaytasks is tested with Celery 5.5 to 5.7, and with the releases of kombu that these require. The
comment of each constant and function names the release that brought the difference. When delaytasks
no longer supports the releases before it, delete the constant or function.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from typing import Any

import celery
import kombu
from celery.apps import worker as celery_worker

#: The oldest release of Celery that delaytasks supports and is tested with.
OLDEST_CELERY = (5, 5)
#: The newest release of Celery that delaytasks is tested with. A worker with a newer one logs a
#: warning.
NEWEST_TESTED_CELERY = (5, 7)

_CELERY = tuple(celery.VERSION[:2])
_KOMBU = tuple(kombu.VERSION[:2])
#: The first pause between two of kombu's attempts to connect, and the difference between two
#: pauses.
PAUSE_STEP_S = 2
#: Before kombu 5.7 `interval_max` did not include the first pause: the longest pause was longer by
#: it.
_BEYOND_MAX_S = 0 if _KOMBU >= (5, 7) else PAUSE_STEP_S
#: The longest pause without `interval_max`.
LONGEST_PAUSE_S = 30 + _BEYOND_MAX_S
#: Before kombu 5.6 a Redis channel has no `brpop_timeout`: each request waited for one second.
_BRPOP_S = 1


def interval_max(pause_s: float) -> float:
    """Return the option `interval_max` of `ensure_connection` that gives pauses of at most
    `pause_s`.
    """
    return pause_s - _BEYOND_MAX_S


def brpop_s(channel: Any) -> float:
    """Return how long Redis waits for a message before it answers a channel without one."""
    return float(getattr(channel, "brpop_timeout", _BRPOP_S))


def mark_busy(pool: Any, processes: Iterable[Any]) -> None:
    """Make a prefork pool send jobs to `processes` only when it has no idle process.

    Before Celery 5.7 a pool forgets which processes are busy when the worker loses its broker. It
    could then send a job to a process that runs a long job while other processes are idle.
    """
    busy = getattr(getattr(pool, "_pool", None), "_busy_workers", None)
    if busy is not None:
        busy.update(process.inqW_fd for process in processes)


def obey_signals_without_output() -> None:
    """Let the worker obey SIGTERM although the program that reads its output has ended.

    Before Celery 5.7 the signal handler fails when it cannot write its line, and the worker goes
    on.
    """
    say = celery_worker.safe_say
    if _CELERY >= (5, 7) or say.__module__ == __name__:
        return

    def say_if_possible(*args: Any) -> None:
        with contextlib.suppress(OSError):
            say(*args)

    celery_worker.safe_say = say_if_possible


class _Waker:
    """A `call_soon` for an event loop that wakes the loop if another thread calls it."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self._call_soon = hub.call_soon
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        hub.on_tick.add(self.watch)

    def __call__(self, callback: Any, *args: Any) -> Any:
        promised = self._call_soon(callback, *args)
        try:
            self._writer.send(b"\0")
        except BlockingIOError:
            pass  # the socket is full, so the loop wakes anyway
        return promised

    def watch(self) -> None:
        """Watch the socket again, in each turn of the loop, since a reset removes readers."""
        if self._reader.fileno() not in self._hub.readers:
            self._hub.add_reader(self._reader, self._read)

    def _read(self) -> None:
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            pass


def let_threads_wake(hub: Any) -> None:
    """Make `call_soon` wake the event loop if another thread calls it.

    Before kombu 5.7 the loop calls the function when its next timer is due or its next message
    arrives, which may be a second later or more.
    """
    if hub is not None and _KOMBU < (5, 7) and not isinstance(hub.call_soon, _Waker):
        hub.call_soon = _Waker(hub)


def timer_entries(timer: Any) -> set[Any]:
    """Return the entries of the event loop's timer. Celery 5.7 has such a function of its own."""
    return {scheduled.entry for scheduled in timer.queue}


def keep_polling(transport: Any, loop: Any) -> None:
    """Make the event loop read from the other Redis connections after one of them is closed.

    Before kombu 5.7 the loop stops reading from all connections of this transport: after one
    malformed command for remote control, for example, the worker takes in no message.
    """
    if loop is None or _KOMBU >= (5, 7):
        return
    cycle = transport.cycle

    def forget(closed: Any) -> None:
        keys = [key for key in cycle._chan_to_sock if key[1].connection is closed]
        readers = {(channel, kind) for channel, _, kind in keys}
        for fd in [fd for fd, reader in cycle._fd_to_chan.items() if reader in readers]:
            del cycle._fd_to_chan[fd]
            loop.remove(fd)
        for key in keys:
            del cycle._chan_to_sock[key]

    cycle._on_connection_disconnect = forget
