"""Messages of an attacker do not exhaust a worker's memory, and do not flood its log."""

from __future__ import annotations

import base64
import bz2
import gzip
import json
import lzma
import re
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import amqp
import pytest
from kombu import Exchange, Producer

from delaytasks.timers.eta import RUN
from delaytasks.wiring import wiring_of
from tests.redis_server import RedisServer
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

MEGABYTE = 1024 * 1024
#: Each bomb has this size after decompression.
BOMB_SIZE = 400 * MEGABYTE
#: The worker's memory may grow by this many bytes.
MOST_GROWTH = 64 * MEGABYTE
JSON = "application/json"


@cache
def bzip2_bomb() -> bytes:
    compressor, block = bz2.BZ2Compressor(), bytes(MEGABYTE)
    parts = [compressor.compress(block) for _ in range(BOMB_SIZE // MEGABYTE)]
    return b"".join([*parts, compressor.flush()])


class FloodedWorker:
    """Run a worker that serves one queue of delaytasks and one of Celery's own."""

    def __init__(
        self,
        folder: Path,
        database: str,
        broker: str,
        conf: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.d = Deployment(folder, database, broker, conf, **settings)
        self.own = f"own-{self.d.settings['namespace']}"
        self.worker = self.d.worker("-Q", f"default,{self.own}", concurrency=1)
        self.d.wait_for([self.d.schedule()])

    def send(
        self, messages: list[tuple[bytes, dict[str, Any]]], queue: str = "", kind: str = JSON
    ) -> None:
        """Send messages; each one is an encoded body and its headers."""
        ours = wiring_of(self.d.delays).publisher.queue("default")
        with wiring_of(self.d.delays).celery.connection_for_write() as connection:
            producer = Producer(connection)
            for body, headers in messages:
                producer.publish(
                    body,
                    headers=headers,
                    content_type=kind,
                    content_encoding="binary",
                    routing_key=queue or ours.name,
                    declare=[] if queue else [ours],
                )

    def peak(self) -> int:
        """Return the peak memory of the worker's main process, in bytes."""
        status = Path(f"/proc/{self.worker.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def wait_until_taken_in(self) -> None:
        """Wait until a task that follows the messages in the same queue has run."""
        self.d.wait_for([self.d.schedule(delay=0.2)])

    def refused(self) -> int:
        log = self.d.command("inspect", "stats", "-d", self.d.node(0)).log()
        found = re.search(r'"?message.refused"?: (\d+)', log)
        return 0 if found is None else int(found[1])

    def close(self) -> None:
        self.d.close()
        with wiring_of(self.d.delays).celery.connection_for_write() as connection:
            connection.default_channel.queue_delete(self.own)


Open = Callable[..., FloodedWorker]


@pytest.fixture(params=["redis", "rabbitmq"])
def open_scene(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    start_redis: Callable[..., RedisServer],
    postgresql_url: str,
) -> Iterator[Open]:
    url = (
        request.getfixturevalue("rabbitmq_url")
        if request.param == "rabbitmq"
        else start_redis().url
    )
    made: list[FloodedWorker] = []

    def make(conf: dict[str, Any] | None = None, **settings: Any) -> FloodedWorker:
        made.append(FloodedWorker(tmp_path, postgresql_url, url, conf, **settings))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


@pytest.mark.parametrize("headers", [{"task": RUN, "id": "x"}, {}])
def test_a_compressed_message_is_refused_before_it_is_decompressed(
    open_scene: Open, headers: dict[str, Any]
) -> None:
    scene = open_scene()
    before, bomb = scene.peak(), bzip2_bomb()
    assert len(bomb) < 1000
    scene.send(
        [
            (bomb, {**headers, "compression": name})
            for name in ("application/x-bz2", "bzip2")
            for _ in range(3)
        ]
    )
    small = json.dumps([[], {}, {}]).encode()
    scene.send(
        [
            (gzip.compress(small), {**headers, "compression": "gzip"}),
            (lzma.compress(small), {"compression": "xz"}),
        ]
    )
    scene.wait_until_taken_in()
    assert scene.peak() - before < MOST_GROWTH
    assert scene.refused() >= 8
    assert not scene.worker.ended()
    assert "compressed" in scene.worker.log()


@pytest.mark.parametrize(
    "headers", [{"task": RUN, "id": "x"}, {}, {"task": "no.such.task", "id": "x"}]
)
def test_a_long_message_is_refused_before_it_is_decoded(
    open_scene: Open, headers: dict[str, Any]
) -> None:
    """A list of empty lists takes 20 times its length in memory."""
    scene = open_scene()
    before = scene.peak()
    body = b"[" + b"[]," * (2 * MEGABYTE) + b"[]]"
    scene.send([(body, headers)] * 3)
    scene.wait_until_taken_in()
    assert scene.peak() - before < MOST_GROWTH
    assert scene.refused() >= 3
    assert not scene.worker.ended()


class Raw(amqp.Message):
    """Encode the bytes of `table` as the properties of a message."""

    table = b""

    def _serialize_properties(self) -> bytes:
        kind = JSON.encode()
        has_content_type_and_headers = struct.pack(">H", 0xA000)
        return (
            has_content_type_and_headers
            + bytes([len(kind)])
            + kind
            + struct.pack(">I", len(self.table))
            + self.table
        )


def nested(levels: int) -> bytes:
    table = b""
    for _ in range(levels):
        table = b"\x01a" + b"F" + struct.pack(">I", len(table)) + table
    return table


@pytest.mark.parametrize("table", [nested(3000), b"\x01aT" + struct.pack(">Q", 2**64 - 1)])
def test_properties_that_py_amqp_cannot_read_stop_no_worker(
    tmp_path: Path, rabbitmq_url: str, postgresql_url: str, table: bytes
) -> None:
    """RabbitMQ does not check property tables.

    It redelivers messages that a stopped worker has not acknowledged.
    """
    scene = FloodedWorker(tmp_path, postgresql_url, rabbitmq_url)
    for queue in (wiring_of(scene.d.delays).publisher.queue("default").name, scene.own):
        message = Raw(b"[[], {}, {}]")
        message.table = table
        with wiring_of(scene.d.delays).celery.connection_for_write() as connection:
            connection.default_channel.basic_publish(message, exchange="", routing_key=queue)
    scene.wait_until_taken_in()
    wait_until(lambda: scene.refused() >= 2, 20, "both to be refused", every_s=0.5)
    assert not scene.worker.ended()
    assert "Connection to broker lost" not in scene.worker.log()
    scene.close()


def test_remote_control_is_not_decompressed(open_scene: Open) -> None:
    scene = open_scene()
    before, bomb = scene.peak(), bzip2_bomb()
    with wiring_of(scene.d.delays).celery.connection_for_write() as connection:
        exchange = Exchange("celery.pidbox", type="fanout", durable=False)
        for _ in range(3):
            headers = {"compression": "bzip2"}
            Producer(connection, exchange).publish(
                bomb,
                headers=headers,
                content_type=JSON,
                content_encoding="binary",
                declare=[exchange],
            )
    assert scene.refused() >= 3, "and it answers afterwards"
    assert scene.peak() - before < MOST_GROWTH


def test_celerys_own_queues_are_read_as_without_delaytasks(open_scene: Open) -> None:
    scene = open_scene()
    args = ["x" * MEGABYTE]
    wiring_of(scene.d.delays).celery.send_task(
        "no.such.task", args, queue=scene.own, compression="bzip2"
    )
    wait_until(
        lambda: "Received unregistered task" in scene.worker.log(), 10, "Celery to take it in"
    )
    assert "xxxx" in scene.worker.log(), "decompressed"
    assert scene.refused() == 0


def test_a_flood_of_messages_that_celery_rejects_does_not_fill_the_log(open_scene: Open) -> None:
    scene = open_scene()
    long = {"x" * 100: "y" * 1000}
    scene.send([(b"[[], {}, {}]", {"task": "no.such.task" + "!" * 200, "id": "x", **long})] * 500)
    scene.send([(b"{}", long)] * 500)
    scene.send([(b"[" * 10, long)] * 500)
    scene.send([(b"\xff" * 10, {"task": RUN, "id": "x", **long})] * 500)
    scene.send([(b"{}", {})] * 500, kind="application/x-unknown")
    scene.wait_until_taken_in()
    assert not scene.worker.ended()
    assert scene.refused() >= 2500
    log = scene.worker.log()
    assert log.count("message.refused") <= 2
    assert len(log) < 20_000, log[-2000:]


@pytest.mark.parametrize("kind", ["headers", "name", "raw"])
def test_headers_of_20_megabytes_are_not_logged(
    tmp_path: Path, start_redis: Callable[..., RedisServer], postgresql_url: str, kind: str
) -> None:
    """RabbitMQ itself rejects properties that are longer than a frame."""
    server = start_redis()
    scene = FloodedWorker(tmp_path, postgresql_url, server.url)
    before, long = scene.peak(), "x" * (20 * MEGABYTE)
    message = {
        "body": base64.b64encode(b"[[], {}, {}]").decode(),
        "headers": {"task": RUN, "id": "x"},
        "content-type": JSON,
        "content-encoding": "utf-8",
        "properties": {
            "delivery_tag": "x",
            "body_encoding": "base64",
            "delivery_info": {"routing_key": "x"},
        },
    }
    if kind == "headers":
        message["headers"] = {"task": "no.such.task", "id": "x", "more": long}
    elif kind == "name":
        message["headers"] = {"task": long, "id": "x"}
    text = long if kind == "raw" else json.dumps(message)
    with server.client() as redis:
        for _ in range(3):
            redis.lpush(wiring_of(scene.d.delays).publisher.queue("default").name, text)
    scene.wait_until_taken_in()
    assert not scene.worker.ended()
    assert len(scene.worker.log()) < 20_000
    assert scene.refused() >= 3
    # Redis delivers each message as a whole, and the worker reads one message at a time.
    assert scene.peak() - before < MOST_GROWTH + 3 * len(text)
    scene.close()


@pytest.mark.parametrize("accepted", [["pickle"], ["msgpack"]])
def test_an_app_that_accepts_no_json_runs_delayed_tasks(
    open_scene: Open, accepted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beat, too, sends its messages in an accepted format, even if the app requests compression."""
    # Celery refuses to accept pickle as root without this variable.
    monkeypatch.setenv("C_FORCE_ROOT", "1")
    conf = {"accept_content": accepted, "task_serializer": accepted[0], "task_compression": "gzip"}
    scene = open_scene(conf, self_sweep_s=600)
    near = [scene.d.schedule(delay=0.3) for _ in range(3)]
    scene.d.wait_for(near)
    run = next(run for run in scene.d.runs() if run[0] == str(near[0].id))
    assert int(run[1]) / 1e6 < scene.d.settings["grace_s"], "by its message, not by a sweep"
    # Only beat's sweep arms this task.
    far = scene.d.schedule(delay=scene.d.settings["horizon_s"] + 2)
    scene.d.beat()
    scene.d.wait_for([far], deadline_s=40)
    assert "message.refused" not in scene.d.logs()
    assert "Refusing to deserialize" not in scene.d.logs()
