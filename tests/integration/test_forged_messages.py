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
from tests.integration.conftest import Deploy
from tests.services import RedisServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

JSON, PICKLE, YAML = "application/json", "application/x-python-serialize", "application/x-yaml"
RUNS = {"task": RUN, "id": "forged"}


class FolderBomb:
    """Creates a folder when an instance is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def forged(boom: Path, *tasks: DelayedTask) -> list[tuple[Any, Any, str]]:
    """Return messages: each one is a body, its headers and its content type."""
    now = int(datetime.now(timezone.utc).timestamp() * 1e6)
    entries = [[task.id, version, now, 0] for task in tasks for version in (0, 1)]
    entries += [[4711, 0, now, 0], [2**63 - 1, 2**63 - 1, 0, -32768]]
    bodies: list[Any] = [[[[entry]], {}, {}] for entry in entries]
    bodies += [[[entries * 5], {}, {}], [[[[1, 0, 0]]], {}, {}], [[[[1, 0, 0, 0]] * 2000], {}, {}]]
    bodies += [[[[], {"drain": "x"}], {}, {}], "[" * 100_000, [], {}, None, 5, "text"]
    messages = [(body, headers, JSON) for body in bodies for headers in (RUNS, {})]
    messages += [(body, RUNS, JSON) for body in (b"\xff\xfe\x00", b"")]
    sweeps: list[Any] = [[99], ["x"], [[]]]
    messages += [([sweep, {}, {}], {"task": SWEEP, "id": "x"}, JSON) for sweep in sweeps]
    pickled = pickle.dumps({"task": RUN, "args": [FolderBomb(boom)], "id": "x", "kwargs": {}})
    for kind in (PICKLE, YAML, "application/octet-stream"):
        messages += [(pickled, headers, kind) for headers in (RUNS, {}, {"task": "x", "id": "x"})]
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
    # Celery refuses to accept pickle, which is an insecure setting, as root without this variable.
    monkeypatch.setenv("C_FORCE_ROOT", "1")
    # Each worker on a Redis server receives broadcast commands, so this test starts its own server.
    server, boom = start_redis() if broker == "redis" else None, tmp_path / "boom"
    url = server.url if server else broker
    d = deploy("postgresql", url, {"accept_content": ["json", "pickle"]})
    worker = d.worker("-Q", "default", concurrency=1)
    far, near, cancelled = d.schedule(delay=3600), d.schedule(delay=4), d.schedule(delay=3600)
    d.delays.cancel(cancelled)
    with d.broker_queue() as queue:
        producer = Producer(queue.channel)
        for body, headers, kind in forged(boom, far, near, cancelled):
            text = body if isinstance(body, (bytes, str)) else json.dumps(body)
            producer.publish(
                text, headers=headers, content_type=kind,
                content_encoding="binary" if isinstance(text, bytes) else "utf-8",
                exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue],
            )  # fmt: skip
    if server:
        for text in RAW:
            server.client().lpush(d.queue_name, text)
    good = [d.schedule(delay=0.2) for _ in range(20)]
    d.wait_for([*good, near])
    assert not worker.ended()
    assert (d.status(far), d.status(cancelled)) == (Status.NOT_COMPLETE, Status.CANCELLED)
    assert sorted(int(run[0]) for run in d.runs()) == sorted(task.id for task in [*good, near])
    assert d.early() == []
    assert not boom.exists()
    wait_until(lambda: d.queued() == 0, 10, "all to be taken in")
    log = worker.log()
    # One line for each kind: messages, their entries, requests of sweeps.
    assert 1 <= log.count("message.refused") <= 3, "whoever sends many does not fill the log"
    assert "content.unsafe accepts='pickle'" in log
    assert "Unrecoverable" not in log
    assert "Connection to broker lost" not in log
    assert d.stats()["events"]["message.refused"] >= 10
