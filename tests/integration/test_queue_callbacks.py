"""Test queue callbacks, foreign consumers that read them, and the outcomes of their tasks."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from tests.proxy import Proxy, WebServer, proxy_to
from tests.refusals import invalid
from tests.services import free_port
from tests.waiting import in_child
from tests.world.recording import delays_on, record, run_now

BODY = {"order": 7, "name": "é"}


@pytest.fixture
def name() -> str:
    """Return the name of a queue that only this test uses."""
    return "dt_test_" + secrets.token_hex(4)


@pytest.fixture
def rabbit(rabbitmq_url: str, name: str) -> Iterator[Any]:
    """Yield a channel of a consumer.

    The teardown deletes the queue and the exchange of this name.
    """
    with Connection(rabbitmq_url) as connection:
        channel = connection.channel()
        yield channel
        channel = connection.channel() if not channel.is_open else channel
        channel.queue_delete(name)
        channel.exchange_delete(name)


@pytest.fixture
def queue(rabbit: Any, name: str) -> str:
    rabbit.queue_declare(name, durable=True, auto_delete=False)
    return name


@pytest.fixture
def proxy(rabbitmq_url: str, proxies: list[Proxy]) -> Proxy:
    proxies.append(proxy_to(rabbitmq_url))
    return proxies[-1]


Make = Callable[..., DelayTasks]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    def new(broker_url: str, **settings: Any) -> DelayTasks:
        settings = {"callback_broker_url": broker_url, "_callback_connect_s": 5, **settings}
        delays = delays_on(f"sqlite:///{tmp_path / secrets.token_hex(4)}.sqlite3", **settings)
        migrations.upgrade(runtime_of(delays).store.database)
        record(delays)
        return delays

    with closing_all(new) as make:
        yield make


@pytest.fixture
def delays(make: Make, rabbitmq_url: str) -> DelayTasks:
    return make(rabbitmq_url)


@pytest.fixture
def proxied(make: Make, proxy: Proxy, rabbitmq_url: str) -> DelayTasks:
    return make(proxy.url(rabbitmq_url))


def send(delays: DelayTasks, to: str, body: Any = None, **options: Any) -> DelayedTask:
    return run_now(delays, delays.callbacks.publish(to, body, 0, **options))


def bodies(channel: Any, queue: str) -> list[Any]:
    """Return the bodies of the messages in a queue, and acknowledge them."""
    messages = iter(lambda: channel.basic_get(queue, no_ack=True), None)
    return [json.loads(message.body) for message in messages]


# -- brokers --------------------------------------------------------------------------------------


def test_rabbitmqs_consumers_get_body_and_id(delays: DelayTasks, rabbit: Any, queue: str) -> None:
    task = send(delays, queue, BODY, headers={"shop": "one", "n": 1})
    assert task.status is Status.DONE
    with Connection(delays.settings.callback_broker_url).SimpleQueue(queue) as messages:
        message = messages.get(timeout=5)
        message.ack()
    assert message.payload == BODY
    assert message.content_type == "application/json"
    assert message.headers == {"shop": "one", "n": 1}
    assert message.properties["message_id"] == str(task.id)
    assert message.properties["delivery_mode"] == 2


def test_a_consumer_on_redis_gets_a_message_of_kombu(make: Make, redis_url: str, name: str) -> None:
    delays = make(redis_url)
    task = send(delays, name, BODY, headers={"shop": "one"})
    assert task.status is Status.DONE
    with Redis.from_url(redis_url) as client:
        popped: Any = client.brpop([name], timeout=5)
    message = json.loads(popped[1])
    assert json.loads(base64.b64decode(message["body"])) == BODY
    assert message["content-type"] == "application/json"
    assert message["headers"] == {"shop": "one"}
    assert message["properties"]["message_id"] == str(task.id)


def test_an_exchange_of_amqp_routes_by_the_key(
    make: Make, delays: DelayTasks, rabbit: Any, redis_url: str, name: str
) -> None:
    lost = send(delays, "key", BODY, exchange=name)
    assert lost.status is Status.NOT_COMPLETE
    assert "NOT_FOUND - no exchange" in (lost.error or "")
    exchange = Exchange(name, "topic")(rabbit)
    exchange.declare()
    Queue(name, exchange, "order.*")(rabbit).declare()
    assert send(delays, "order.paid", BODY, exchange=name).status is Status.DONE
    assert bodies(rabbit, name) == [BODY]
    lost = send(delays, "invoice.paid", BODY, exchange=name)
    assert (lost.status, "NO_ROUTE" in (lost.error or "")) == (Status.NOT_COMPLETE, True)
    failed = send(make(redis_url), "key", BODY, exchange=name)
    problem = "redis has no exchanges: on it a message goes to a queue"
    assert (failed.status, failed.error) == (Status.FAILED, problem)


def test_without_a_setting_messages_are_sent_to_the_apps_broker(
    make: Make, rabbitmq_url: str, rabbit: Any, queue: str
) -> None:
    delays = make("")
    runtime_of(delays).celery.conf.broker_url = rabbitmq_url
    assert send(delays, queue, BODY).status is Status.DONE
    assert bodies(rabbit, queue) == [BODY]


# -- refused messages -----------------------------------------------------------------------------


def test_a_message_is_retried_until_routed(delays: DelayTasks, rabbit: Any, name: str) -> None:
    lost = send(delays, name, BODY)
    assert lost.status is Status.NOT_COMPLETE
    assert "NO_ROUTE" in (lost.error or "")
    rabbit.queue_declare(name, durable=True, auto_delete=False)
    assert run_now(delays, lost).status is Status.DONE
    assert bodies(rabbit, name) == [BODY]


def test_a_message_that_is_refused_is_not_done(delays: DelayTasks, rabbit: Any, name: str) -> None:
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    rabbit.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)
    assert send(delays, name, 1).status is Status.DONE
    full = send(delays, name, 2)
    assert full.status is Status.NOT_COMPLETE
    assert "MessageNacked" in (full.error or "")
    assert bodies(rabbit, name) == [1]
    assert run_now(delays, full).status is Status.DONE
    assert bodies(rabbit, name) == [2]


def test_an_unavailable_broker_and_a_missing_confirmation_are_failures_in_bounded_time(
    make: Make, proxy: Proxy, rabbitmq_url: str, rabbit: Any, queue: str
) -> None:
    delays = make(proxy.url(rabbitmq_url), _callback_connect_s=1)
    assert send(delays, queue, 1).status is Status.DONE
    away = send(make(f"amqp://127.0.0.1:{free_port()}//", _callback_connect_s=1), "queue", BODY)
    assert away.status is Status.NOT_COMPLETE
    assert "refused" in (away.error or "")
    proxy.swallow()
    silent = send(make(proxy.url(rabbitmq_url), _callback_connect_s=0.5), "queue", BODY)
    for unknown in (silent, send(delays, queue, 2)):
        assert unknown.status is Status.NOT_COMPLETE
        assert "timed out" in (unknown.error or "")
    proxy.heal()
    assert run_now(delays, unknown).status is Status.DONE


# -- connections ----------------------------------------------------------------------------------


def test_a_kept_connection_that_was_closed_uses_no_attempt(
    proxied: DelayTasks, proxy: Proxy, rabbit: Any, queue: str
) -> None:
    assert send(proxied, queue, 1).status is Status.DONE
    proxy.reset()
    second = send(proxied, queue, 2)
    assert (second.status, second.runs) == (Status.DONE, 1)
    assert bodies(rabbit, queue) == [1, 2]


def test_connections_are_kept_and_never_used_by_two_threads_simultaneously(
    proxied: DelayTasks, proxy: Proxy, rabbit: Any, queue: str
) -> None:
    task, send = proxied.callbacks.publish(queue, None, 60), runtime_of(proxied).queue_callbacks
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: send(Message(queue, n), task), range(100)))
    assert sorted(bodies(rabbit, queue)) == list(range(100))
    assert proxy.accepted <= 4


def test_a_connection_is_not_shared_with_a_child(
    proxied: DelayTasks, proxy: Proxy, rabbit: Any, queue: str
) -> None:
    task = send(proxied, queue, 1)
    assert in_child(lambda: runtime_of(proxied).queue_callbacks(Message(queue, 2), task))
    assert send(proxied, queue, 3).status is Status.DONE
    assert proxy.accepted == 2
    assert bodies(rabbit, queue) == [1, 2, 3]


# -- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [None, 7, "", "a\n", "\ud800", "é" * 128])
def test_an_invalid_queue_name_or_header_is_refused(delays: DelayTasks, to: Any) -> None:
    with invalid("to"):
        delays.callbacks.publish(to, None, 0)
    with pytest.raises(InvalidInputError):
        delays.callbacks.publish("key", None, 0, exchange=to or 7)
    with pytest.raises(BodyRefusedError):
        delays.schedule_delay(MESSAGE, {"to": "x", "exchange": 7}, 0)
    with invalid("headers"):
        delays.callbacks.publish("queue", None, 0, headers=["a"])


def test_a_worker_sends_callbacks_and_messages(
    deploy: Deploy, redis_url: str, name: str, web: WebServer
) -> None:
    d = deploy(callback_allow="127.0.0.1", callback_broker_url=redis_url)
    d.worker()
    calls = [d.delays.callbacks.post(web.url("/paid"), n, 0.5) for n in range(20)]
    messages = [d.delays.callbacks.publish(name, n, 0.5) for n in range(20)]
    d.wait_for([*calls, *messages])
    assert sorted(int(request.body) for request in web.received) == list(range(20))
    ids = {request.headers["webhook-id"] for request in web.received}
    assert ids == {str(task.id) for task in calls}
    with Redis.from_url(redis_url) as client:
        taken: Any = client.rpop(name, 100)
    sent = [json.loads(base64.b64decode(json.loads(each)["body"])) for each in taken]
    assert sorted(sent) == list(range(20))
