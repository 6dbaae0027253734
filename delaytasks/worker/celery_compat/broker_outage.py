"""A worker whose broker is away or hangs goes on with the table.

Celery's main thread connects to the broker, and it alone may use the pool. Here another thread connects, and the main
thread turns the event loop meanwhile, so that sweeps and drains, which run in threads of their own, find a pool.
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
#: A connection that is made within this time is waited for: to turn the event loop is not worth it.
SOON_S = 0.2
#: How often the main thread looks for a signal to shut down.
LOOK_S = 0.5
#: What a broker may take for one step, and how long a peer may leave sent data unconfirmed, unless the user says so.
STEP_S, SILENT_MS = 5.0, 10_000
#: Where Celery has its pools, and we what wakes the event loop.
KEPT_TICKS = ("celery.concurrency", "delaytasks.worker")


def bound_connections(app: Any) -> None:
    """Give the worker's broker connections time limits where `broker_transport_options` has none: a broker that hangs
    would stop the main thread for as long as it likes."""
    options = dict(app.conf.broker_transport_options or {})
    kind = app.connection_for_read().transport.driver_type
    defaults: dict[str, Any] = {}
    if kind == "redis":
        polls_s = float(
            options.get("polling_interval") or 0
        )  # Redis does not answer earlier when there is no message
        defaults = {
            "socket_timeout": polls_s + STEP_S,
            "socket_connect_timeout": STEP_S,
            "socket_keepalive": True,
        }
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
            defaults["socket_keepalive_options"] = {socket.TCP_USER_TIMEOUT: SILENT_MS}
    elif kind == "amqp":
        defaults = {"read_timeout": STEP_S, "write_timeout": STEP_S}
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            defaults["socket_settings"] = {socket.TCP_USER_TIMEOUT: SILENT_MS}
    app.conf.broker_transport_options = {**defaults, **options}


def lose_the_broker_with_heartbeats(app: Any) -> None:
    """Events that a worker can not send mean that it has lost its broker.

    Celery's dispatcher tries for ever to send a heartbeat again, in the main thread.
    """
    events = app.events
    make = events.Dispatcher

    def dispatcher(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        if "on_send_buffered" in options:  # the one of the worker's consumer
            made.send = partial(_send_once, made.send)
            made.buffer_while_offline = False
        return made

    events.Dispatcher = dispatcher


def _send_once(send: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return send(*args, **{**options, "retry": False})


def meanwhile(consumer: Any, work: Callable[[], Any]) -> Any:
    """What `work` returns or raises; another thread does it while this one, the main thread, turns the event loop."""
    answer: Future[Any] = Future()
    hub = getattr(consumer, "hub", None)
    if hub is None:
        return work()  # and the pool is used from a thread of ours

    def run() -> None:
        try:
            answer.set_result(work())
        except BaseException as error:
            answer.set_exception(error)
        hub.call_soon(_nothing)  # wakes the event loop

    thread = threading.Thread(target=run, name="delaytasks-connect", daemon=True)
    thread.start()
    thread.join(SOON_S)
    if thread.is_alive():
        _turn(consumer, thread.is_alive)
    return answer.result()


def close_meanwhile(consumer: Any, close: Callable[..., Any], error: BaseException) -> Any:
    """Close what is left of a lost connection, which takes its time if the broker hangs."""
    if getattr(consumer, "hub", None) is not None:
        consumer.hub.reset()  # the connection's sockets leave the event loop before another thread closes them
    return meanwhile(consumer, partial(close, error))


def rest(consumer: Any, seconds: float) -> None:
    """Turn the event loop for so long, without a broker."""
    until = monotonic() + seconds
    if getattr(consumer, "hub", None) is not None:
        _turn(consumer, lambda: monotonic() < until)


def _turn(consumer: Any, goes_on: Callable[[], bool]) -> None:
    hub, ticks = consumer.hub, consumer.hub.on_tick
    before, added = timer_entries(hub.timer), set[Any]()
    try:
        # A transport's callback would use, or reconnect, what is broken; the others are needed.
        hub.on_tick = {tick for tick in ticks if tick.__module__.startswith(KEPT_TICKS)}
        consumer.pool.register_with_event_loop(hub)
        hub.call_repeatedly(LOOK_S, _nothing)
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
    """The event loop looks at its other duties whenever it has run a callback."""
