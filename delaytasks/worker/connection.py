"""The connection of Celery's consumer to the broker: its messages, its loss, and its return.

- `GuardStep` refuses messages in the queues of delaytasks that are not ours or not well-formed. Any
  client that can write to the broker can send them. They run nothing, do not end the worker, and do
  not fill its log. Celery's own queues and channels are read as Celery reads them.
- `ReadAhead` takes several messages in each round trip from a distant Redis.
- `ReconnectStep` connects again soon after the broker is back. Until then the worker runs rows from
  the table. Celery's main thread connects to the broker, and only the main thread may use the pool.
  Here another thread connects while the main thread turns the event loop. Therefore sweeps and
  drains, which run in threads of their own, can use the pool.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.utils.log import get_logger
from celery.worker.state import maybe_shutdown
from kombu.message import Message
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis.exceptions import DataError, ResponseError

from delaytasks.broker.arming import RUN, SWEEP
from delaytasks.broker.link import is_home_node_down
from delaytasks.loops import in_background
from delaytasks.model.clock import monotonic
from delaytasks.worker.patches import (
    BEYOND_MAX_S,
    BRPOP_S,
    LONGEST_PAUSE_S,
    PAUSE_STEP_S,
    keep_polling,
)

if TYPE_CHECKING:
    from delaytasks.worker.worker_runtime import WorkerRuntime

logger = get_logger(__name__)


# -- messages --------------------------------------------------------------------------------------

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
        self._round_trip_s = float("inf")
        #: The queues whose answers have not been read, in the order of the commands.
        self._asked: list[str] = []
        channel._size = partial(self._timed, channel._size)
        channel._brpop_start = partial(self._ask, channel._brpop_start)
        # A channel that closes reads the answer to its last `BRPOP` by this method.
        read = guarded(channel._brpop_read)
        channel._brpop_read = partial(self._read, read, is_closing=True)
        channel.handlers["BRPOP"] = partial(self._read, read)

    def _timed(self, size: Callable[[str], int], queue: str) -> int:
        """Measure a round trip: kombu asks for the length of each queue that it declares."""
        began = monotonic()
        length = size(queue)
        self._round_trip_s = min(self._round_trip_s, monotonic() - began)
        return length

    def _ask(self, start: Callable[..., None], *timeout: Any) -> None:
        """Ask for messages of our queues, if Redis is distant, and then for one as kombu does."""
        is_distant = DISTANT_S < self._round_trip_s < float("inf")
        queues = self._channel.active_queues if is_distant else ()
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
            self._round_trip_s = 0.0
            return ()

    def _deliver_one(self, queue: str, message: bytes) -> None:
        self._channel.connection._deliver(loads(bytes_to_str(message)), queue)


# -- a lost broker ---------------------------------------------------------------------------------

#: The pause between two attempts to connect. Celery leaves the pauses to kombu, which lets them
#: grow by two seconds each time, up to thirty.
RECONNECT_PAUSE_S = 4

#: RabbitMQ's codes for a queue or exchange that a worker cannot use, each with the remedy.
REFUSED_REMEDIES = {
    403: "give the broker's user its rights again, or end the exclusive consumer",
    404: "bring its RabbitMQ node back, or create what is missing",
    405: "delete it while no worker runs: it belongs to one connection only",
    406: (
        "delete it while no worker runs, or correct the setting: it exists with another type or "
        "other arguments"
    ),
}
REDIS_REMEDIES = {
    "WRONGTYPE": "delete or rename the key that does not contain what Celery keeps there",
    "": (
        "check that the broker's user may read and write the keys of its queues, that Redis has "
        "memory, and that it is a primary"
    ),
}
UNTIL_CREATED = "; until then this worker works from the table"
SILENT_REMEDY = (
    "at least one of these queues does not answer: bring the nodes of its majority back "
    "(`rabbitmq-queues quorum_status`), or, if it holds no messages of other tasks, delete it, and "
    "workers create it again"
)
_REFUSED_NAME = re.compile(r"(?:queue|exchange) '([^']*)'")


class ReconnectStep(bootsteps.Step):
    """Replaces the methods of Celery's consumer that start it and that connect to the broker."""

    label = "Reconnect"

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        consumer.ensure_connected = partial(self._connect, consumer, consumer.ensure_connected)
        self._lacks_queue = False
        #: Whether the worker has read from its queues since it connected.
        self._is_ready = False
        #: The queue or exchange that RabbitMQ has refused, or the queues of which one is silent.
        self._blocked: str | None = None
        blueprint = getattr(consumer, "blueprint", None)
        if blueprint is not None:
            blueprint.start = partial(self._start, consumer, blueprint.start)
            consumer.on_ready = partial(self._on_ready, consumer, consumer.on_ready)
            lost = consumer.on_connection_error_after_connected
            consumer.on_connection_error_after_connected = partial(self._close, consumer, lost)
            fail_on_unsent_events(consumer.app)

    def _connect(
        self, consumer: Any, ensure_connected: Callable[[Any], Any], connection: Any
    ) -> Any:
        # Celery has just made the pool forget jobs, and the event loop may read the result of one.
        controller = getattr(consumer, "controller", None)
        runtime: WorkerRuntime | None = getattr(controller, "delays_runtime", None)
        if runtime is not None:
            runtime.recall()
        if self._lacks_queue:
            self._lacks_queue = False
            turn_event_loop(consumer, RECONNECT_PAUSE_S)
        return call_in_background(consumer, partial(_retry_often, ensure_connected, connection))

    def _start(self, consumer: Any, start: Callable[[Any], None], parent: Any) -> None:
        """Start the consumer's steps, from connecting on."""
        consumer.controller.delays_runtime.service_watch.mark_broker_lost()
        self._is_ready, began = False, monotonic()
        for step in consumer.steps:
            if type(step).__name__ == "DelayedDelivery" and not isinstance(step.start, partial):
                step.start = partial(_set_up_in_background, step, step.start)
        try:
            start(parent)
        except consumer.channel_errors as error:
            if not self._is_refusal(consumer, error):
                raise
            # The queue comes back with its node, or an operator repairs it. Celery ends the worker
            # after an error of this kind, but not after a lost connection.
            self._lacks_queue = True
            raise ConnectionResetError(f"{error}{UNTIL_CREATED}") from error
        except TimeoutError as error:
            # The broker accepts connections, but a quorum queue without a leader does not answer.
            # Without this pause, the next attempt would stop the main thread again at once.
            if not self._is_ready:
                self._lacks_queue = True
                rest_s = RECONNECT_PAUSE_S + 2 * (monotonic() - began)
                self._report(consumer, "", rest_s, error=repr(error), remedy=SILENT_REMEDY)
            raise

    def _close(self, consumer: Any, close: Callable[..., Any], error: BaseException) -> Any:
        """Close the connection that was lost."""
        consumer.controller.delays_runtime.service_watch.mark_broker_lost()
        connection = consumer.connection
        connection.close = partial(_close_or_report, connection.close)
        return close_in_background(consumer, close, error)

    def _is_refusal(self, consumer: Any, error: BaseException) -> bool:
        """Return whether the broker refuses a queue or an exchange, and report which one."""
        if isinstance(error, ResponseError):
            remedy = next(text for word, text in REDIS_REMEDIES.items() if word in str(error))
            self._report(consumer, "", 2 * RECONNECT_PAUSE_S, error=str(error), remedy=remedy)
            return True
        code, name = getattr(error, "reply_code", None), _REFUSED_NAME.search(str(error))
        if code not in REFUSED_REMEDIES or name is None:
            return is_home_node_down(error)
        remedy = REFUSED_REMEDIES[code]
        rest_s = 2 * RECONNECT_PAUSE_S
        self._report(consumer, name[1], rest_s, code=code, error=str(error), remedy=remedy)
        return True

    def _report(
        self, consumer: Any, key: str, rest_s: float, *, remedy: str, **fields: Any
    ) -> None:
        """Report that this worker reads no queue now, because of `key`, and send none messages.

        Without a `key`, it may be any of the worker's queues. The next attempt to read them ends
        within `rest_s` seconds.
        """
        runtime: WorkerRuntime = consumer.controller.delays_runtime
        publisher = runtime.runtime.publisher
        if not key:
            options = consumer.app.conf.broker_transport_options or {}
            prefix = options.get("global_keyprefix", "")
            names = (publisher.queue(queue).name for queue in runtime.processes.queues)
            key = ", ".join(prefix + name for name in names)
        self._blocked = key
        runtime.events.emit("queue.blocked", key=key, remedy=remedy + UNTIL_CREATED, **fields)
        for queue in runtime.processes.queues:
            # Each worker drains the queue from the table.
            publisher.rest(queue, rest_s)

    def _on_ready(self, consumer: Any, on_ready: Callable[[], None]) -> None:
        self._is_ready = True
        runtime: WorkerRuntime = consumer.controller.delays_runtime
        runtime.connected()
        blocked, self._blocked = self._blocked, None
        if blocked is not None:
            runtime.events.emit("queue.unblocked", key=blocked)
        on_ready()


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


def _set_up_in_background(step: Any, start: Callable[[Any], None], consumer: Any) -> None:
    """Set up native delayed delivery, which delaytasks does not need, in another thread.

    Celery's step connects to the broker of each URL, and retries for many seconds if a broker does
    not answer. The worker takes in messages meanwhile.
    """
    step._validate_configuration(consumer.app)

    def set_up() -> None:
        try:
            start(consumer)
        except Exception:
            logger.exception("delaytasks: native delayed delivery could not be set up")

    in_background(set_up, "delivery")


def _retry_often(ensure_connected: Callable[[Any], Any], connection: Any) -> Any:
    """Connect the consumer with pauses of `RECONNECT_PAUSE_S`; other connections keep theirs."""
    ensure = connection.ensure_connection

    def ensure_with_short_pauses(errback: Any, max_retries: int | None, **options: Any) -> Any:
        return ensure(
            errback,
            max_retries and retries_as_long_as(max_retries),
            interval_max=RECONNECT_PAUSE_S - BEYOND_MAX_S,
            **options,
        )

    connection.ensure_connection = ensure_with_short_pauses
    return ensure_connected(connection)


def retries_as_long_as(retries: int) -> int:
    """Return how many retries with our pauses last as long as `retries` with kombu's pauses."""
    lasts_s = sum(min(PAUSE_STEP_S * n, LONGEST_PAUSE_S) for n in range(1, retries + 1))
    return -(-lasts_s // RECONNECT_PAUSE_S) + 1  # the first pause is half as long


# -- without a broker ------------------------------------------------------------------------------

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
    kind = app.connection_for_read().transport.driver_type
    defaults: dict[str, Any] = {}
    if kind == "redis":
        # Without a message, Redis answers only after the polling interval.
        polling_s = float(options.get("polling_interval") or 0)
        defaults = {
            "socket_timeout": polling_s + BROKER_STEP_S,
            "socket_connect_timeout": BROKER_STEP_S,
            "socket_keepalive": True,
        }
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
            defaults["socket_keepalive_options"] = {socket.TCP_USER_TIMEOUT: TCP_USER_TIMEOUT_MS}
    elif kind == "amqp":
        defaults = {"read_timeout": BROKER_STEP_S, "write_timeout": BROKER_STEP_S}
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            defaults["socket_settings"] = {socket.TCP_USER_TIMEOUT: TCP_USER_TIMEOUT_MS}
    app.conf.broker_transport_options = {**defaults, **options}


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
    answer: Future[Any] = Future()
    hub = getattr(consumer, "hub", None)
    if hub is None:
        return work()

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
        hub.call_soon(_nothing)  # wakes the event loop

    thread = threading.Thread(target=run, name="delaytasks-connect", daemon=True)
    thread.start()
    thread.join(CONNECT_WAIT_S)
    if thread.is_alive():
        _turn(consumer, thread.is_alive)
    return answer.result()


def close_in_background(consumer: Any, close: Callable[..., Any], error: BaseException) -> Any:
    """Close a lost connection in another thread: it takes long if the broker does not answer."""
    if getattr(consumer, "hub", None) is not None:
        # The sockets leave the event loop before another thread closes them.
        consumer.hub.reset()
    return call_in_background(consumer, partial(close, error))


def turn_event_loop(consumer: Any, seconds: float) -> None:
    """Turn the event loop for `seconds`, without a broker."""
    until = monotonic() + seconds
    if getattr(consumer, "hub", None) is not None:
        _turn(consumer, lambda: monotonic() < until)


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
            maybe_shutdown()
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


# -- a worker that stops ---------------------------------------------------------------------------

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
