"""Test messages that an attacker writes to the broker.

The worker stays alive, runs no task before its due time, and runs each due task once.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from kombu import Producer

from delaytasks import DelayedTask, Status
from delaytasks.broker.arming import RUN, SWEEP
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.services import RedisServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

JSON, PICKLE, YAML = "application/json", "application/x-python-serialize", "application/x-yaml"
RUNS = {"task": RUN, "id": "forged"}


class FolderBomb:
    """Creates a folder when an instance is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


class PickleWorker(Deployment):
    """A deployment whose app accepts pickle, which is an insecure setting."""

    def queue(self) -> Any:
        return runtime_of(self.delays).publisher.queue("default")

    def send(self, messages: list[tuple[Any, Any, str]]) -> None:
        """Send messages; each one is a body, its headers and its content type."""
        queue = self.queue()
        with runtime_of(self.delays).celery.connection_for_write() as connection:
            producer = Producer(connection)
            for body, headers, kind in messages:
                text = body if isinstance(body, (bytes, str)) else json.dumps(body)
                producer.publish(
                    text, headers=headers, content_type=kind,
                    content_encoding="binary" if isinstance(text, bytes) else "utf-8",
                    exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue],
                )  # fmt: skip

    def length(self) -> int:
        with runtime_of(self.delays).celery.connection_for_write() as connection:
            return int(self.queue()(connection).queue_declare().message_count)


def forged_bodies(far: DelayedTask, near: DelayedTask, cancelled: DelayedTask) -> list[Any]:
    now = int(datetime.now(timezone.utc).timestamp() * 1e6)
    entries = [
        *([[far.id, 0, now, 0]] * 10),  # This task is not due.
        [far.id, 1, now, 0],
        [near.id, 0, now, 0],
        [cancelled.id, 1, now, 0],
        [4711, 0, now, 0],
        [2**63 - 1, 2**63 - 1, 0, -32768],
    ]
    return [
        *([[[entry], {}, {}] for entry in entries]),
        [[entries[:10]], {}, {}],
        *([], {}, None, 5, "text"),
        [[[[far.id, 0, now]]], {}, {}],
        [[[[1, 0, 0, 0]] * 2000], {}, {}],
        [[[], {"drain": "x"}], {}, {}],
        "[" * 100_000,
        *(b"\xff\xfe\x00", b""),
    ]


def forged(bomb: FolderBomb, *tasks: DelayedTask) -> list[tuple[Any, Any, str]]:
    bodies = forged_bodies(*tasks)
    messages: list[tuple[Any, Any, str]] = [(body, RUNS, JSON) for body in bodies]
    messages += [(body, {}, JSON) for body in bodies if not isinstance(body, bytes)]
    sweeps: list[Any] = [[[99], {}, {}], [["x"], {}, {}], [[[]], {}, {}]]
    messages += [(body, {"task": SWEEP, "id": "x"}, JSON) for body in sweeps]
    pickled = pickle.dumps({"task": RUN, "args": [bomb], "id": "x", "kwargs": {}})
    for kind in (PICKLE, YAML, "application/octet-stream"):
        for headers in (RUNS, {}, {"task": "other", "id": "x"}):
            messages.append((pickled, headers, kind))
    empty: list[Any] = [[], {}, {}]
    return [
        *messages,
        (empty, {"task": {"not": "hashable"}, "id": "x"}, JSON),
        (empty, {"task": "no.such.task"}, JSON),
        (empty, {**RUNS, "compression": "application/x-gzip"}, JSON),
        ([[[], {"drain": [0]}], {}, {}], {**RUNS, "expires": 5}, JSON),
    ]


def raw(properties: Any, headers: Any, body: Any = "e30=") -> str:
    return json.dumps({"properties": properties, "headers": headers, "body": body})


#: In Redis a queue is a list, so a client can push any bytes into it.
RAW: list[Any] = [
    *(b"garbage", b"\xff\xfe", b"5", b"{}", b"[" * 100_000, b'{"properties": {}}'),
    raw({"delivery_tag": "x"}, "text"),
    raw({"delivery_tag": "x", "delivery_info": 5}, {"task": RUN}),
    raw({"delivery_tag": [], "body_encoding": "base64"}, RUNS, "?"),
]


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_forged_messages_stop_no_worker_and_run_no_task(
    deploy: Deploy,
    start_redis: Callable[..., RedisServer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    broker: str,
) -> None:
    # Celery refuses to accept pickle as root without this variable.
    monkeypatch.setenv("C_FORCE_ROOT", "1")
    # Each worker on a Redis server receives broadcast commands, so this test starts its own server.
    server, boom = start_redis() if broker == "redis" else None, tmp_path / "boom"
    conf = {"accept_content": ["json", "pickle"]}
    url = server.url if server else broker
    d = deploy("postgresql", url, conf, kind=PickleWorker)
    assert isinstance(d, PickleWorker)
    worker = d.worker("-Q", "default", concurrency=1)
    far, near, cancelled = d.schedule(delay=3600), d.schedule(delay=4), d.schedule(delay=3600)
    d.delays.cancel(cancelled)
    d.send(forged(FolderBomb(str(boom)), far, near, cancelled))
    if server:
        for text in RAW:
            server.client().lpush(d.queue().name, text)
    good = [d.schedule(delay=0.2) for _ in range(20)]
    d.wait_for([*good, near])
    assert not worker.ended()
    assert (d.status(far), d.status(cancelled)) == (Status.NOT_COMPLETE, Status.CANCELLED)
    ran = [int(run[0]) for run in d.runs()]
    assert sorted(ran) == sorted(task.id for task in [*good, near])
    assert d.early() == []
    assert not boom.exists()
    wait_until(lambda: d.length() == 0, 10, "all to be taken in")
    log = worker.log()
    # One line for each kind: messages, their entries, requests of sweeps.
    assert 1 <= log.count("message.refused") <= 3, "whoever sends many does not fill the log"
    assert "content.unsafe accepts='pickle'" in log
    assert "Unrecoverable" not in log
    assert "Connection to broker lost" not in log
    assert d.events()["message.refused"] >= 10
