"""A project as a user has it: processors that Celery's `imports` finds.

Each run adds a line to the file that the body names.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import time
from typing import Any

from celery import current_task, shared_task
from sqlalchemy import text

from delaytasks import DelayedTask, Fail, LeaseLostError, current_delays, processor
from delaytasks.runtime import runtime_of
from tests.waiting import STACKS

assert sys.__stderr__ is not None
faulthandler.register(STACKS, file=sys.__stderr__)


def note(body: dict[str, Any], *words: object) -> None:
    line = " ".join(map(str, words))
    with open(body["file"], "a") as file:
        file.write(line + "\n")


@processor("test.note")
def note_run(body: dict[str, Any], task: DelayedTask) -> None:
    runtime = runtime_of(current_delays())
    now = runtime.store.tasks.now() if body.get("asks_database") else runtime.clock.now()
    late_us = (now - task.expected_time).total_seconds() * 1e6
    note(body, task.id, int(late_us), os.getpid())


@shared_task(name="test.celery_note", bind=True)
def note_celery(self: Any, file: str) -> None:
    """An ordinary Celery task."""
    note({"file": file}, self.request.id)


@processor("test.quiet")
def do_nothing(body: dict[str, Any]) -> None:
    """The cheapest processor."""


@processor("test.mail", queue="mail")
def note_mail(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, "mail", os.getpid())


@processor("test.fail")
def fail(body: dict[str, Any]) -> None:
    raise ValueError(body.get("text", "as asked"))


@processor("test.abort")
def abort(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, "aborts", os.getpid())
    os.abort()


@processor("test.credit")
def credit(body: dict[str, Any], task: DelayedTask) -> None:
    """Write to the tasks' own database. The first attempt kills its process where the body says."""

    def dies(where: str) -> None:
        if task.runs == 1 and body.get("dies") == where:
            os.kill(os.getpid(), signal.SIGKILL)

    dies("before")
    with runtime_of(current_delays()).store.database.begin() as link:
        link.execute(text(f"INSERT INTO {body['table']} (task) VALUES (:task)"), {"task": task.id})
        dies("after the effect")
        task.complete(link)
        dies("after complete")
    dies("after the commit")


@processor("test.wait", in_flight=50)
@processor("test.sleep")
def sleep(body: dict[str, Any], task: DelayedTask) -> None:
    """Sleep as long as the body specifies for this attempt, or for all attempts."""
    seconds = body.get("seconds", 0)
    if isinstance(seconds, list):
        seconds = seconds[min(task.runs, len(seconds)) - 1]
    note(body, task.id, "began", os.getpid(), current_task.request.id)
    if body.get("holds_gil"):
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    else:
        time.sleep(seconds)
    note(body, task.id, "ended", os.getpid())


@processor("test.fork")
def fork(body: dict[str, Any], task: DelayedTask) -> None:
    """Fork, and return, or leave, in the child too, as if nothing had happened."""
    child = os.fork()
    note(body, task.id, "began", os.getpid())
    if not child and body["exits"]:
        sys.exit()


@processor("test.async")
async def wait_on_loop(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, "began", os.getpid(), id(asyncio.get_running_loop()))
    await asyncio.sleep(body["seconds"])
    note(body, task.id, "ended", os.getpid())


@processor("test.batch", batch=40)
def note_batch(bodies: list[dict[str, Any]], tasks: list[DelayedTask]) -> dict[int, Any]:
    note(bodies[0], len(tasks), "together", os.getpid())
    return {one.id: Fail("odd") for it, one in zip(bodies, tasks, strict=True) if it["number"] % 2}


@processor("test.guarded")
def guarded(body: dict[str, Any], task: DelayedTask) -> None:
    """Run for a long time, and stop when the lease cannot be renewed."""
    began = time.monotonic()
    note(body, task.id, "began")
    try:
        while time.monotonic() < began + body["seconds"]:
            task.check_lease()
            time.sleep(0.05)
    except LeaseLostError:
        note(body, task.id, "notified", time.monotonic() - began)
        raise
    note(body, task.id, "ended")


@processor("cancel.checks", retries="1s")
@processor("cancel.threads", in_flight=5)
def wait_for_cancel(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, "began")
    for _ in range(1200):
        time.sleep(0.05)
        task.check_lease()


@processor("cancel.coroutine")
async def await_cancel(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, "began")
    for _ in range(1200):
        await asyncio.sleep(0.05)
        task.check_lease()


@processor("test.heap")
def note_heap(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, gc.get_freeze_count())


@processor("test.time")
def note_time(body: dict[str, Any], task: DelayedTask) -> None:
    note(body, task.id, int(time.time()))


@processor("test.request")
def note_request(body: dict[str, Any], task: DelayedTask) -> None:
    request = current_task.request
    note(body, current_task.name, request.id, request.retries, request.delivery_info["routing_key"])
