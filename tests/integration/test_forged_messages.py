"""Test messages that an attacker writes to the broker.

The worker stays alive, runs no task before its due time, and runs each due task once.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from kombu import Producer
from redis import Redis

from delaytasks import DelayedTask, Status
from delaytasks.runtime import runtime_of
from delaytasks.timers.arming import RUN, SWEEP
from tests.running import Deployment, Process
from tests.services import RedisServer
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

JSON, PICKLE, YAML = "application/json", "application/x-python-serialize", "application/x-yaml"
RUNS = {"task": RUN, "id": "forged"}


class FolderBomb:
    """Create a folder when an instance is unpickled."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


class PickleWorker:
    """Run a worker whose app accepts pickle, which is an insecure setting."""

    def __init__(self, folder: Path, database: str, broker: str, **settings: Any) -> None:
        self.d = Deployment(
            folder, database, broker, {"accept_content": ["json", "pickle"]}, **settings
        )
        self.boom = folder / "boom"
        self.redis = Redis.from_url(broker) if broker.startswith("redis") else None
        self.worker: Process = self.d.worker("-Q", "default", concurrency=1)

    def queue(self) -> Any:
        return runtime_of(self.d.delays).publisher.queue("default")

    def send(self, messages: list[tuple[Any, Any, str]]) -> None:
        """Send messages; each one is a body, its headers and its content type."""
        queue = self.queue()
        with runtime_of(self.d.delays).celery.connection_for_write() as connection:
            producer = Producer(connection)
            for body, headers, kind in messages:
                text = body if isinstance(body, (bytes, str)) else json.dumps(body)
                producer.publish(
                    text,
                    headers=headers,
                    content_type=kind,
                    content_encoding="binary" if isinstance(text, bytes) else "utf-8",
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    declare=[queue],
                )

    def close(self) -> None:
        self.d.close()
        if self.redis is not None:
            self.redis.close()


Open = Callable[..., PickleWorker]


@pytest.fixture
def open_scene(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    start_redis: Callable[..., RedisServer],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Open]:
    made: list[PickleWorker] = []
    # Celery refuses to accept pickle as root without this variable.
    monkeypatch.setenv("C_FORCE_ROOT", "1")

    def make(broker: str, **settings: Any) -> PickleWorker:
        # Each worker on a Redis server receives broadcast commands, so this test starts its own
        # server.
        url = request.getfixturevalue("rabbitmq_url") if broker == "rabbitmq" else start_redis().url
        made.append(
            PickleWorker(tmp_path, request.getfixturevalue("postgresql_url"), url, **settings)
        )
        return made[-1]

    yield make
    for scene in made:
        scene.close()


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
        [[[[far.id, 0, now, 0]]] * 2, {}, {}],
        [],
        {},
        None,
        5,
        "text",
        [[]],
        [[[]], {}, {}],
        [[], {"evil": 1}, {}],
        [[[[far.id, 0, now]]], {}, {}],
        [[[["1", "0", "0", "0"]]], {}, {}],
        [[[[-1, 0, 0, 0]]], {}, {}],
        [[[[10**30, 0, 0, 0]]], {}, {}],
        [[[[1, 0, 10**18, 0]]], {}, {}],
        [[[[1.5, True, None, {}]]], {}, {}],
        [[[[1, 0, 0, 0]] * 2000], {}, {}],
        [[[], {"drain": "x"}], {}, {}],
        {"task": RUN, "args": "x", "kwargs": {"evil": 1}, "id": "x"},
        "[" * 100_000,
        b"\xff\xfe\x00",
        b"",
        "[[" + "1," * 400_000 + "1]]",
    ]


def forged(
    scene: PickleWorker, far: DelayedTask, near: DelayedTask, cancelled: DelayedTask
) -> list[tuple[Any, Any, str]]:
    bodies = forged_bodies(far, near, cancelled)
    bomb = FolderBomb(str(scene.boom))
    messages: list[tuple[Any, Any, str]] = [(body, RUNS, JSON) for body in bodies]
    messages += [(body, {}, JSON) for body in bodies if not isinstance(body, bytes)]
    messages += [
        (body, {"task": SWEEP, "id": "x"}, JSON)
        for body in list[Any]([[[99], {}, {}], [["x"], {}, {}], [[[]], {}, {}]])
    ]
    for kind in (PICKLE, YAML, "application/octet-stream"):
        for headers in (RUNS, {}, {"task": "other", "id": "x"}):
            messages.append(
                (
                    pickle.dumps({"task": RUN, "args": [bomb], "id": "x", "kwargs": {}}),
                    headers,
                    kind,
                )
            )
    messages += [
        ([[], {}, {}], {"task": {"not": "hashable"}, "id": "x"}, JSON),
        ([[], {}, {}], {"task": "no.such.task"}, JSON),
        ([[], {}, {}], {"task": "no.such.task", "id": "x"}, JSON),
        ([[], {}, {}], {**RUNS, "compression": "application/x-gzip"}, JSON),
        ([[], {"drain": [0]}, {}], {**RUNS, "expires": "soon"}, JSON),
        ([[[], {"drain": [0]}], {}, {}], {**RUNS, "expires": 5}, JSON),
    ]
    return messages


#: In Redis a queue is a list, so a client can push any bytes into it.
RAW: list[Any] = [
    b"garbage",
    b"\xff\xfe",
    b"5",
    b"[]",
    b"{}",
    b"[" * 100_000,
    b'{"properties": 5}',
    b'{"properties": {}}',
    json.dumps({"properties": {"delivery_tag": "x"}, "headers": "text", "body": "e30="}),
    json.dumps(
        {
            "properties": {"delivery_tag": "x", "delivery_info": 5},
            "headers": {"task": RUN},
            "body": "e30=",
        }
    ),
    json.dumps(
        {
            "properties": {"delivery_tag": [], "body_encoding": "base64"},
            "headers": RUNS,
            "body": "?",
        }
    ),
    json.dumps(
        {
            "properties": {
                "delivery_tag": "x",
                "body_encoding": "none",
                "delivery_info": {"routing_key": ["x"]},
            },
            "headers": RUNS,
            "body": 5,
            "content-type": JSON,
        }
    ),
]


@pytest.mark.parametrize(
    ("broker", "timer"), [("redis", "eta"), ("redis", "redis"), ("rabbitmq", "eta")]
)
def test_forged_messages_stop_no_worker_and_run_no_task(
    open_scene: Open, broker: str, timer: str
) -> None:
    scene = open_scene(broker, timer=timer)
    d, worker = scene.d, scene.worker
    far, near, cancelled = d.schedule(delay=3600), d.schedule(delay=4), d.schedule(delay=3600)
    d.delays.cancel(cancelled)
    scene.send(forged(scene, far, near, cancelled))
    if scene.redis is not None:
        name = scene.queue().name
        for raw in RAW:
            scene.redis.lpush(name, raw)
        if timer == "redis":
            forge_timer(scene, scene.redis, far)
    good = [d.schedule(delay=0.2) for _ in range(20)]
    d.wait_for([*good, near])
    assert not worker.ended()
    assert (d.status(far), d.status(cancelled)) == (Status.NOT_COMPLETE, Status.CANCELLED)
    ran = [int(run[0]) for run in d.runs()]
    assert sorted(ran) == sorted(task.id for task in [*good, near])
    assert d.early() == []
    assert not scene.boom.exists()
    wait_until(lambda: _length(scene) == 0, 10, "all to be taken in")
    log = worker.log()
    # One line for each kind: messages, their entries, requests of sweeps, entries in Redis.
    assert 1 <= log.count("message.refused") <= 4, "whoever sends many does not fill the log"
    assert "content.unsafe accepts='pickle'" in log
    assert "Unrecoverable" not in log
    assert "Connection to broker lost" not in log
    assert re.search(
        r'"?message.refused"?: \d\d', d.command("inspect", "stats", "-d", d.node(0)).log()
    )


def forge_timer(scene: PickleWorker, redis: Redis, far: DelayedTask) -> None:
    timer = runtime_of(scene.d.delays).redis_timer
    assert timer is not None
    members = [
        "x",
        "",
        " ",
        "0:0",
        f"{2**63}:0",
        "1:2:3:4",
        "\x00",
        "1:0 5",
        "[" * 1000,
        f"{far.id}:0",
        f"{far.id}:7",
    ]
    for slot in timer.slots("default"):
        store, prepare = timer.keys(slot)
        redis.zadd(store, dict.fromkeys(members, 1))
        redis.zadd(prepare, dict.fromkeys(members, 1))
        for said in ("garbage", "", "0 x", "0 nan", "0 -inf", "\xff", "99 0", "0"):
            redis.publish(timer.channel("default"), said)
    blocked = timer.keys(timer.slots("default")[-1])[0]
    redis.set(blocked, "of another type")


def _length(scene: PickleWorker) -> int:
    if scene.redis is not None:
        return int(scene.redis.llen(scene.queue().name))
    with runtime_of(scene.d.delays).celery.connection_for_write() as connection:
        return int(scene.queue()(connection).queue_declare(passive=True).message_count)
