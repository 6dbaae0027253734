"""Test Django's connections of rows that run concurrently.

delaytasks closes them after each row, as Celery closes them after each task.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from delaytasks.runtime import runtime_of
from tests.recording import runner_of

pytest.importorskip("django")

from asgiref.sync import sync_to_async
from celery import signals
from celery.fixups.django import DjangoWorkerFixup
from django.db import connections

from delaytasks import DelayedTask, Status
from delaytasks.contrib.django.instance import DjangoDelays
from tests.integration.test_django import alias, armed, delays, django, module_delays  # noqa: F401


@pytest.fixture(autouse=True)
def fixup(module_delays: DjangoDelays) -> Iterator[None]:  # noqa: F811
    """Install the fixup that a worker of a Django project installs."""
    made = DjangoWorkerFixup(runtime_of(module_delays).celery).install()
    yield
    signals.task_prerun.disconnect(made.on_task_prerun)
    signals.task_postrun.disconnect(made.on_task_postrun)


def query(alias: str, used: list[tuple[int, Any]]) -> None:  # noqa: F811
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")
    assert connections[alias].connection is not None
    used.append((threading.get_ident(), connections[alias]))


def run(delays: DjangoDelays, tag: str) -> list[DelayedTask]:  # noqa: F811
    tasks = [delays.schedule_delay(tag, None, 0) for _ in range(6)]
    # A row that finds no free slot within the time budget returns to the queue.
    while runner_of(delays).run_due("default", range(10), limit=100).claimed:
        pass
    return [delays.get(task) for task in tasks]


@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "coroutines"])
def test_each_thread_closes_its_connection_after_its_row(
    delays: DjangoDelays,  # noqa: F811
    alias: str,  # noqa: F811
    is_async: bool,
) -> None:
    """Django makes the connections of coroutines in a thread of its own."""
    used: list[tuple[int, Any]] = []

    def work(body: Any) -> None:
        query(alias, used)

    async def work_on_loop(body: Any) -> None:
        await sync_to_async(query)(alias, used)

    runtime_of(delays).registry._processors.pop("shop.concurrent", None)
    delays.processor("shop.concurrent", in_flight=2)(work_on_loop if is_async else work)
    assert {task.status for task in run(delays, "shop.concurrent")} == {Status.DONE}
    assert threading.get_ident() not in {thread for thread, _ in used}
    assert [connection.connection for _, connection in used] == [None] * 6


def test_a_concurrent_row_is_completed_in_its_own_transaction(
    delays: DjangoDelays,  # noqa: F811
    alias: str,  # noqa: F811
) -> None:
    from django.db import transaction

    # SQLite has one writer at a time.
    turn = threading.Lock()

    def work(body: Any, task: DelayedTask) -> None:
        with turn, transaction.atomic(alias):
            task.complete(result=str(task.id))

    runtime_of(delays).registry._processors.pop("shop.complete", None)
    delays.processor("shop.complete", in_flight=3)(work)
    tasks = run(delays, "shop.complete")
    assert [task.result for task in tasks] == [str(task.id) for task in tasks]
