"""Patches of Celery's worker: what it consumes, shows, and does when it stops.

The first part hides the differences between the releases of Celery and kombu. delaytasks is tested
with Celery 5.5 to 5.7, and with the releases of kombu that these require. The comment of each
constant and function there names the release that brought the difference. When delaytasks no longer
supports the releases before it, delete the constant or function. `broker_connection` has the
patches of the consumer.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import celery
import kombu
from celery.apps import worker as celery_worker
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.control import Panel

from delaytasks.loops import within
from delaytasks.model.clock import from_us
from delaytasks.model.inputs import is_queue
from delaytasks.model.task import DEFAULT_QUEUE

if TYPE_CHECKING:
    from delaytasks.broker.publishing import Publisher
    from delaytasks.worker.worker_runtime import WorkerRuntime

logger = get_logger(__name__)


# -- releases --------------------------------------------------------------------------------------

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


# -- the queues that the worker consumes -----------------------------------------------------------


def add_queues(app: Any, names: Collection[str], publisher: Publisher) -> Collection[str]:
    """Add our queues to those that the app's worker consumes, and return all queues of the worker.

    A worker that was started without -Q serves all our queues. Otherwise it serves those that -Q
    names, with our prefix or without it. Without the prefix it also serves Celery's queue of that
    name, which may be intended.
    """
    queues = app.amqp.queues
    chosen = queues._consume_from
    # On Redis, kombu stores each message that is not acknowledged yet. This costs two round trips,
    # and two fifths of the time to receive a message. Ours are acknowledged on receipt. On AMQP,
    # the messages in this worker's socket would be lost at every stop without acknowledgements.
    needs_no_acks = app.connection_for_read().transport.driver_type == "redis"
    # The app may declare queues of its own. Any other chosen name may be one that only calls name.
    declared = {app.conf.task_default_queue, *_names(app.conf.task_queues)}
    prefix = publisher.namespace + "."
    asked = {name.removeprefix(prefix) for name in chosen or () if name not in declared}
    for name in {DEFAULT_QUEUE, *names, *filter(is_queue, asked)}:
        queue = publisher.queue(name)
        if chosen is None or queue.name in chosen or name in chosen:
            queue.no_ack = needs_no_acks
            queues.select_add(queue)
    consumed: Collection[str] = queues.consume_from
    return consumed


def _names(task_queues: Any) -> set[str]:
    """Return the names of the queues in Celery's setting, which is a mapping or an iterable."""
    return {getattr(queue, "name", queue) for queue in task_queues or ()}


# -- rows in the answers of `celery inspect` -------------------------------------------------------

#: The rows in one answer.
MAX_INSPECTED_ROWS = 100
#: The time limit for the database. `celery inspect` waits for one second by default, and the
#: worker's main thread waits for the answer too.
INSPECT_LIMIT_S = 0.5


def show_rows() -> None:
    """Replace Celery's commands, once per process. Other apps' workers answer as before."""
    commands: dict[str, Callable[[WorkerRuntime], list[Any]]] = {
        "active": active_rows,
        "dump_active": active_rows,
        "scheduled": scheduled_entries,
        "dump_schedule": scheduled_entries,
        "registered": registered_tags,
        "dump_tasks": registered_tags,
    }
    for command, rows_of in commands.items():
        original = Panel.data.get(command)
        if original is not None and not isinstance(original, _WithRows):
            Panel.data[command] = _WithRows(original, rows_of)


class _WithRows:
    """A command whose answer is Celery's own answer, followed by rows."""

    def __init__(
        self, original: Callable[..., Any], rows_of: Callable[[WorkerRuntime], list[Any]]
    ) -> None:
        self._original = original
        self._rows_of = rows_of
        self.__doc__ = original.__doc__

    def __call__(self, state: Any, **options: Any) -> Any:
        answer = self._original(state, **options)
        runtime = getattr(getattr(state.consumer, "controller", None), "delays_runtime", None)
        if runtime is None:
            return answer
        return [*answer, *(found for found in self._rows_of(runtime) if found not in answer)]


def active_rows(runtime: WorkerRuntime) -> list[dict[str, Any]]:
    """Return the rows that this worker's processes have claimed and not settled yet."""
    if not runtime.dispatcher.is_at_work:
        return []
    workers = [runtime.processes.name(pid) for pid in runtime.pids()]
    read = partial(runtime.store.inspection.running, workers, MAX_INSPECTED_ROWS)
    return [_request(runtime, row, row.worker) for row in _read(read) or ()]


def scheduled_entries(runtime: WorkerRuntime) -> list[dict[str, Any]]:
    """Return the entries of the timing wheel in the order of their due times."""
    entries = runtime.near_entries.wheel.soonest(MAX_INSPECTED_ROWS)
    inspection = runtime.store.inspection
    rows: dict[int, Any] = _read(partial(inspection.named, [entry.id for entry in entries])) or {}
    return [
        {
            "eta": from_us(entry.due_us).isoformat(),
            "priority": entry.priority,
            "request": _request(runtime, rows[entry.id])
            if entry.id in rows
            else {"id": str(entry.id), "name": None},
        }
        for entry in entries
    ]


def registered_tags(runtime: WorkerRuntime) -> list[str]:
    """Return the tags that have a processor in this worker."""
    return sorted(processor.tag for processor in runtime.registry)


def _request(runtime: WorkerRuntime, row: Any, worker: str | None = None) -> dict[str, Any]:
    """Return a row in Celery's form of a request. `delaytasks show` prints its body."""
    pid = (worker or "").rpartition("/")[2].partition("-")[0]
    return {
        "id": str(row.id),
        "name": row.tag,
        "args": [],
        "kwargs": {"attempt": row.runs},
        "type": row.tag,
        "hostname": runtime.processes.hostname,
        "time_start": row.update_time.timestamp() if worker else None,
        "acknowledged": True,
        "delivery_info": {
            "exchange": "",
            "routing_key": row.queue,
            "priority": row.priority,
            "redelivered": None,
        },
        "worker_pid": int(pid) if pid.isdigit() else None,
    }


def _read(read: Callable[[], Any]) -> Any:
    """Return the database's answer, or None if it does not answer in time."""
    try:
        return within(INSPECT_LIMIT_S, read)
    except Exception:  # the answer has the facts that this process knows by itself
        logger.warning("delaytasks: an inspection had no answer from the database", exc_info=True)
        return None


# -- the jobs of the pool --------------------------------------------------------------------------


def process_ids(celery_pool: Any) -> frozenset[int]:
    """Return the processes of a prefork pool. Other pools have none."""
    processes = getattr(getattr(celery_pool, "_pool", None), "_pool", ())
    return frozenset(process.pid for process in processes if process.pid is not None)


def running_pids(celery_pool: Any) -> set[int]:
    """Return the processes that run the jobs of a pool: its own ones, or this one.

    A process that the pool is about to start in place of another one has no id yet.
    """
    try:
        info = celery_pool.info or {}
    except AttributeError:
        return set()  # a prefork pool that has stopped has no information
    pids = info.get("processes") or [os.getpid()]
    return {pid for pid in pids if pid is not None}


def pids_with(result: Any) -> Sequence[int]:
    """Return the process that has reported that it has the job; it is empty if none has."""
    pids: Sequence[int] = getattr(result, "worker_pids", tuple)()
    return pids


def process_with(result: Any, pids: Collection[int]) -> Any:
    """Return the process of a prefork pool that has the job, or None.

    `pids` are the processes that the pool had when the job was sent. The pool assigns the jobs of a
    process that died to its successor, which does not have them. Such a successor is not in `pids`.
    """
    process = getattr(result, "_write_to", None)
    has_it = process is not None and process.pid in pids and process._is_alive()
    return process if has_it else None


def is_forgotten(result: Any) -> bool:
    """Return whether Celery made its prefork pool forget the job.

    When a worker loses the broker, and when it stops, Celery forgets every job that no process has
    confirmed. It takes them for messages that the broker delivers again. Some of these jobs have
    reached a process nevertheless.
    """
    cache = getattr(result, "_cache", None)
    # The order matters: a job that ends meanwhile is ready before it leaves the cache.
    return cache is not None and result._job not in cache and not result.ready()


def put_back(result: Any) -> None:
    """Let the pool read the result of a job that it has forgotten."""
    result._cache[result._job] = result


def without_time_limits(result: Any) -> None:
    """Remove the app's `task_time_limit` from a job that has not begun.

    The setting is for messages. A chunk has many tasks, and the limit would end all of them. A pool
    with such a limit applies it to every job that it accepts.
    """
    if hasattr(result, "_on_timeout_set"):
        result._on_timeout_set = None
        result._timeout = result._soft_timeout = math.inf


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
