"""The undocumented names of Celery, kombu, billiard, py-amqp and redis-py that delaytasks uses.

A release of these libraries may change such a name without notice. `SHAPES` says what delaytasks
requires of each, and `tests/unit/test_celery_internals.py` checks it. Add an entry before you use
another undocumented name.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import amqp
import celery
import pytest
import redis
from billiard.pool import ApplyResult
from celery import Celery, bootsteps
from celery.app.log import Logging
from celery.beat import ScheduleEntry, Scheduler
from celery.concurrency.prefork import TaskPool
from celery.schedules import schedule
from celery.worker import state
from celery.worker.consumer import Consumer
from celery.worker.control import Panel
from kombu.asynchronous import Hub
from kombu.connection import Connection
from kombu.message import Message
from kombu.transport import redis as redis_transport

Shape = Callable[[Any], bool]


# -- objects that have attributes which their classes do not show ---------------------------------


def _work(body: object) -> None: ...


def app() -> Celery:
    return Celery("internals", broker="memory://", set_as_current=False)


class Worker:
    """Makes each object once, when a test first asks for it."""

    @cached_property
    def app(self) -> Celery:
        return app()

    @cached_property
    def consumer(self) -> Consumer:
        controller = SimpleNamespace(app=self.app, use_eventloop=True, semaphore=None)
        options = {"initial_prefetch_count": 1, "pool": None, "timer": None}
        return Consumer(print, app=self.app, controller=controller, hub=Hub(), **options)

    @cached_property
    def pool(self) -> TaskPool:
        initargs = (self.app, "internals")
        pool = TaskPool(1, app=self.app, initargs=initargs, threads=False, putlocks=False)
        pool.start()
        return pool

    @cached_property
    def redis_channel(self) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redis.Redis, "ping", lambda client: True)
            return Connection("redis://127.0.0.1:1/0").channel()

    @cached_property
    def amqp_channel(self) -> amqp.Channel:
        connection = amqp.Connection("127.0.0.1:1")
        connection.channels[1] = None
        return amqp.Channel(connection, 1)

    def close(self) -> None:
        if "pool" in vars(self):
            self.pool.terminate()

    def of(self, owner: str) -> Any:
        """Return an instance for the classes whose instances have more attributes, else None."""
        makers: dict[str, Callable[[], Any]] = {
            "amqp.channel.Channel": lambda: self.amqp_channel,
            "amqp.connection.Connection": lambda: amqp.Connection("127.0.0.1:1"),
            "billiard.pool.ApplyResult": lambda: ApplyResult({}, None),
            "billiard.pool.Worker": lambda: self.pool._pool._pool[0],
            "billiard.process.BaseProcess": lambda: self.pool._pool._pool[0],
            "celery.app.amqp.AMQP": lambda: self.app.amqp,
            "celery.app.amqp.Queues": lambda: self.app.amqp.queues,
            "celery.app.base.Celery": lambda: self.app,
            "celery.app.events.Events": lambda: self.app.events,
            "celery.app.log.Logging": lambda: Logging(self.app),
            "celery.app.task.Task": lambda: self.app.task(_work, name="work"),
            "celery.beat.Scheduler": lambda: Scheduler(self.app, lazy=True),
            "celery.concurrency.asynpool.AsynPool": lambda: self.pool._pool,
            "celery.concurrency.prefork.TaskPool": lambda: self.pool,
            "celery.events.dispatcher.EventDispatcher": lambda: self.app.events.Dispatcher(
                self.app.connection(), enabled=False, on_send_buffered=print
            ),
            "celery.loaders.base.BaseLoader": lambda: self.app.loader,
            "celery.worker.consumer.Consumer": lambda: self.consumer,
            "celery.utils.dispatch.signal.Signal": lambda: celery.signals.task_prerun,
            "kombu.asynchronous.hub.Hub": Hub,
            "kombu.connection.Connection": lambda: Connection("amqp://one//;amqp://two//"),
            "kombu.message.Message": lambda: Message("body"),
            "kombu.transport.redis.Channel": lambda: self.redis_channel,
            "kombu.transport.redis.MultiChannelPoller": redis_transport.MultiChannelPoller,
            "kombu.transport.virtual.Transport": lambda: self.app.connection().transport,
        }
        return makers[owner]() if owner in makers else None


# -- the shapes that delaytasks needs -------------------------------------------------------------


def takes(*args: Any, **options: Any) -> Shape:
    """Return whether a callable can be called in this way."""

    def fits(found: Any) -> bool:
        try:
            inspect.signature(found).bind(*args, **options)
        except TypeError:
            return False
        return True

    return fits


def is_a(*kinds: type) -> Shape:
    return lambda found: isinstance(found, kinds)


def has(*names: str) -> Shape:
    return lambda found: all(hasattr(found, name) for name in names)


class Records(logging.Handler):
    """Keeps the records of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def logs_the_task(apply_entry: Callable[..., Any]) -> bool:
    entry = ScheduleEntry("entry", "a.task", schedule=schedule(timedelta(1)), app=app())
    logger, handler = logging.getLogger("celery.beat"), Records()
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        apply_entry(entry)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return any("a.task" in (record.args or ()) for record in handler.records)


def hides_what_matches(pattern: re.Pattern[str]) -> bool:
    shown = app()
    shown.conf.update(plain_words="seen")
    with pytest.MonkeyPatch.context() as patch:
        hidden = re.compile(f"{pattern.pattern}|plain_words", pattern.flags)
        patch.setattr("celery.app.utils.HIDDEN_SETTINGS", hidden)
        return "seen" not in shown.conf.humanize() and "plain_words" in shown.conf.humanize()


def makes_a_message(as_task_v2: Callable[..., Any]) -> bool:
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    made = as_task_v2("id", "a.task", args=[[1]], eta=now, expires=now, argsrepr="(1)")
    return made.headers["task"] == "a.task" and made.body[0] == [[1]] and bool(made.properties)


def publishes_by_its_options(apply_async: Callable[..., Any]) -> bool:
    app, published = apply_async.__self__.app, list[str]()  # type: ignore[attr-defined]
    app.conf.task_send_sent_event = True
    events = SimpleNamespace(publish=lambda *_, **__: published.append("event"))
    with app.producer_or_acquire() as producer:
        message = SimpleNamespace(
            publish=lambda *_, **__: published.append("message"),
            **{name: getattr(producer, name) for name in ("connection", "channel")},
        )
        apply_async(([1],), event_dispatcher=events, producer=message)
    return sorted(published) == ["event", "message"]


def obeys_its_flag(maybe_shutdown: Callable[[], None]) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "should_stop", 0)
        try:
            maybe_shutdown()
        except celery.exceptions.WorkerShutdown:
            return True
    return False


def has_commands(data: dict[str, Any]) -> bool:
    names = {"active", "scheduled", "registered", "dump_active", "dump_schedule", "dump_tasks"}
    return data is Panel.data and names <= set(data)


def are_steps(found: list[Any]) -> bool:
    return bool(found) and all(isinstance(step, bootsteps.Step) for step in found)


CONSUMER: dict[str, Shape] = {
    "connect": takes(),
    "create_task_handler": takes(promise=print),
    "task_consumer": lambda found: found is None,
    "controller": has("use_eventloop"),
    "hub": is_a(Hub),
    "ensure_connected": takes("connection"),
    "on_connection_error_after_connected": takes("exc"),
    "on_ready": takes(),
    "blueprint": lambda found: takes("parent")(found.start),
    "steps": are_steps,
    "connection_errors": is_a(tuple),
    "channel_errors": is_a(tuple),
}
HUB: dict[str, Shape] = {
    "on_tick": is_a(set),
    "timer": lambda found: (
        isinstance(found.queue, list) and has("cancel")(found.call_after(9, print))
    ),
    "reset": takes(),
    "create_loop": takes(),
    "call_repeatedly": takes(1.0, print),
    "call_soon": takes(print, 1),
    "readers": is_a(dict),
    "add_reader": takes(0, print),
    "remove": takes(0),
}
REDIS_CHANNEL: dict[str, Shape] = {
    "_brpop_start": takes(1.0),
    "active_queues": is_a(list, set),
    "_q_for_pri": lambda found: found("queue", 0) == "queue",
    "client": lambda found: (
        takes("connection", "BRPOP")(found.parse_response) and hasattr(found, "connection")
    ),
    "global_keyprefix": is_a(str),
    "handlers": lambda found: "BRPOP" in found,
    "_size": takes("queue"),
    "_in_poll": lambda found: not found,
    "_brpop_read": takes(),
}
#: The shapes by owner and name.
SHAPES: dict[str, dict[str, Shape]] = {
    "amqp.channel.Channel": {
        "confirm_select": takes("self"),
        "events": is_a(dict),
    },
    "amqp.connection.Connection": {
        "on_blocked": lambda found: found is None,
        "on_unblocked": lambda found: found is None,
    },
    "billiard.einfo": {
        "ExceptionInfo": lambda found: has("exception", "traceback", "type")(_info(found))
    },
    "billiard.pool.ApplyResult": {
        "_cache": is_a(dict),
        "_job": is_a(int),
        "_write_to": lambda found: found is None,
        "ready": lambda found: found() is False,
        "worker_pids": lambda found: list(found()) == [],
        "_on_timeout_set": lambda found: found is None,
        "_timeout": lambda found: found is None,
        "_soft_timeout": lambda found: found is None,
    },
    "billiard.pool.Worker": {"inqW_fd": is_a(int)},
    "billiard.process.BaseProcess": {"_is_alive": lambda found: found() is True},
    "celery._state": {
        "_tls": lambda found: hasattr(found, "current_app"),
        "default_app": lambda found: True,  # it is None until an app is the default one
        "_get_active_apps": lambda found: callable(found) and iter(found()) is not None,
        "_set_current_app": takes("app"),
        "_task_stack": lambda found: takes("task")(found.push) and takes()(found.pop),
    },
    "celery.app.amqp.AMQP": {
        "as_task_v2": makes_a_message,
    },
    "celery.app.amqp.Queues": {
        "_consume_from": lambda found: found is None,
        "select_add": takes("queue"),
        "consume_from": is_a(dict),
        "add": takes("queue"),
    },
    "celery.app.base.Celery": {
        "finalized": is_a(bool),
        "send_task": takes("name", (), {}, 1.0, None, "id", None, None, task_type=None),
        "control_cls": is_a(str),
        "current_worker_task": lambda found: found is None,
    },
    "celery.app.control.Control": {"broadcast": takes("self", "revoke", {"task_id": "1"})},
    "celery.app.events.Events": {
        "Dispatcher": takes("connection", on_send_buffered=print, buffer_while_offline=True)
    },
    "celery.app.log.Logging": {"already_setup": lambda found: found is False},
    "celery.app.task.Task": {
        "request_stack": lambda found: (
            takes("request")(found.push) and takes()(found.pop) and isinstance(found.stack, list)
        ),
        "apply_async": publishes_by_its_options,
        "bind": takes("app"),
        "Strategy": is_a(str),
        "store_errors_even_if_ignored": is_a(bool),
    },
    "celery.app.utils": {"find_app": takes("proj"), "HIDDEN_SETTINGS": hides_what_matches},
    "celery.beat.Scheduler": {"apply_entry": logs_the_task},
    "celery.concurrency.asynpool.AsynPool": {
        "_pool": lambda found: all(isinstance(process.pid, int) for process in found),
        "_busy_workers": is_a(set),
    },
    "celery.concurrency.prefork.TaskPool": {
        "_pool": lambda found: has("apply_async")(found),
        "num_processes": lambda found: found == 1,
        "limit": lambda found: found == 1,
        "apply_async": takes(print, args=(), callback=print, error_callback=print),
        "info": lambda found: all(isinstance(pid, int) for pid in found["processes"]),
        "register_with_event_loop": takes("hub"),
    },
    "celery.events.dispatcher.EventDispatcher": {
        "enabled": lambda found: found is False,
        "groups": is_a(set),
        "send": takes("worker-heartbeat", retry=False),
        "on_send_buffered": callable,
        "buffer_while_offline": is_a(bool),
    },
    "celery.events.event": {"get_exchange": takes("connection", name="celeryev")},
    "celery.loaders.base.BaseLoader": {
        "default_modules": is_a(tuple),
        "import_default_modules": takes(),
        "init_worker": takes(),
    },
    "celery.utils.dispatch.signal.Signal": {"receivers": is_a(list)},
    "celery.utils.time": {
        "maybe_make_aware": takes(datetime(2030, 1, 1), timezone.utc),
        "maybe_iso8601": lambda found: found("2030-01-01T00:00:00") == datetime(2030, 1, 1),
    },
    "celery.worker.consumer.Consumer": CONSUMER,
    "celery.worker.consumer.delayed_delivery.DelayedDelivery": {
        "_validate_configuration": takes("self", "app"),
        "start": takes("self", "consumer"),
    },
    "celery.worker.control.Panel": {"data": has_commands},
    "celery.worker.state": {
        "active_requests": lambda found: len(found) == 0,
        "should_terminate": lambda found: found is None,
        "maybe_shutdown": obeys_its_flag,
    },
    "celery.apps.worker": {"safe_say": takes("message", "file")},
    "celery.worker.worker.WorkController": {"wait_for_soft_shutdown": takes("self")},
    "kombu.asynchronous.hub.Hub": HUB,
    "kombu.connection.Connection": {
        "alt": lambda found: len(found) == 2,
        "ensure_connection": takes(
            None, 0, interval_start=0, interval_step=0, interval_max=4, timeout=1.0
        ),
    },
    "kombu.entity": {"maybe_delivery_mode": lambda found: found("persistent") == 2},
    "kombu.message.Message": {
        "ack_log_error": takes("logger", (OSError,)),
        "accept": lambda found: found is None,
        "acknowledged": lambda found: found is False,
    },
    "kombu.transport": {"TRANSPORT_ALIASES": is_a(dict)},
    "kombu.transport.filesystem": {
        "exchange_queue_t": takes("routing_key", "pattern", "queue"),
        "lock": takes("file", 1),
    },
    "kombu.transport.filesystem.Channel": {
        "_put": takes("self", "queue", {}),
        "_get": takes("self", "queue"),
        "_queue_bind": takes("self", "exchange", "routing_key", "pattern", "queue"),
        "_delete": lambda found: callable(found),
        "_purge": takes("self", "queue"),
        "get_table": takes("self", "exchange"),
    },
    "kombu.transport.redis.Channel": REDIS_CHANNEL,
    "kombu.transport.redis.MultiChannelPoller": {
        "_chan_to_sock": is_a(dict),
        "_fd_to_chan": is_a(dict),
    },
    "redis.cluster.RedisCluster": {
        "PRIMARIES": is_a(str),
        "get_nodes": takes("self"),
        "replace_default_node": takes("self"),
    },
    "redis.connection": {
        "parse_url": lambda found: found("redis://host:1/0")["host"] == "host",
    },
}


def _info(made: Callable[..., Any]) -> Any:
    try:
        raise ValueError("no")
    except ValueError as error:
        return made((ValueError, error, error.__traceback__))
