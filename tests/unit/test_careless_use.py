"""Careless settings do not disturb workers or beat."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from delaytasks import DelayTasks
from delaytasks.core.events import Events
from delaytasks.runtime import runtime_of
from delaytasks.timers.arming import SWEEP
from delaytasks.timers.publisher import Publisher
from tests.unit.test_queues import served

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
    app, queue = runtime_of(delays).celery, runtime_of(delays).publisher.queue("default")
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
