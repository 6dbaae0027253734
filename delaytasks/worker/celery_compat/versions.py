"""What differs between the versions of Celery that a worker may run, 5.5 to 5.7, and of kombu with them.

Each constant and function hides one difference from the other modules, and its comment names the version that brought
the difference. When support for that version ends, its part here is deleted.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any

import kombu

_KOMBU = tuple(kombu.VERSION[:2])
#: kombu's pauses between two tries to connect begin with so many seconds, and grow by as many.
PAUSE_STEP_S = 2
#: Before kombu 5.7 `interval_max` did not include the first pause, so the longest pause was two seconds longer.
_BEYOND_MAX_S = 0 if _KOMBU >= (5, 7) else PAUSE_STEP_S
#: The longest pause when nobody sets `interval_max`.
LONGEST_PAUSE_S = 30 + _BEYOND_MAX_S
#: Before kombu 5.6 a Redis channel has no `brpop_timeout`: it always asked Redis to wait for one second.
_BRPOP_S = 1


def interval_max(pause_s: float) -> float:
    """Return the option `interval_max` of `ensure_connection` that gives pauses of at most `pause_s`."""
    return pause_s - _BEYOND_MAX_S


def brpop_s(channel: Any) -> float:
    """Return how long Redis waits for a message before it answers a channel that there is none."""
    return float(getattr(channel, "brpop_timeout", _BRPOP_S))


def mark_busy(pool: Any, processes: Iterable[Any]) -> None:
    """Make a prefork pool send its next jobs to other processes than these as long as there are idle ones.

    Before Celery 5.7 the pool forgets which processes are at work when the worker loses its broker, and could send a
    job to a process that runs a long one while others are idle.
    """
    busy = getattr(getattr(pool, "_pool", None), "_busy_workers", None)
    if busy is not None:
        busy.update(process.inqW_fd for process in processes)


class _Waker:
    """The function `call_soon` of an event loop, which wakes the loop when another thread calls it."""

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
            pass  # it is full, so the loop wakes anyway
        return promised

    def watch(self) -> None:
        """Called in each turn of the loop, since a loop that is reset forgets what it watches."""
        if self._reader.fileno() not in self._hub.readers:
            self._hub.add_reader(self._reader, self._read)

    def _read(self) -> None:
        try:
            self._reader.recv(4096)
        except BlockingIOError:
            pass


def let_threads_wake(hub: Any) -> None:
    """Make the event loop call what other threads give to `call_soon` immediately.

    Before kombu 5.7 the loop finds it when its next timer is due or its next message arrives, a second later or more.
    """
    if hub is not None and _KOMBU < (5, 7) and not isinstance(hub.call_soon, _Waker):
        hub.call_soon = _Waker(hub)


def timer_entries(timer: Any) -> set[Any]:
    """Return what the event loop's timer is to call. Celery has such a function of its own since 5.7."""
    return {scheduled.entry for scheduled in timer.queue}


def keep_polling(transport: Any, loop: Any) -> None:
    """Make the event loop go on to read from Redis when one of the connections of this transport is closed.

    Before kombu 5.7 the loop then reads from none of them any more: after one broken command for remote control, for
    example, the worker takes in no message.
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
