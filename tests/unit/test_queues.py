"""The queue of a tag, and careless settings that do not disturb workers or beat."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from delaytasks import DelayTasks
from delaytasks.core.settings import Settings
from delaytasks.processors.registry import Registry
from delaytasks.runtime import runtime_of
from delaytasks.scheduling.producer import QueueRouting
from delaytasks.timers.arming import SWEEP
from delaytasks.worker.celery_patches import add_queues
from delaytasks.worker.processes import logical_queues

# -- queues ---------------------------------------------------------------------------------------


MAPPING = {
    "*": "rest",
    "mail.*": "mail",
    "mail.bulk.*": "bulk",
    "report.daily": "slow",
    "report.?????": "short",
    "sms.[ab]": "sms",
    "sms.*": "other",
}


@pytest.mark.parametrize(
    ("tag", "queue"),
    [
        ("mail.send", "mail"),
        ("mail.bulk.send", "bulk"),
        ("mail", "rest"),
        ("Mail.send", "rest"),
        ("report.daily", "slow"),
        ("report.other", "short"),
        ("report.daily.too", "rest"),
        ("sms.a", "sms"),
        ("sms.c", "other"),
        ("a\nb", "rest"),
    ],
)
def test_a_tag_uses_the_queue_of_its_name_or_of_its_most_specific_pattern(
    tag: str, queue: str
) -> None:
    assert QueueRouting(Settings(queues=MAPPING), Registry()).of(tag) == queue


def test_of_equally_specific_patterns_the_first_one_applies() -> None:
    assert QueueRouting(Settings(queues={"a.*": "x", "*.b": "y"}), Registry()).of("a.b") == "x"
    assert QueueRouting(Settings(queues={"*.b": "y", "a.*": "x"}), Registry()).of("a.b") == "y"


def test_a_tag_without_a_mapping_uses_the_default_queue() -> None:
    assert QueueRouting(Settings(queues={"*": "usual"}), Registry()).of("mail.send") == "usual"


def make_delays(**settings: Any) -> DelayTasks:
    app = Celery("test", broker="memory://", set_as_current=False)
    return DelayTasks(app, "sqlite://", **settings)


def test_the_call_overrides_the_processor_and_the_processor_the_mapping() -> None:
    delays = make_delays(queues={"mail.*": "mail", "mail.send": "sending"})
    from delaytasks.core.task import NewTask

    def queue_of(**options: Any) -> str:
        return (
            runtime_of(delays)
            .producer.build([NewTask("mail.send", {}, 0, **options)], "reject")[0]
            .queue
        )

    assert queue_of() == "sending"
    delays.processor("mail.send", queue="own")(lambda body: None)
    assert queue_of() == "own"
    assert queue_of(queue="asked") == "asked"


def served(delays: DelayTasks, *chosen: str) -> tuple[list[str], set[str]]:
    """Return our queues of a worker that runs with `-Q chosen`, and all queues that it consumes."""
    if chosen:
        runtime_of(delays).celery.amqp.queues.select(chosen)
    consumed = add_queues(
        runtime_of(delays).celery, runtime_of(delays).queues.all(), runtime_of(delays).publisher
    )
    return logical_queues(consumed, delays.settings.namespace), set(consumed)


def test_a_worker_without_a_choice_serves_all_queues_that_a_tag_may_have() -> None:
    delays = make_delays(queues={"mail.*": "mail", "*": "usual"})
    delays.processor("report.make", queue="slow")(lambda body: None)
    assert served(delays)[0] == ["default", "mail", "slow", "usual"]


@pytest.mark.parametrize("name", ["mail", "delaytasks.mail"])
def test_a_worker_with_a_choice_serves_only_that_with_or_without_the_prefix(name: str) -> None:
    queues, consumed = served(make_delays(queues={"mail.*": "mail", "sms.*": "sms"}), name)
    assert queues == ["mail"]
    assert consumed == {name, "delaytasks.mail"}


# -- careless settings do not disturb workers or beat ---------------------------------------------


# -- queues --------------------------------------------------------------------------------------


def delays_of(**conf: Any) -> DelayTasks:
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
    delays = delays_of()
    found = served(delays, chosen)
    assert found == (ours, consumed)


@pytest.mark.parametrize("queues", [[Queue("reports")], {"reports": {}}])
def test_a_chosen_queue_that_the_app_declares_is_not_taken_for_ours(queues: Any) -> None:
    delays = delays_of(task_queues=queues)
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
    delays = delays_of(**conf)
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


# -- Django --------------------------------------------------------------------------------------


def test_a_django_project_without_views_needs_no_root_urlconf() -> None:
    program = (
        "from django.conf import settings; settings.configure(); "
        "from delaytasks.contrib.django.instance import _celery_app; print(_celery_app(None).main)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "django", done.stderr
