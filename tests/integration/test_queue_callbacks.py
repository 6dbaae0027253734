"""Test queue callbacks, foreign consumers that read them, and the outcomes of their tasks."""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from redis import Redis

from delaytasks import BodyRefusedError, DelayedTask, DelayTasks, InvalidInputError, Status
from delaytasks.callbacks.sending import Message
from delaytasks.db import migrations
from delaytasks.model.inputs import MESSAGE
from delaytasks.runtime import runtime_of
from tests.conftest import closing_all
from tests.integration.conftest import Deploy
from tests.proxy import Proxy, WebServer, answer, proxy_to
from tests.refusals import invalid
from tests.waiting import in_child
from tests.world.recording import delays_on, record, run_now

BODY = {"order": 7, "name": "é"}
Make = Callable[..., DelayTasks]


@pytest.fixture
def queue() -> str:
    """Return the name of a queue and of an exchange that only this test declares."""
    return "dt_test_" + secrets.token_hex(4)


@pytest.fixture
def rabbit(rabbitmq_url: str, queue: str) -> Iterator[Any]:
    """Yield a channel of a consumer."""
    with Connection(rabbitmq_url) as connection:
        yield connection.default_channel
        connection.default_channel.queue_delete(queue)
        for exchange in (queue, f"{queue}.topic"):  # the first one is kombu's
            connection.default_channel.exchange_delete(exchange)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make instances that send to a broker."""

    def new(broker_url: str, **settings: Any) -> DelayTasks:
        settings = {"callback_broker_url": broker_url, "_callback_connect_s": 5, **settings}
        delays = delays_on(f"sqlite:///{tmp_path / secrets.token_hex(4)}.sqlite3", **settings)
        migrations.upgrade(runtime_of(delays).store.database)
        record(delays)
        return delays

    with closing_all(new) as make:
        yield make


def send(delays: DelayTasks, to: str, body: Any = None, **options: Any) -> DelayedTask:
    return run_now(delays, delays.callbacks.publish(to, body, 0, **options))


def is_retried(task: DelayedTask, error: str) -> bool:
    """Return whether the task waits for another attempt because of an error."""
    return task.status is Status.NOT_COMPLETE and error in (task.error or "")


def bodies(channel: Any, queue: str) -> list[Any]:
    """Return the bodies of the messages in a queue, and acknowledge them."""
    messages = iter(lambda: channel.basic_get(queue, no_ack=True), None)
    return [json.loads(message.body) for message in messages]


def test_a_consumer_on_the_apps_rabbitmq_gets_body_and_id_as_soon_as_a_queue_is_declared(
    make: Make, rabbitmq_url: str, rabbit: Any, queue: str
) -> None:
    delays = make("")  # without the setting, messages are sent to the broker of the app
    runtime_of(delays).celery.conf.broker_url = rabbitmq_url
    task = send(delays, queue, BODY, headers={"shop": "one", "n": 1})
    assert is_retried(task, "NO_ROUTE")
    rabbit.queue_declare(queue, durable=True, auto_delete=False)
    assert run_now(delays, task).status is Status.DONE
    with Connection(rabbitmq_url).SimpleQueue(queue) as messages:
        message = messages.get(timeout=5)
        message.ack()
    assert message.payload == BODY
    assert message.content_type == "application/json"
    assert message.headers == {"shop": "one", "n": 1}
    assert message.properties["message_id"] == str(task.id)
    assert message.properties["delivery_mode"] == 2
    routed = partial(send, delays, body=BODY, exchange=f"{queue}.topic")
    assert is_retried(routed("order.paid"), "NOT_FOUND - no exchange")
    exchange = Exchange(f"{queue}.topic", "topic")(rabbit)
    exchange.declare()
    Queue(queue, exchange, "order.*")(rabbit).queue_bind()
    assert routed("order.paid").status is Status.DONE
    assert bodies(rabbit, queue) == [BODY]
    assert is_retried(routed("invoice.paid"), "NO_ROUTE")


def test_a_consumer_on_redis_gets_a_message_of_kombu(
    make: Make, redis_url: str, queue: str
) -> None:
    delays = make(redis_url)
    task = send(delays, queue, BODY, headers={"shop": "one"})
    assert task.status is Status.DONE
    with Redis.from_url(redis_url) as client:
        popped: Any = client.brpop([queue], timeout=5)
    message = json.loads(popped[1])
    assert json.loads(base64.b64decode(message["body"])) == BODY
    assert message["content-type"] == "application/json"
    assert message["headers"] == {"shop": "one"}
    assert message["properties"]["message_id"] == str(task.id)
    failed = send(delays, "key", BODY, exchange=queue)
    problem = "redis has no exchanges: on it a message goes to a queue"
    assert (failed.status, failed.error) == (Status.FAILED, problem)


def test_connections_are_kept_and_replaced_and_never_shared(
    make: Make, rabbitmq_url: str, proxies: list[Proxy], rabbit: Any, queue: str
) -> None:
    rabbit.queue_declare(queue, durable=True, auto_delete=False)
    proxies.append(proxy := proxy_to(rabbitmq_url))
    delays = make(proxy.url(rabbitmq_url), _callback_connect_s=1)
    task, call = send(delays, queue, -3), runtime_of(delays).queue_callbacks
    assert in_child(lambda: call(Message(queue, -2), task))
    proxy.reset()
    assert send(delays, queue, -1).runs == 1, "a connection that was closed uses no attempt"
    assert proxy.accepted == 3
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: call(Message(queue, n), task), range(100)))
    assert sorted(bodies(rabbit, queue)) == list(range(-3, 100))
    assert proxy.accepted <= 3 + 4, "one for each thread"
    proxy.swallow()
    unconfirmed = send(delays, queue, BODY)
    assert is_retried(unconfirmed, "timed out")
    proxy.refuse()
    assert is_retried(run_now(delays, unconfirmed), "refused")
    proxy.heal()
    assert run_now(delays, unconfirmed).status is Status.DONE


@pytest.mark.parametrize("to", [None, 7, "", "a\n", "\ud800", "é" * 128])
def test_an_invalid_queue_name_or_header_is_refused(make: Make, to: Any) -> None:
    delays = make("")
    with invalid("to"):
        delays.callbacks.publish(to, None, 0)
    with pytest.raises(InvalidInputError):
        delays.callbacks.publish("key", None, 0, exchange=to or 7)
    with pytest.raises(BodyRefusedError):
        delays.schedule_delay(MESSAGE, {"to": "x", "exchange": 7}, 0)
    with invalid("headers"):
        delays.callbacks.publish("queue", None, 0, headers=["a"])


def test_a_worker_sends_messages_and_several_callbacks_at_a_time(
    deploy: Deploy, redis_url: str, queue: str, web: WebServer
) -> None:
    meeting = threading.Barrier(10)

    def meet(exchange: Any) -> None:
        meeting.wait(20)
        answer()(exchange)

    web.answers["/paid"] = meet
    d = deploy(callback_allow="127.0.0.1", callback_broker_url=redis_url)
    d.worker(concurrency=1)
    calls = [d.delays.callbacks.post(web.url("/paid"), n, 0.5) for n in range(20)]
    messages = [d.delays.callbacks.publish(queue, n, 0.5) for n in range(20)]
    d.wait_for([*calls, *messages])
    assert sorted(int(request.body) for request in web.received) == list(range(20))
    ids = {request.headers["webhook-id"] for request in web.received}
    assert ids == {str(task.id) for task in calls}
    with Redis.from_url(redis_url) as client:
        taken: Any = client.rpop(queue, 100)
    sent = [json.loads(base64.b64decode(json.loads(each)["body"])) for each in taken]
    assert sorted(sent) == list(range(20))
