"""The processors and the Celery task of a run, which note what they do; workers import this module.

Each message of the Celery task that a worker passes to the client of the broker is noted, too.
"""

from __future__ import annotations

import faulthandler
import os
import time
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

from celery import shared_task
from kombu.messaging import Producer

from chaos.calls import CELERY_TASK, RECURRING
from chaos.failpoints import ORDERS, Orders, kill_this_process
from chaos.history import RETRIES, MessageRecord, RunRecord, notebook, now_us
from delaytasks import DelayedTask, current_delays
from delaytasks.celery import delays
from delaytasks.durable_eta.messages import KeepingChannel
from delaytasks.runtime import runtime_of
from tests.waiting import STACKS

faulthandler.register(STACKS)


def note(body: dict[str, Any], task: DelayedTask) -> None:
    if task.lapses < body["kills"]:
        kill_this_process("fatal")
    begun = RunRecord(task.id, task.version, f"{os.getpid()}", now_us())
    notebook().note(begun)
    time.sleep(body["s"])
    notebook().note(replace(begun, ended_us=now_us()))
    if task.runs <= body["fails"]:
        raise RuntimeError("as asked")


for tag in ("note", "limited", RECURRING):
    delays.processor(tag)(note)
delays.processor("shaky", retries=RETRIES)(note)
delays.processor("side", in_flight=10)(note)


@delays.processor("effect")
def effect(body: dict[str, Any], task: DelayedTask) -> None:
    """Settle the task in a transaction of the processor."""
    note(body, task)
    with runtime_of(current_delays()).store.database.begin() as connection:
        task.complete(connection)


# A message is acknowledged when its task has ended, so that it survives the death of its worker.
@shared_task(
    bind=True, name=CELERY_TASK, acks_late=True, reject_on_worker_lost=True, ignore_result=True
)
def celery_note(self: Any) -> None:
    notebook().note(MessageRecord(int(self.request.id), "begun", now_us()))


publish = Producer.publish


@wraps(publish)
def recorded(self: Any, *args: Any, **options: Any) -> Any:
    headers = options.get("headers") or {}
    is_sent = not isinstance(self.channel, KeepingChannel)  # or kombu only prepares it
    if headers.get("task") == CELERY_TASK and is_sent:
        notebook().note(MessageRecord(int(headers["id"]), "published", now_us()))
    return publish(self, *args, **options)


Producer.publish = recorded  # type: ignore[method-assign]
if ORDERS in os.environ:
    Orders(Path(os.environ[ORDERS]))
