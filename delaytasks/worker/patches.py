"""What delaytasks changes in Celery's worker, and the differences between releases.

delaytasks is tested with Celery 5.5 to 5.7, and with the releases of kombu that these require;
`attachment.warn_of_untested_celery` compares the installed release with these. If delaytasks no
longer supports the releases before the one in the last column, delete the function.

================================  ==============================================  =================
here                              because                                         until
================================  ==============================================  =================
`pass_over_exited_processes`      a process that has exited ends the worker       (from Celery 5.7)
`let_calls_wake`                a call of another thread waits for a message    kombu 5.7
`keep_polling`                    one closed Redis connection stops all others    kombu 5.7
`BRPOP_S`                         another wait for Redis                          kombu 5.6
`GuardStep`                       a malformed message ends the worker
`ReadAhead`                       each message costs a round trip to a far Redis
`ReconnectStep`                   Celery's main thread waits for a lost broker
`bound_connections`               a silent broker stops the main thread forever
`stop_reading`                    a message that was just sent back is read again
`end_chunks_on_cold_shutdown`     a cold shutdown would wait for chunks forever
`pool.Pool.send`                  `task_time_limit` would end a whole chunk
`pool.Pool.recall`                a lost broker makes Celery forget chunks
================================  ==============================================  =================
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any

import kombu
from celery import bootsteps
from celery.utils.log import get_logger
from celery.worker import state
from kombu.message import Message
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import DataError, ResponseError

from delaytasks.broker.arming import RUN, SWEEP
from delaytasks.loops import start_thread
from delaytasks.model.clock import monotonic

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

logger = get_logger(__name__)


# -- releases --------------------------------------------------------------------------------------

_KOMBU = tuple(kombu.VERSION[:2])
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


class _Waker:
    """A `call_soon` for an event loop that wakes the loop."""

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


def let_calls_wake(hub: Any, from_own_thread: bool = False) -> None:
    """Make `call_soon` wake the event loop if another thread calls it.

    Before kombu 5.7 the loop calls the function when its next timer is due or its next message
    arrives, which may be a second later or more. Later versions still do that if a function that
    the loop calls is the caller, as in a solo pool.
    """
    is_needed = from_own_thread or _KOMBU < (5, 7)
    if hub is not None and is_needed and not isinstance(hub.call_soon, _Waker):
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


# -- messages --------------------------------------------------------------------------------------

# Any client that can write to the broker can send messages that are not ours or not well-formed to
# our queues. They run nothing, do not end the worker, and do not fill its log. Celery's own queues
# and channels are read as Celery reads them.


#: Longer messages are not ours: 1,000 entries of four 64-bit numbers fit.
MAX_MESSAGE_BYTES = 256 * 1024
#: The only content type that is decoded.
JSON = "application/json"
#: Errors from reading a malformed message or using its fields, such as a list as delivery tag.
DATA_ERRORS = (LookupError, TypeError, ValueError, DataError)


class GuardStep(bootsteps.Step):
    """Wraps the function with which Celery's consumer handles each message."""

    label = "Guard"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._consumer = consumer
        make, connect = consumer.create_task_handler, consumer.connect
        consumer.create_task_handler = lambda *args, **options: self._guarded(
            make(*args, **options)
        )
        consumer.connect = lambda: self._connected(connect())

    def _connected(self, connection: Any) -> Any:
        if connection.transport.driver_type == "redis":
            prefix = self._runtime.settings.namespace + "."
            keep_polling(connection.transport, self._consumer.hub)
            ReadAhead(connection.default_channel, prefix, self._guarded)
        return connection

    @property
    def _runtime(self) -> Any:
        return self._consumer.controller.delays_runtime

    def _guarded(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return `handle` as a function that raises only errors of the broker.

        Its argument is a message, if the message has been decoded. Otherwise the function decodes
        a message, which Redis has already removed from its list.
        """
        consumer = self._consumer
        kinds = consumer.connection_errors + consumer.channel_errors

        def handle_or_refuse(*args: Any, **options: Any) -> Any:
            messages = [each for each in args if isinstance(each, Message)]
            try:
                for message in messages:
                    self._check(message)
                return handle(*args, **options)
            except Empty:
                raise
            except Exception as error:
                # Celery counts a `KeyError` from a malformed message among the connection errors.
                if isinstance(error, OSError) or (
                    isinstance(error, kinds) and not isinstance(error, DATA_ERRORS)
                ):
                    raise
                self._runtime.events.refuse("message", error)
                for message in messages:
                    self._acknowledge(message)
            return None

        return handle_or_refuse

    def _acknowledge(self, message: Any) -> None:
        try:
            if not message.acknowledged:
                message.ack_log_error(logger, self._consumer.connection_errors)
        except DATA_ERRORS:
            pass  # the delivery tag is malformed, so the broker has recorded nothing under it

    def _check(self, message: Any) -> None:
        """Raise an error unless the message may be ours, or is Celery's own.

        Only JSON is decoded in our queues, whatever the app's `accept_content` says.
        """
        headers = message.headers
        if not self._is_in_our_queue(message) and headers.get("task") not in (RUN, SWEEP):
            return
        if message.content_type != JSON:
            raise ValueError(f"content type {message.content_type!r:.40}")
        if message.body is not None and len(message.body) > MAX_MESSAGE_BYTES:
            raise ValueError("too long")
        message.accept = {JSON}
        # Celery would log a message without a known task as a whole.
        name = headers["task"] if "task" in headers else message.payload["task"]
        if name not in self._consumer.strategies:
            raise ValueError(f"task {name!r:.40}")

    def _is_in_our_queue(self, message: Any) -> bool:
        """Return whether the message was in a queue of delaytasks.

        In Redis the name of the queue is a field of the message, which its sender can choose. A
        worker that serves only queues of delaytasks does not read this field.
        """
        prefix = self._runtime.settings.namespace + "."
        tasks = self._consumer.task_consumer
        if tasks is not None and all(queue.name.startswith(prefix) for queue in tasks.queues):
            return True
        return str((message.delivery_info or {}).get("routing_key")).startswith(prefix)


# -- a distant Redis -------------------------------------------------------------------------------

#: Redis is distant if a round trip takes longer. A near one would only have more commands to
#: execute.
DISTANT_S = 0.005
#: The number of messages that one command takes. The others are left to other workers.
MESSAGES = 20

#: Makes a function that does not raise the errors that a malformed message causes.
Guarded = Callable[[Callable[..., Any]], Callable[..., Any]]


class ReadAhead:
    """Sends `RPOP` for each queue of delaytasks before each `BRPOP` of a channel.

    It replaces the functions with which kombu reads from `channel`. `prefix` begins the names of
    our queues. The messages of these queues are not acknowledged, so their number is not limited.
    """

    def __init__(self, channel: Any, prefix: str, guarded: Guarded) -> None:
        self._channel = channel
        self._prefix = prefix
        self._deliver = guarded(self._deliver_one)
        began = monotonic()
        channel.client.ping()
        self._is_distant = monotonic() - began > DISTANT_S
        #: The queues whose answers have not been read, in the order of the commands.
        self._asked: list[str] = []
        channel._brpop_start = partial(self._ask, channel._brpop_start)
        # A channel that closes reads the answer to its last `BRPOP` by this method.
        read = guarded(channel._brpop_read)
        channel._brpop_read = partial(self._read, read, is_closing=True)
        channel.handlers["BRPOP"] = partial(self._read, read)

    def _ask(self, start: Callable[..., None], *timeout: Any) -> None:
        """Ask for messages of our queues, if Redis is distant, and then for one as kombu does."""
        queues = self._channel.active_queues if self._is_distant else ()
        ours = [queue for queue in queues if queue.startswith(self._prefix)]
        connection = self._channel.client.connection
        for queue in ours:
            key = self._channel.global_keyprefix + self._channel._q_for_pri(queue, 0)
            connection.send_command("RPOP", key, MESSAGES)
        self._asked = ours
        start(*timeout)

    def _read(
        self, read_one: Callable[..., Any], *, is_closing: bool = False, **options: Any
    ) -> Any:
        """Deliver the messages that were asked for ahead, and then the one of `BRPOP`.

        Unless the channel is closing, do not wait for the answer to the `BRPOP` if it has not
        arrived together with the other ones.
        """
        connection, asked, self._asked = self._channel.client.connection, self._asked, []
        found = []
        try:
            for queue in asked:
                found += [(queue, message) for message in self._answer(connection)]
            if asked and not is_closing and not connection.can_read(timeout=0):
                return None
        except self._channel.connection_errors:
            connection.disconnect()  # as kombu does, which then connects again
            raise
        finally:
            for queue, message in found:
                self._deliver(queue, message)
        return read_one(**options)

    def _answer(self, connection: Any) -> Collection[bytes]:
        try:
            return self._channel.client.parse_response(connection, "RPOP") or ()
        except ResponseError:
            # Redis is older than 6.2, or refuses the key, as it then also does for `BRPOP`.
            self._is_distant = False
            return ()

    def _deliver_one(self, queue: str, message: bytes) -> None:
        self._channel.connection._deliver(loads(bytes_to_str(message)), queue)


# -- a lost broker ---------------------------------------------------------------------------------

# Celery's main thread connects to the broker, and only the main thread may use the pool. Here
# another thread connects while the main thread turns the event loop. Therefore sweeps and drains,
# which run in threads of their own, can use the pool, and the worker runs rows from the table.


#: The pause between two attempts to connect. Celery's own pauses grow up to half a minute.
RECONNECT_PAUSE_S = 4
#: For this long, no message is sent to the queues of a worker that cannot read them. The next
#: attempt to read them ends before.
BLOCKED_REST_S = 3 * RECONNECT_PAUSE_S


class ReconnectStep(bootsteps.Step):
    """Replaces the methods of Celery's consumer that start it and that connect to the broker.

    The worker never gives its broker up. A broker that it reaches may refuse a queue, since its
    node is down, or since it exists with other arguments, or may not answer for a quorum queue
    without a leader. Then the worker tries again, too.
    """

    label = "Reconnect"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._consumer = consumer
        #: Whether the worker has read from its queues since it connected.
        self._is_ready = False
        #: The queues that the last attempt could not read, by name.
        self._blocked: str | None = None
        conf = consumer.app.conf
        # Celery ends a worker after errors of a queue, but not after a lost connection.
        conf.broker_connection_max_retries, conf.broker_channel_error_retry = None, True
        consumer.ensure_connected = partial(self._connect, consumer.ensure_connected)
        consumer.blueprint.start = partial(self._start, consumer.blueprint.start)
        consumer.on_ready = partial(self._on_ready, consumer.on_ready)
        lost = consumer.on_connection_error_after_connected
        consumer.on_connection_error_after_connected = partial(self._close, lost)
        fail_on_unsent_events(consumer.app)

    @property
    def _runtime(self) -> Any:
        return self._consumer.controller.delays_runtime

    def _connect(self, ensure_connected: Callable[[Any], Any], connection: Any) -> Any:
        connection.ensure_connection = partial(
            connection.ensure_connection, interval_start=RECONNECT_PAUSE_S, interval_step=0
        )
        return call_in_background(self._consumer, partial(ensure_connected, connection))

    def _start(self, start: Callable[[Any], None], parent: Any) -> None:
        """Start the consumer's steps, from connecting on."""
        consumer = self._consumer
        self._runtime.service_watch.mark_broker_lost()
        # Celery has just made the pool forget jobs, and the event loop may read the result of one.
        self._runtime.recall()
        self._is_ready = False
        if self._blocked is not None:
            call_in_background(consumer, partial(time.sleep, RECONNECT_PAUSE_S))
        for step in consumer.steps:
            if type(step).__name__ == "DelayedDelivery" and not isinstance(step.start, partial):
                step.start = partial(_start_in_thread, step.start)
        try:
            start(parent)
        except (TimeoutError, *consumer.channel_errors) as error:
            if not (self._is_ready and isinstance(error, TimeoutError)):
                self._report_blocked(error)
            raise

    def _report_blocked(self, error: BaseException) -> None:
        """Report that this worker reads no queue now, and let none be sent messages."""
        publisher, queues = self._runtime.runtime.publisher, self._runtime.processes.queues
        options = self._consumer.app.conf.broker_transport_options or {}
        prefix = options.get("global_keyprefix", "")
        if self._blocked is None:
            self._blocked = ", ".join(prefix + publisher.queue(queue).name for queue in queues)
            text = f"{type(error).__name__}: {error}"
            self._runtime.events.emit("queue.blocked", key=self._blocked, error=text)
        for queue in queues:
            # Each worker drains the queue from the table.
            publisher.rest(queue, BLOCKED_REST_S)

    def _close(self, close: Callable[..., Any], error: BaseException) -> Any:
        """Close the connection that was lost, in another thread: the broker may not answer."""
        consumer = self._consumer
        self._runtime.service_watch.mark_broker_lost()
        connection = consumer.connection
        connection.close = partial(_close_or_report, connection.close)
        if getattr(consumer, "hub", None) is not None:
            # The sockets leave the event loop before another thread closes them.
            reset_hub(consumer.hub)
            self._runtime.call_soon(self._runtime.dispatcher.pump)
        return call_in_background(consumer, partial(close, error))

    def _on_ready(self, on_ready: Callable[[], None]) -> None:
        self._is_ready = True
        self._runtime.connected()
        blocked, self._blocked = self._blocked, None
        if blocked is not None:
            self._runtime.events.emit("queue.unblocked", key=blocked)
        on_ready()


def reset_hub(hub: Any) -> None:
    """Remove all sockets from the event loop, which makes the calls that wait and forgets those
    behind one that fails.

    One of them may read from the lost connection. Its error must not end the worker.
    """
    while True:
        try:
            hub.reset()
            return
        except Exception as error:
            logger.debug("a call of the event loop failed: %r", error)


def _start_in_thread(start: Callable[[Any], None], consumer: Any) -> None:
    """Set up native delayed delivery, which delaytasks does not need, in another thread.

    Celery's step connects to the broker of each URL, makes dozens of queues, and retries for many
    seconds. It logs its errors. The worker takes in messages meanwhile.
    """
    threading.Thread(
        target=start, args=(consumer,), name="delaytasks-delivery", daemon=True
    ).start()


def _close_or_report(close: Callable[[], None]) -> None:
    """Close a lost connection; an error must not end the worker.

    Celery 5.7 collects the connection first. If Redis does not answer then, the channel fails here
    with an `AttributeError`, since it no longer knows the server to which it should return messages
    that are not acknowledged. The visibility timeout returns them.
    """
    try:
        close()
    except Exception:
        logger.warning("delaytasks: the lost broker connection could not be closed", exc_info=True)


#: The main thread waits this long for a connection before it turns the event loop.
CONNECT_WAIT_S = 0.2
#: While it turns the event loop, the main thread checks this often for a signal to shut down.
SIGNAL_CHECK_S = 0.5
#: The time limit for one step of the broker, unless `broker_transport_options` has another one.
BROKER_STEP_S = 5.0
#: TCP closes a connection if the broker does not acknowledge sent data within this time.
TCP_USER_TIMEOUT_MS = 10_000
#: Callbacks of the event loop from these modules are called while there is no broker: Celery's
#: pools, and the function that wakes the event loop.
BROKERLESS_MODULES = ("celery.concurrency", "delaytasks.worker")


def bound_connections(app: Any) -> None:
    """Give the worker's broker connections the time limits that the app does not set.

    Otherwise a broker that does not answer would stop the main thread indefinitely.
    """
    options = dict(app.conf.broker_transport_options or {})
    # Without a message, Redis answers only after the polling interval.
    polling_s = float(options.get("polling_interval") or 0)
    has_option = hasattr(socket, "TCP_USER_TIMEOUT")  # on Linux
    tcp = {socket.TCP_USER_TIMEOUT: TCP_USER_TIMEOUT_MS} if has_option else {}
    defaults: dict[str, dict[str, Any]] = {
        "redis": {
            "socket_timeout": polling_s + BROKER_STEP_S,
            "socket_connect_timeout": BROKER_STEP_S,
            "socket_keepalive": True,
            "socket_keepalive_options": tcp,
        },
        "amqp": {
            "read_timeout": BROKER_STEP_S,
            "write_timeout": BROKER_STEP_S,
            "socket_settings": tcp,
        },
    }
    kind = app.connection_for_read().transport.driver_type
    app.conf.broker_transport_options = {**defaults.get(kind, {}), **options}


def fail_on_unsent_events(app: Any) -> None:
    """Make an event that the worker cannot send end its connection to the broker.

    Otherwise Celery's dispatcher retries a heartbeat forever, in the main thread.
    """
    events = app.events
    make = events.Dispatcher

    def dispatcher(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        if "on_send_buffered" in options:  # the dispatcher of the worker's consumer
            made.send = partial(_send_once, made.send)
            made.buffer_while_offline = False
        return made

    events.Dispatcher = dispatcher


def _send_once(send: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return send(*args, **{**options, "retry": False})


def call_in_background(consumer: Any, work: Callable[[], Any]) -> Any:
    """Call `work` in another thread while this one, the main thread, turns the event loop.

    Return or raise what `work` returns or raises. Without an event loop, `work` runs in this
    thread, since another thread uses the pool then.
    """
    hub = getattr(consumer, "hub", None)
    if hub is None:
        return work()
    answers: list[Future[Any]] = []

    def done(answer: Future[Any]) -> None:
        answers.append(answer)
        hub.call_soon(_nothing)  # wakes the event loop

    thread = start_thread("delaytasks-connect", work, done)
    thread.join(CONNECT_WAIT_S)
    if thread.is_alive():
        _turn(consumer, thread.is_alive)
    return answers[0].result()


def _turn(consumer: Any, goes_on: Callable[[], bool]) -> None:
    hub, ticks = consumer.hub, consumer.hub.on_tick
    before = added = {scheduled.entry for scheduled in hub.timer.queue}
    try:
        # A transport's callback would use the broken connection, or connect again.
        hub.on_tick = {tick for tick in ticks if tick.__module__.startswith(BROKERLESS_MODULES)}
        consumer.pool.register_with_event_loop(hub)
        hub.call_repeatedly(SIGNAL_CHECK_S, _nothing)
        added = {scheduled.entry for scheduled in hub.timer.queue}
        loop = hub.create_loop()
        while goes_on():
            state.maybe_shutdown()
            try:
                next(loop)
            except StopIteration:
                loop = hub.create_loop()
            except Exception:
                logger.exception("delaytasks: the event loop goes on without a broker")
                loop = hub.create_loop()
    finally:
        hub.on_tick |= ticks
        for entry in added - before:  # Celery registers them again
            entry.cancel()


def _nothing() -> None:
    """Do nothing: the event loop looks at its other duties after it has called a function."""


# -- the end of the worker -------------------------------------------------------------------------

#: Redis answers a pending BRPOP at most this long after its timeout.
BRPOP_ANSWER_S = 1.0


def stop_reading(consumer: Any) -> None:
    """On Redis, wait for the answer to the last BRPOP of a consumer that has stopped.

    The answer may be a message, possibly one that this worker has just sent back. The wait takes
    about a second at most. kombu returns the message to its queue, which is no longer consumed.
    """
    connection = getattr(consumer, "connection", None)
    if connection is None or connection.transport.driver_type != "redis":
        return
    for channel in connection.transport.channels or ():
        client = vars(channel).get("client")
        if client is None or client.connection is None:
            continue
        try:
            timeout_s = float(getattr(channel, "brpop_timeout", BRPOP_S)) + BRPOP_ANSWER_S
            if channel._in_poll and client.connection.can_read(timeout_s):
                channel._brpop_read()
        except Exception:
            pass  # Redis is down, or had no message
        client.connection.disconnect()
        channel._in_poll = None  # or closing the channel would wait for an answer that cannot come


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
    threading.Thread(target=runtime.stop, name="delaytasks-stop", daemon=True).start()
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
