"""Patches of Celery's worker, and the differences between the releases of Celery and kombu.

delaytasks is tested with Celery 5.5 to 5.7, and with the releases of kombu that these require;
`attachment.warn_of_untested_celery` compares the installed release with these. If delaytasks no
longer supports the releases before the one in the last column, delete the function.

================================  ==============================================  =================
here                              because                                         until
================================  ==============================================  =================
`pass_over_exited_processes`      a process that has exited ends the worker       (from Celery 5.7)
`obey_signals_without_output`     SIGTERM fails if nobody reads the output        Celery 5.7
`let_threads_wake`                a call of another thread waits for a message    kombu 5.7
`keep_polling`                    one closed Redis connection stops all others    kombu 5.7
`BEYOND_MAX_S`, `BRPOP_S`         other pauses, and another wait for Redis        kombu 5.7, 5.6
`end_chunks_on_cold_shutdown`     a cold shutdown would wait for chunks forever
`pool.Pool.send`                  `task_time_limit` would end a whole chunk
`pool.Pool.recall`                a lost broker makes Celery forget chunks
`connection.GuardStep`            a malformed message ends the worker
`connection.ReadAhead`            each message costs a round trip to a far Redis
`connection.ReconnectStep`        Celery's main thread waits for a lost broker
`connection.bound_connections`    a silent broker stops the main thread forever
`connection.stop_reading`         a message that was just sent back is read again
================================  ==============================================  =================
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import celery
import kombu
from celery.apps import worker as celery_worker
from celery.utils.log import get_logger
from celery.worker import state

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

logger = get_logger(__name__)


# -- releases --------------------------------------------------------------------------------------

_CELERY = tuple(celery.VERSION[:2])
_KOMBU = tuple(kombu.VERSION[:2])
#: The first pause between two of kombu's attempts to connect, and the difference between two
#: pauses.
PAUSE_STEP_S = 2
#: Before kombu 5.7 the option `interval_max` of `ensure_connection` did not include the first
#: pause: the longest pause was longer by it.
BEYOND_MAX_S = 0 if _KOMBU >= (5, 7) else PAUSE_STEP_S
#: The longest pause without `interval_max`.
LONGEST_PAUSE_S = 30 + BEYOND_MAX_S
#: How long Redis waits for a message before kombu 5.6, whose channels have no `brpop_timeout`.
BRPOP_S = 1


def pass_over_exited_processes(pool: Any) -> None:
    """Let a worker connect again while a process of its prefork pool has exited.

    Until the pool replaces the process, Celery 5.7 watches None for it. With kombu 5.7 this is a
    `ValueError`, which ends the worker.
    """
    workers = getattr(pool, "_pool", None)
    watch = getattr(workers, "_track_child_process", None)
    if watch is None:
        return

    def watch_if_alive(process: Any, hub: Any) -> None:
        if getattr(process, "_sentinel_poll", 0) is not None:
            watch(process, hub)

    workers._track_child_process = watch_if_alive  # type: ignore[union-attr]


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


# -- the end of the worker -------------------------------------------------------------------------


def end_chunks_on_cold_shutdown(worker: Any) -> None:
    """Replace `worker.wait_for_soft_shutdown`, which Celery calls when a cold shutdown begins.

    Celery gives running tasks the time of `worker_soft_shutdown_timeout` and then ends them. It
    does not know our chunks and would wait for them forever, so their processes are killed here.
    Other workers recover the rows.
    """
    worker.wait_for_soft_shutdown = partial(
        _shut_down_coldly, worker, worker.wait_for_soft_shutdown
    )


def _shut_down_coldly(worker: Any, wait_for_soft_shutdown: Callable[[], None]) -> None:
    runtime: WorkerRuntime = worker.delays_runtime
    conf = worker.app.conf
    # In a thread of its own, since this one may have locked what `stop` waits for.
    Thread(target=runtime.stop, name="delaytasks-stop", daemon=True).start()
    seconds = conf.worker_soft_shutdown_timeout
    if state.active_requests or conf.worker_enable_soft_shutdown_on_idle:
        wait_for_soft_shutdown()
    elif seconds > 0 and runtime.dispatcher.is_at_work:
        logger.warning("delaytasks: soft shutdown, running tasks have %g seconds", seconds)
        time.sleep(seconds)
    for pid in runtime.dispatcher.pids():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
