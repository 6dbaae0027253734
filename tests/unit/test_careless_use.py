"""Hostile messages and careless settings do not disturb workers or beat."""

from __future__ import annotations

import bz2
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kombu
import pytest
from celery import Celery
from kombu import Connection, Producer, Queue
from redis.exceptions import DataError

from delaytasks import DelayTasks
from delaytasks.core.events import Events
from delaytasks.timers.eta import SWEEP
from delaytasks.timers.publisher import Publisher
from delaytasks.wiring import wiring_of
from delaytasks.worker.celery_compat.message_guard import GuardStep
from tests.unit.test_queues import served
from tests.unit.test_strange_messages import Channel, GuardedConsumer

# -- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w@host.celery.pidbox", "celeryev.1"])
def test_remote_control_and_events_are_not_decompressed_by_their_encoding(
    tmp_path: Path, name: str
) -> None:
    """If kombu has no decoder for a content type, it uses the codec that the message names."""
    reader, taken = GuardedConsumer(tmp_path), list[Any]()
    queue, bomb = Queue(name), bz2.compress(b"\0" * 1_000_000)
    with Connection("memory://") as connection:
        GuardStep(reader.consumer)._guard_connection(connection)
        bound = queue(connection.default_channel)
        bound.declare()
        bound.purge()
        producer = Producer(connection)
        for kind, encoding in [
            ("application/data", "bz2_codec"),
            ("application/data", "utf-8"),
            ("application/json", "bz2_codec"),
            ("application/x-python-serialize", "binary"),
            (["unhashable"], {}),
        ]:
            producer.publish(bomb, content_type=kind, content_encoding=encoding, routing_key=name)
        producer.publish({"method": "ping"}, serializer="json", routing_key=name)
        with kombu.Consumer(connection, [queue], on_message=taken.append, no_ack=True):
            while not taken or taken[-1].content_type != "application/json":
                connection.drain_events(timeout=5)
    assert [message.payload for message in taken] == [{"method": "ping"}]
    assert reader.refused == 5
    reader.runtime.celery_worker.delays.close()


def test_remote_control_in_a_serializer_that_the_app_accepts_is_read(tmp_path: Path) -> None:
    reader = GuardedConsumer(tmp_path, accept_content=["msgpack"])
    raw: dict[str, Any] = {"content-type": "application/x-msgpack", "content-encoding": "binary"}
    guard = GuardStep(reader.consumer)
    assert guard._unreadable(raw) is None
    amqp = SimpleNamespace(properties={"content_type": "application/data"})
    assert guard._unreadable(amqp) == "content type 'application/data'"
    reader.runtime.celery_worker.delays.close()


class RefusingChannel(Channel):
    def basic_ack(self, *_: Any, **__: Any) -> None:
        raise DataError("Invalid input of type: 'list'")


def test_a_refused_message_with_a_malformed_delivery_tag_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = GuardedConsumer(tmp_path)
    monkeypatch.setattr("tests.unit.test_strange_messages.Channel", RefusingChannel)
    caplog.set_level(logging.INFO)
    caplog.clear()
    for _ in range(3):
        reader.read("x", kind="text/x")
    assert reader.refused == 3
    assert [r for r in caplog.records if "ack" in r.getMessage()] == []
    assert len(caplog.records) <= 1, "refused messages are logged once a minute"
    reader.runtime.celery_worker.delays.close()


# -- queues --------------------------------------------------------------------------------------


def make_delays(**conf: Any) -> DelayTasks:
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    return DelayTasks(app, "sqlite://")


@pytest.mark.parametrize(
    ("chosen", "ours", "consumed"),
    [
        ("other", ["other"], {"other", "delaytasks.other"}),
        ("delaytasks.other", ["other"], {"delaytasks.other"}),
        ("celery", [], {"celery"}),
        ("a b", [], {"a b"}),
    ],
)
def test_a_chosen_queue_that_only_calls_name_is_served(
    chosen: str, ours: list[str], consumed: set[str]
) -> None:
    delays = make_delays()
    found = served(delays, chosen)
    assert found == (ours, consumed)


@pytest.mark.parametrize("queues", [[Queue("reports")], {"reports": {}}])
def test_a_chosen_queue_that_the_app_declares_is_not_taken_for_ours(queues: Any) -> None:
    delays = make_delays(task_queues=queues)
    assert served(delays, "reports")[0] == []


@pytest.mark.parametrize(
    "conf",
    [
        {"task_annotations": {"*": {"serializer": "pickle"}}},
        {"task_annotations": {"*": {"exchange": "foo", "routing_key": "bar"}}},
        {"task_routes": {"*": {"exchange": "foo", "routing_key": "bar"}}},
        {
            "task_routes": {
                "*": {"exchange": "foo", "exchange_type": "topic", "serializer": "pickle"}
            }
        },
        {"task_serializer": "pickle"},
    ],
)
def test_a_sweep_message_arrives_with_any_task_settings_of_the_app(conf: dict[str, Any]) -> None:
    delays = make_delays(**conf)
    app, queue = wiring_of(delays).celery, wiring_of(delays).publisher.queue("default")
    app.amqp.queues.add(queue)
    with app.connection_for_write() as connection:
        bound = queue(connection.default_channel)
        bound.declare()
        bound.purge()
        # Beat sends the same message.
        app.tasks[SWEEP].apply_async((0,), queue=queue.name)
        message = bound.get(no_ack=True, accept=["json"])
        assert message is not None
        assert message.payload[0] == [0]


# -- log output ----------------------------------------------------------------------------------


def test_the_remedy_for_a_key_that_is_no_list_has_the_keys_prefix() -> None:
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": "shop_"}
    events, told = Events(), []
    events.subscribe(lambda name, fields: told.append(fields["remedy"]))
    publisher = Publisher(app, "delaytasks", 0.5, events)
    publisher._report_refused("mail", publisher.queue("mail"), "WRONGTYPE Operation against a key")
    assert "shop_delaytasks.mail " in told[0]


# -- Django --------------------------------------------------------------------------------------


def test_a_django_project_without_views_needs_no_root_urlconf() -> None:
    program = (
        "from django.conf import settings; settings.configure(); "
        "from delaytasks.contrib.django.instance import _celery_app; print(_celery_app(None).main)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "django", done.stderr
