"""A worker reaches its broker, publishes to it, and survives its refusals."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.apps import worker as celery_worker
from celery.worker.consumer import Consumer
from kombu.asynchronous import Hub
from kombu.connection import Connection
from kombu.entity import Queue
from kombu.exceptions import OperationalError
from kombu.utils import functional

from delaytasks import file_broker
from delaytasks.attachment import file_broker_url
from delaytasks.core import loop as availability
from delaytasks.core.events import Events
from delaytasks.core.inputs import QUEUE_LENGTH
from delaytasks.timers import publisher as publisher_module
from delaytasks.timers.publisher import Publisher
from delaytasks.worker import broker_connection
from delaytasks.worker import celery_patches as versions
from delaytasks.worker.bootsteps import warn_of_blocking_driver
from tests.waiting import wait_until
from tests.world.recording import ManualMonotonic

# -- A worker tries frequently, and for a sufficient time, to reach its broker --------------------


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(functional, "sleep", clock.sleep)
    monkeypatch.setattr(functional, "time", clock.time)
    return clock


@pytest.fixture
def url() -> Iterator[str]:
    with socket.socket() as bound:  # the socket is bound, but does not listen
        bound.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{bound.getsockname()[1]}/0"


class Looking(Consumer):
    """A worker's consumer with only the attributes that connecting needs."""

    def __init__(self, url: str, retries: int, is_ours: bool = False) -> None:
        self.app = Celery(set_as_current=False, broker=url)
        self.app.conf.broker_connection_max_retries = retries
        self.app.conf.broker_connection_retry_on_startup = True
        self.first_connection_attempt = True
        self.broker_connection_retry_attempt = 0
        if is_ours:
            broker_connection.ReconnectStep(self)


def tries_of(clock: Clock, *consumer: Any) -> list[float]:
    """Return the times at which the consumer tried to connect, until it gave up."""
    tries: list[float] = []
    clock.now, looking = 0.0, Looking(*consumer)
    connection = looking.app.connection_for_read()
    connect = connection._connection_factory

    def note() -> object:
        tries.append(clock.now)
        if len(tries) == 1000:
            raise KeyboardInterrupt
        return connect()

    connection._connection_factory = note
    with pytest.raises((OperationalError, KeyboardInterrupt)):
        looking.ensure_connected(connection)
    return tries


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 1, 5, 100])
def test_a_worker_gives_up_when_celery_would(clock: Clock, url: str, retries: int) -> None:
    celerys = tries_of(clock, url, retries)
    gives_up_at = clock.now
    tries = tries_of(clock, url, retries, True)
    assert gives_up_at <= tries[-1] <= gives_up_at + broker_connection.RECONNECT_PAUSE_S
    assert (len(celerys) == 1) is (len(tries) == 1)


def test_a_worker_gives_up_several_brokers_no_earlier_than_celery(clock: Clock, url: str) -> None:
    urls = ";".join([url] * 3)
    gives_up_at = tries_of(clock, urls, 30)[-1]
    assert tries_of(clock, urls, 30, True)[-1] >= gives_up_at


def test_other_connections_keep_their_own_retry_limits(clock: Clock, url: str) -> None:
    connection: Connection = Looking(url, 100, True).app.connection_for_write()
    options = dict.fromkeys(("interval_start", "interval_step"), 0)
    with pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=1, interval_max=1, timeout=0.5, **options)
    assert clock.now == 0


class HubPool:
    """Registers a timer, as Celery's prefork pool does."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.ticked = 0

    def register_with_event_loop(self, hub: Hub) -> None:
        if self.fails:
            raise OSError("no pipe")
        hub.call_repeatedly(0.01, self.tick)

    def tick(self) -> None:
        self.ticked += 1


def test_the_event_loop_runs_during_a_long_connect_and_is_unchanged_afterwards() -> None:
    hub, pool = Hub(), HubPool()

    def transports() -> None:
        raise AssertionError("a transport's callback is not called meanwhile")

    def connect() -> str:
        wait_until(lambda: pool.ticked > 2, 10, "the event loop to turn")
        return "connected"

    hub.on_tick.add(transports)
    with closing(hub):
        worker = SimpleNamespace(hub=hub, pool=pool)
        assert broker_connection.call_in_background(worker, connect) == "connected"
        assert hub.on_tick == {transports}
        assert all(scheduled.entry.canceled for scheduled in hub.timer.queue)


def test_an_event_loop_whose_pool_cannot_register_keeps_its_callbacks() -> None:
    hub = Hub()

    def transports() -> None: ...

    hub.on_tick.add(transports)
    with closing(hub), pytest.raises(OSError, match="no pipe"):
        broker_connection.turn_event_loop(SimpleNamespace(hub=hub, pool=HubPool(fails=True)), 10)
    assert hub.on_tick == {transports}


# -- A worker obeys SIGTERM although nobody reads its output any more -----------------------------


@pytest.mark.parametrize("celery", [(5, 5), (5, 6)])
def test_a_signal_handler_goes_on_if_its_line_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, celery: tuple[int, int]
) -> None:
    said: list[Any] = []

    def say(*args: Any) -> None:
        said.append(args)
        raise BrokenPipeError

    monkeypatch.setattr(versions, "_CELERY", celery)
    monkeypatch.setattr(celery_worker, "safe_say", say)
    versions.obey_signals_without_output()
    celery_worker.safe_say("worker: Warm shutdown", None)
    assert said == [("worker: Warm shutdown", None)]


# -- A worker whose pool has greenlets warns of a driver that stops all of them -------------------


DRIVERS = ["postgresql+psycopg2", "postgresql+psycopg", "mysql+pymysql"]


@pytest.mark.parametrize(
    ("is_green", "driver", "warns"),
    [*zip([True] * 3, DRIVERS, [True, False, False], strict=True), (False, DRIVERS[0], False)],
)
def test_greenlets_and_psycopg2_give_a_warning(
    caplog: pytest.LogCaptureFixture, is_green: bool, driver: str, warns: bool
) -> None:
    warn_of_blocking_driver(SimpleNamespace(is_green=is_green), driver)
    assert ("begin delaytasks_database_url with postgresql+psycopg://" in caplog.text) is warns


# -- if a broker refuses one queue, it still receives the messages of the others ------------------


MESSAGE: list[tuple[list[Any], dict[str, Any]]] = [([[]], {})]


class Refused(Queue):
    """A queue that answers as RabbitMQ does if the queue exists with other arguments."""

    def declare(self, *arguments: Any, **options: Any) -> Any:
        if self.routing_key in RefusedPublisher.refused:
            raise PreconditionFailed("inequivalent arg 'x-queue-type'")
        return super().declare(*arguments, **options)


class RefusedPublisher(Publisher):
    """A publisher whose broker refuses some queues."""

    refused: frozenset[str] = frozenset({"refusal.bad"})

    def __init__(self) -> None:
        self.emitted, events = list[str](), Events()
        events.subscribe(lambda name, fields: self.emitted.append(name))
        app = Celery("test", broker="memory://", set_as_current=False)
        super().__init__(app, "refusal", 0.5, events)

    def queue(self, name: str) -> Queue:
        queue = super().queue(name)
        return Refused(queue.name, queue.exchange, routing_key=queue.routing_key)

    def sends_to(self, queue: str) -> bool:
        return self.send("delaytasks.run", queue, MESSAGE)


CLOCKED = [publisher_module, availability]


@pytest.fixture
def publisher(time: ManualMonotonic) -> RefusedPublisher:
    return RefusedPublisher()


def test_a_refused_queue_is_tried_again_after_its_pause_and_reported_once(
    publisher: RefusedPublisher, time: ManualMonotonic, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not publisher.sends_to("bad")
    with monkeypatch.context() as patch:
        patch.setattr(RefusedPublisher, "refused", frozenset[str]())
        assert not publisher.sends_to("bad"), "it rests"
        time.at += publisher_module.REFUSED_QUEUE_REST_S + 0.1
        assert publisher.sends_to("bad")
    publisher.close()  # afterwards, the publisher declares the queue again
    assert not publisher.sends_to("bad")
    time.at += publisher_module.REFUSED_QUEUE_REST_S + 0.1
    assert not publisher.sends_to("bad")
    # Once when it begins, not at each try.
    assert publisher.emitted == ["queue.refused", "queue.refused"]


def test_a_time_limit_of_the_caller_is_not_a_failure_of_the_broker(
    publisher: RefusedPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert publisher.sends_to("good")
    assert publisher.sends_to("good"), "the caller itself sends from now on"

    def strike(*_: Any, **__: Any) -> None:
        raise SoftTimeLimitExceeded(5)

    monkeypatch.setattr(publisher._link, "_send_one", strike)
    with pytest.raises(SoftTimeLimitExceeded):
        publisher.sends_to("good")
    monkeypatch.undo()
    assert publisher.is_up
    assert publisher.emitted == []
    assert not publisher._is_sending
    assert not publisher._link.is_open, "it may have been struck in the middle of a message"


@pytest.mark.parametrize(("options", "bound_s"), [({"confirm_publish": True}, 0.5), ({}, 2.0)])
def test_reading_a_confirmation_is_bounded_as_sending_is(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], bound_s: float
) -> None:
    app = Celery("test", broker="amqp://127.0.0.1", set_as_current=False)
    app.conf.broker_transport_options = options
    monkeypatch.setattr(Connection, "ensure_connection", lambda *_, **__: None)
    connection = publisher_module.bounded_connection(app, 0.5, connect_step_s=2.0)
    assert connection.transport_options["read_timeout"] == bound_s


# -- A machine without services sends messages through files that other users cannot read ---------


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Any]:
    with Connection(file_broker_url(str(tmp_path))) as connection:
        yield connection.channel()


@pytest.mark.parametrize("where", ["environment", "celeryconfig", ""])
def test_the_standalone_app_uses_files_unless_a_broker_is_given(where: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    environ.pop("CELERY_BROKER_URL", None)
    if where == "environment":
        environ["CELERY_BROKER_URL"] = "redis://given:1/0"
    elif where:
        (tmp_path / "celeryconfig.py").write_text("broker_url = 'redis://given:1/0'\n")
    code = "from delaytasks.celery import app; print(app.conf.broker_url)"
    command = [sys.executable, "-c", code]
    said = subprocess.check_output(command, cwd=tmp_path, env=environ, text=True)
    files = file_broker_url(str(tmp_path / ".delaytasks"))
    assert said.strip() == ("redis://given:1/0" if where else files)
    assert not (tmp_path / ".delaytasks").exists()


def test_a_message_is_not_seen_in_parts(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_slowly(path: Path, text: str) -> None:
        path.write_text(text[: len(text) // 2])
        with pytest.raises(Empty):
            channel._get("q")
        path.write_text(text)

    monkeypatch.setattr(file_broker, "write_file", write_slowly)
    channel._put("q", {"body": "whole"})
    assert channel._get("q") == {"body": "whole"}


def test_queues_are_bound_and_unbound_one_by_one(channel: Any) -> None:
    for queue in ("first", "second", "second"):
        channel._queue_bind("news/..", "", None, queue)
    assert {row.queue for row in channel.get_table("news/..")} == {"first", "second"}
    channel._put("first", {})
    channel._delete("first", "news/..", "", None, "first")
    assert [row.queue for row in channel.get_table("news/..")] == ["second"]
    assert channel._size("first") == 0


def test_the_bindings_of_a_deleted_folder_are_made_again(channel: Any, tmp_path: Path) -> None:
    channel._queue_bind("news", "", None, "mine")
    shutil.rmtree(tmp_path / "broker")
    with Connection(file_broker_url(str(tmp_path))) as other:
        other.channel()._put("other", {})  # makes the folder first
    with pytest.raises(Empty):
        channel._get("mine")
    assert [row.queue for row in channel.get_table("news")] == ["mine"]


def test_a_binding_of_the_longest_queue_has_a_file_name(channel: Any) -> None:
    queue = f"delaytasks.{'q' * QUEUE_LENGTH}"
    channel._queue_bind("delaytasks", queue, None, queue)
    assert [tuple(row) for row in channel.get_table("delaytasks")] == [(queue, "", queue)]


#: This program prints the messages that it receives until the message is "stop".
READER = """
import sys
from kombu import Connection
import delaytasks
with Connection(sys.argv[1], transport_options={"polling_interval": 0.001}) as connection:
    with connection.SimpleQueue("q") as queue:
        while (text := queue.get(timeout=30).payload) != "stop":
            print(text)
"""


def test_each_message_is_read_by_one_of_many_readers(tmp_path: Path) -> None:
    url = file_broker_url(str(tmp_path))
    command = [sys.executable, "-c", READER, url]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    with Connection(url) as connection, connection.SimpleQueue("q", serializer="json") as queue:
        for number in range(200):
            queue.put(f"{number:03}")
        for _ in readers:
            queue.put("stop")
    read = [reader.communicate(timeout=60)[0].split() for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0, 0]
    found = sorted(text for texts in read for text in texts)
    assert found == [f"{number:03}" for number in range(200)]
