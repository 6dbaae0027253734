"""`Receiver`, a worker that a test gives messages, as the broker does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu.asynchronous.timer import Timer
from kombu.entity import Queue
from kombu.message import Message
from kombu.serialization import prepare_accept_content

from delaytasks.model.task import Entry
from delaytasks.operate.checks import check_settings
from delaytasks.worker import patches
from delaytasks.worker.patches import GuardStep
from tests.world.main_process import MainProcess
from tests.world.world import World

#: The routing key of messages for the default queue.
OURS = "delaytasks.default"


def connect_in_background(hub: Any, pool: Any, connect: Callable[[], Any]) -> Any:
    """Connect to a broker as a worker does, while its event loop runs."""
    return patches.call_in_background(SimpleNamespace(hub=hub, pool=pool), connect)


class Channel:
    no_ack_consumers = None

    def basic_ack(self, *_: Any, **__: Any) -> None: ...
    def basic_reject(self, *_: Any, **__: Any) -> None: ...


class Receiver:
    """Celery's consumer as a worker of this world has it. It records what the messages ask for.

    Parameters
    ----------
    world
        The world of the worker.
    conf
        The Celery configuration of the app.
    """

    def __init__(self, world: World, **conf: Any) -> None:
        self.world = world
        self.runtime = MainProcess(world).runtime
        self.app: Celery = world.runtime.celery
        self.app.conf.update(conf)
        worker = self.runtime.celery_worker
        worker.delays_runtime, worker.use_eventloop, worker.state = self.runtime, False, state
        options = {"app": self.app, "controller": worker, "hostname": "w", "timer": Timer()}
        self._consumer = Consumer(lambda *_: None, **options)

        class tasks:
            queues = [self.runtime.runtime.publisher.queue("default")]

        self._consumer.task_consumer, self._consumer.pool = tasks, worker.pool
        self._consumer.update_strategies()
        self._handle = self._consumer.create_task_handler()
        self.entries: list[Entry] = []
        self.drained: list[tuple[Any, ...]] = []
        self.sweeps: list[Any] = []
        self.runtime.dispatcher.receive = self.entries.extend  # type: ignore[assignment, method-assign]
        self.runtime.dispatcher.start_drain = lambda *asked: self.drained.append(asked)  # type: ignore[method-assign]
        self.runtime.sweep_loop.request = self.sweeps.append  # type: ignore[assignment, method-assign]

    def read(
        self, body: Any, headers: Any, kind: Any = "application/json", queue: Any = OURS
    ) -> Message:
        """Receive a message, and return it. `queue` is the routing key that it names."""
        place = {"routing_key": queue} if queue else {}
        parts: Any = (body, 1, kind, "utf-8", place, {}, headers, "utf-8", None, Channel())
        message = Message(*parts)
        message.accept = prepare_accept_content(self.app.conf.accept_content)
        self._handle(message)
        return message

    def fail(self, error: Exception) -> None:
        """Receive a message that cannot be read."""

        def read() -> Any:
            raise error

        read_or_refuse: Callable[[], Any] = GuardStep(self._consumer)._guarded(read)
        read_or_refuse()

    def serve(self, queue: str) -> None:
        """Also receive messages from a queue of the app."""
        self._consumer.task_consumer.queues.append(Queue(queue))

    def forget(self) -> None:
        """Forget what was asked for."""
        for asked in (self.entries, self.drained, self.sweeps):
            asked.clear()

    def check_app(self) -> None:
        """Check the configuration of the app, as a worker does at its start."""
        check_settings(self.world.runtime)

    @property
    def lost_broker(self) -> type[Exception]:
        """An error of a lost connection to the broker."""
        return self._consumer.connection_errors[0]  # type: ignore[no-any-return]

    @property
    def refused(self) -> int:
        """The number of messages that were refused."""
        return self.runtime.events.counts["message.refused"]
