"""Keeps a worker running rows from the table while its broker is unavailable or does not answer.

Celery's main thread connects to the broker, and only the main thread may use the pool. Here another
thread connects while the main thread turns the event loop, so that sweeps and drains, which run in
threads of their own, can use the pool.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from celery.utils.log import get_logger
from celery.worker.state import maybe_shutdown

from delaytasks.core.clock import monotonic
from delaytasks.worker.celery_compat.versions import timer_entries

logger = get_logger(__name__)
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
    before, added = timer_entries(hub.timer), set[Any]()
    try:
        # A transport's callback would use the broken connection, or connect again.
        hub.on_tick = {tick for tick in ticks if tick.__module__.startswith(BROKERLESS_MODULES)}
        consumer.pool.register_with_event_loop(hub)
        hub.call_repeatedly(SIGNAL_CHECK_S, _nothing)
        added = timer_entries(hub.timer) - before
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
        for entry in added:  # Celery registers them again
            entry.cancel()


def _nothing() -> None:
    """Do nothing: the event loop looks at its other duties after it has called a function."""
