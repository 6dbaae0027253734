"""The Celery task of a run, and the record of each message that is published for it.

Workers import this module. The name of the folder with the notes is in the environment, since the
messages have Celery's form.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import wraps
from typing import Any

from celery import shared_task
from kombu.messaging import Producer

from chaos.history import DeliveryRecord, History, PublishRecord
from chaos.project import notebook, now_us
from delaytasks import DelayedTask
from delaytasks.durable_eta.messages import KeepingChannel
from delaytasks.model.inputs import celery_tag

#: The environment variable with the folder of the notes.
NOTES = "CHAOS_NOTES"
NAME = "chaos.celery_note"
TAG = celery_tag(NAME)
#: A message may be published in as many runs of its row as faults require.
MOST_RUNS = 1000


# A message is acknowledged when its task has ended, so that it survives the death of its worker.
@shared_task(bind=True, name=NAME, acks_late=True, reject_on_worker_lost=True, ignore_result=True)
def celery_note(self: Any) -> None:
    notebook(os.environ[NOTES]).note(DeliveryRecord(int(self.request.id), now_us()))


def record_messages() -> None:
    """Record each message of the Celery task that this process passes to the broker's client."""
    publish = Producer.publish

    @wraps(publish)
    def recorded(self: Any, *args: Any, **options: Any) -> Any:
        headers = options.get("headers") or {}
        is_sent = not isinstance(self.channel, KeepingChannel)  # or kombu only prepares it
        if headers.get("task") == NAME and is_sent:
            notebook(os.environ[NOTES]).note(PublishRecord(int(headers["id"]), now_us()))
        return publish(self, *args, **options)

    Producer.publish = recorded  # type: ignore[method-assign]


def use_row_ids(history: History, rows: Iterable[DelayedTask]) -> None:
    """Replace the ids of Celery tasks by the ids of their rows, in a history that was just read."""
    ids = {int(row.key): row.id for row in rows if row.key is not None and row.key.isdigit()}

    def renamed(records: list[Any]) -> list[Any]:
        return [replace(each, id=ids.get(each.id, each.id)) for each in records]

    history.call_records = renamed(history.call_records)
    history.publications = renamed(history.publications)
    history.deliveries = renamed(history.deliveries)


if NOTES in os.environ:
    record_messages()
