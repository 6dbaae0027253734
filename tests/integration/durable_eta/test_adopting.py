"""`delaytasks adopt-eta` moves Celery messages with an eta from real brokers to the table."""

from __future__ import annotations

import base64
import json
import re
import secrets
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from delaytasks import Status
from delaytasks.durable_eta.redis_source import read_text
from tests.integration.durable_eta.conftest import Shop, begin, end
from tests.killing_adoption import STEPS
from tests.running import BROKERS
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    # Celery's result backend calls a method that redis-py has deprecated.
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]
HOUR_S = 3600
WAIT_S = 40
#: Celery refuses pickle when it runs as root, as it does in containers of CI.
ROOT = {"C_FORCE_ROOT": "1"}


class Switch(Shop):
    """A project that calls its tasks without delaytasks, and switches over."""

    def call(self, name: str, *args: Any, countdown: float | None = HOUR_S, **options: Any) -> str:
        """Send a message as bare Celery does; return its id."""
        options = {"durable_eta": False, "countdown": countdown, **options}
        result: str = self.task(name).apply_async(args, **options).id
        return result

    def adopt(self, *options: str, **environment: str) -> Any:
        """Return the document of the command, or None if it was killed."""
        process = self.deployment.python(
            "adopt", "delaytasks", "adopt-eta", "--json", *options, **environment
        )
        wait_until(process.ended, WAIT_S, lambda: f"the adoption\n{process.log()}", every_s=0.05)
        if process.status == -signal.SIGKILL:
            return None
        found = re.search(r"^\{.*^\}$|^\{.*\}$", process.log(), re.MULTILINE | re.DOTALL)
        assert found is not None, process.log()
        return json.loads(found[0]) | {"exit_code": process.status}

    def keys(self) -> list[str | None]:
        return sorted(row.key for name in ("add", "note", "kind") for row in self.rows(name))

    @property
    def queue(self) -> str:
        name: str = self.app.conf.task_default_queue
        return name

    def waiting(self) -> list[str]:
        """Return the ids of the messages in the queue in their order, and remove them."""
        ids = []
        with self.app.connection_for_read() as connection:
            queue = self.app.amqp.queues[self.queue](connection.default_channel)
            while (message := queue.get(no_ack=True)) is not None:
                ids.append(message.headers["id"])
        return ids

    @property
    def is_on_redis(self) -> bool:
        return "global_keyprefix" in (self.app.conf.broker_transport_options or {})

    def size(self) -> int:
        """Return the number of messages that no worker has received."""
        with self.app.connection_for_read() as connection:
            if self.is_on_redis:  # kombu looks for the queue without its prefix
                return int(connection.default_channel._size(self.queue))
            queue = self.app.amqp.queues[self.queue](connection.default_channel)
            return int(queue.queue_declare(passive=True).message_count)


@pytest.fixture(params=BROKERS)
def switch(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    postgresql_url: str,
    redis_url: str,
) -> Iterator[Switch]:
    fixture, conf = BROKERS[request.param]
    prefix = f"a{secrets.token_hex(4)}:"
    if request.param == "redis":
        conf = {"broker_transport_options": {"global_keyprefix": prefix}}
    made = begin(
        tmp_path,
        postgresql_url,
        request.getfixturevalue(fixture),
        redis_url,
        imports=["tests.durable_tasks", "tests.killing_adoption"],
        **conf,
    )
    yield Switch(*made)
    end(made)
    with Redis.from_url(redis_url) as client:
        for key in client.scan_iter(f"{prefix}*"):
            client.delete(key)


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client


on_rabbitmq = pytest.mark.parametrize("switch", ["rabbitmq"], indirect=True)
on_redis = pytest.mark.parametrize("switch", ["redis"], indirect=True)
on_both = pytest.mark.parametrize("switch", ["redis", "rabbitmq"], indirect=True)


def key_of(switch: Switch, name: str) -> str:
    return str(switch.app.conf.broker_transport_options["global_keyprefix"]) + name


@pytest.mark.parametrize(
    "switch",
    ["redis", "rabbitmq", "rabbitmq-quorum"],
    indirect=True,
)
def test_the_messages_of_a_queue_become_rows_and_the_others_keep_their_order(
    switch: Switch,
) -> None:
    far, near = list[str](), list[str]()
    for number in range(10):
        far.append(switch.call("add", number, 1, priority=number % 2 * 6))
        near.append(switch.call("add", number, 1, countdown=None))
    far.append(switch.call("kind", 1, countdown=2 * HOUR_S))

    counted = switch.adopt("--dry-run")
    assert (counted["adopted"], switch.keys()) == (11, [])
    assert [(each["task"], each["messages"]) for each in counted["tasks"]] == [
        ("durable.add", 10),
        ("durable.kind", 1),
    ]
    result = switch.adopt()
    again = switch.adopt()

    assert (result["adopted"], result["stay"]["no_eta"], result["queues"]) == (
        11, 10, [switch.queue]
    )  # fmt: skip
    assert (again["adopted"], again["existing"], again["stay"]["no_eta"]) == (0, 0, 10)
    assert switch.keys() == sorted(far)
    assert switch.waiting() == near


@pytest.mark.parametrize("step", STEPS)
def test_an_adoption_that_is_killed_loses_and_doubles_no_message(switch: Switch, step: str) -> None:
    near = [switch.call("add", 1, 1, countdown=None)]
    far = [switch.call("add", number, 1) for number in range(11)]
    near.append(switch.call("add", 1, 1, countdown=None))

    assert switch.adopt(DELAYTASKS_TEST_KILL_ADOPTION=step) is None

    # RabbitMQ has to notice that the connection is gone.
    left = 13 - {"read": 4, "written": 4, "removing": 6, "removed": 8}[step]
    wait_until(lambda: switch.size() >= left, WAIT_S, "the messages to return")
    result = switch.adopt()
    assert result["adopted"] + result["existing"] >= 3
    assert switch.keys() == sorted(far)
    assert switch.waiting() == near


@on_both
def test_messages_that_a_worker_holds_are_adopted_after_it_has_been_killed(switch: Switch) -> None:
    worker = switch.deployment.worker(concurrency=1, **ROOT)
    far = [switch.call("add", number, 1) for number in range(9)]
    wait_until(lambda: switch.size() == 0, WAIT_S, "the worker to receive the messages")

    refused = switch.adopt()

    assert refused["exit_code"] == 1
    assert "workers are running" in refused["error"]
    assert switch.queue in refused["error"]
    assert switch.adopt("--force")["adopted"] == 0
    worker.kill()
    if not switch.is_on_redis:
        wait_until(lambda: switch.size() == 9, WAIT_S, "RabbitMQ to take the messages back")
    assert switch.adopt()["adopted"] == 9
    assert switch.keys() == sorted(far)
    assert switch.adopt()["adopted"] == 0


@on_both
def test_messages_of_a_worker_that_stops_return_to_the_queue_and_are_adopted(
    switch: Switch,
) -> None:
    worker = switch.deployment.worker(concurrency=1, **ROOT)
    far = [switch.call("add", number, 1) for number in range(3)]
    wait_until(lambda: switch.size() == 0, WAIT_S, "the worker to receive the messages")
    worker.terminate()

    assert switch.adopt()["adopted"] == 3
    assert switch.keys() == sorted(far)


@on_both
def test_adopted_tasks_run_once_at_their_time_with_their_own_id(
    switch: Switch, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    due = datetime.now(timezone.utc) + timedelta(seconds=8)
    called = [switch.call("note", str(notes), "ran", countdown=None, eta=due) for _ in range(5)]
    facts = switch.call("see", countdown=None, eta=due, headers={"tenant": "acme"}, retries=1)

    assert switch.adopt()["adopted"] == 6
    switch.deployment.worker(concurrency=2, **ROOT)

    results = [switch.app.AsyncResult(id) for id in called]
    assert [result.get(timeout=WAIT_S) for result in results] == [None] * 5
    seen = switch.app.AsyncResult(facts).get(timeout=WAIT_S)
    assert datetime.now(timezone.utc) >= due
    assert (seen["root_id"], seen["retries"]) == (None, 1), "the task is its own root"
    assert seen["headers"] == {"tenant": "acme"}
    wait_until(
        lambda: all(row.status is Status.DONE for row in switch.rows("note")), WAIT_S, "the rows"
    )
    assert Counter(notes.read_text().split()) == {"ran": 5}
    assert switch.adopt("--force")["adopted"] == 0


class SprungTrap:
    """An object whose deserialization writes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@on_both
def test_the_body_of_a_message_is_never_deserialized(switch: Switch, tmp_path: Path) -> None:
    path = tmp_path / "sprung"
    switch.call("kind", SprungTrap(str(path)), serializer="pickle")

    assert switch.adopt()["adopted"] == 1

    (row,) = switch.rows("kind")
    assert b"sprung" in base64.b64decode(row.body["base64"])
    assert not path.exists()


@on_both
def test_messages_of_protocol_1_stay(switch: Switch) -> None:
    far = switch.call("add", 1, 1)
    switch.app.conf.task_protocol = 1
    switch.app.amqp.__dict__.pop("create_task_message", None)
    switch.call("add", 1, 1)

    result = switch.adopt()

    assert switch.keys() == [far]
    assert result["stay"]["unreadable"] == 1
    assert "protocol 1" in result["reasons"][0]
    assert switch.size() == 1


@on_redis
def test_garbage_in_redis_stays_where_it_is(switch: Switch, redis_client: Redis) -> None:
    far = [switch.call("add", number, 1) for number in range(2)]
    queue, unacked = key_of(switch, switch.queue), key_of(switch, "unacked")
    (first, second) = redis_client.lrange(queue, 0, -1)
    garbage = [b"", b"\xff", b"{", b"[]", b'{"headers": 1}']
    redis_client.delete(queue)
    redis_client.rpush(queue, *garbage, first, b"null")
    delivered = json.dumps([json.loads(second), "", switch.queue])
    entries = {"one": delivered, "two": "{", "three": json.dumps([None, "", switch.queue])}
    redis_client.hset(unacked, mapping=entries)
    redis_client.zadd(key_of(switch, "unacked_index"), dict.fromkeys(entries, 1.0))

    result = switch.adopt()

    assert switch.keys() == sorted(far)
    assert redis_client.lrange(queue, 0, -1) == [*garbage, b"null"]
    assert set(redis_client.hkeys(unacked)) == {b"two", b"three"}
    assert redis_client.zrange(key_of(switch, "unacked_index"), 0, -1) == [b"three", b"two"]
    assert result["stay"]["unreadable"] == len(garbage) + 2


@on_redis
def test_messages_of_other_queues_in_unacked_stay(switch: Switch, redis_client: Redis) -> None:
    far = switch.call("add", 1, 1)
    unacked, queue = key_of(switch, "unacked"), key_of(switch, switch.queue)
    raw = json.loads(redis_client.rpop(queue))
    assert read_text(json.dumps(raw)) is not None
    redis_client.hset(unacked, "ours", json.dumps([raw, "", switch.queue]))
    redis_client.hset(unacked, "theirs", json.dumps([raw, "", "another"]))

    assert switch.adopt()["adopted"] == 1

    assert redis_client.hkeys(unacked) == [b"theirs"]
    assert switch.keys() == [far]


@on_both
def test_a_named_queue_and_the_queues_of_routes_are_adopted(
    switch: Switch, request: pytest.FixtureRequest
) -> None:
    other = f"{switch.queue}_other"
    with switch.app.connection_for_write() as connection:
        request.addfinalizer(lambda: switch.app.amqp.queues[other])  # `end` deletes it
        switch.app.amqp.queues[other](connection.default_channel).declare()
    here, there = switch.call("add", 1, 1), switch.call("add", 1, 1, queue=other)

    assert switch.adopt("--queue", other)["queues"] == [other]
    assert switch.keys() == [there]
    assert switch.adopt()["adopted"] == 1
    assert switch.keys() == sorted([here, there])


@on_rabbitmq
def test_a_consumer_that_does_not_answer_is_noticed_by_rabbitmq(switch: Switch) -> None:
    switch.call("add", 1, 1)
    with switch.app.connection_for_read() as connection, connection.channel() as channel:
        channel.basic_qos(0, 1, False)
        channel.basic_consume(switch.queue, callback=print)
        refused = switch.adopt()

    assert refused["exit_code"] == 1
    assert "consumers" in refused["error"]


@on_rabbitmq
def test_a_queue_that_rabbitmq_does_not_have_is_an_error(switch: Switch) -> None:
    answer = switch.adopt("--queue", "nowhere")

    assert (answer["exit_code"], answer["type"]) == (2, "ConfigError")
