"""Test the backend of Django's Tasks framework: `django.tasks`, or the package `django-tasks`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("django")
if find_spec("django.tasks") is None:
    pytest.importorskip("django_tasks")

from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.db import transaction

from delaytasks import Status
from delaytasks.contrib.django import tasks_backend as ours
from delaytasks.contrib.django.instance import project_delays
from delaytasks.contrib.django.tasks_backend import TaskResultDoesNotExist, TaskResultStatus
from delaytasks.testing import DelaysTester
from tests.integration import django_settings, django_task_suite
from tests.running import output_of


@pytest.fixture(scope="module")
def declared() -> Iterator[Any]:
    with django_settings.configured():
        from tests.integration import django_declared_tasks

        call_command("migrate", verbosity=0)
        yield django_declared_tasks
        call_command("migrate", "delaytasks", "zero", verbosity=0)


@pytest.fixture
def tester(declared: Any) -> Iterator[DelaysTester]:
    with DelaysTester(project_delays()) as tester:
        declared.noted.clear()
        yield tester
        tester.clear()


def test_a_task_runs_and_its_result_has_its_value(declared: Any, tester: DelaysTester) -> None:
    enqueued = declared.add.enqueue(2, second=3)
    assert enqueued.status == TaskResultStatus.READY
    assert declared.add.get_result(enqueued.id) == enqueued
    [task] = tester.scheduled()
    assert (task.tag, task.queue) == (declared.add.module_path, "sums")
    tester.run_due()
    result = declared.add.get_result(enqueued.id)
    assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 5)
    assert (result.args, result.kwargs, result.attempts) == ([2], {"second": 3}, 1)
    assert len(result.worker_ids) == 1
    assert enqueued.enqueued_at <= result.started_at <= result.finished_at
    awaited = async_to_sync(declared.atell.aenqueue)()
    tester.run_due()
    told = async_to_sync(declared.atell.aget_result)(awaited.id)
    assert told.return_value == [told.id, 1], "the context has the result and the attempt"


def test_a_task_is_of_the_transaction_waits_for_run_after_and_runs_by_its_priority(
    declared: Any, tester: DelaysTester
) -> None:
    note = declared.note
    with transaction.atomic():
        enqueued = note.enqueue("never")
        transaction.set_rollback(True)
    with pytest.raises(TaskResultDoesNotExist):
        note.get_result(enqueued.id)
    later = note.using(run_after=tester.now + timedelta(hours=1))
    assert note.get_result(later.enqueue("late").id).task == later
    for priority in (-100, 0, 100, -20, 50):
        enqueued = note.using(priority=priority).enqueue(priority)
        assert note.get_result(enqueued.id).task.priority == priority
    tester.fast_forward("59m")
    assert declared.noted == [100, 50, 0, -20, -100]
    tester.fast_forward("1m")
    assert declared.noted[5:] == ["late"]


def test_a_failed_task_is_retried_and_has_all_errors(declared: Any, tester: DelaysTester) -> None:
    sent: list[tuple[str, int, int]] = []

    def note_signal(signal: Any, task_result: Any, **_: Any) -> None:
        sent.append((str(task_result.status), task_result.attempts, len(task_result.errors)))

    for signal in (ours.task_started, ours.task_finished):
        signal.connect(note_signal)
    result = declared.fail.enqueue("no paper")
    tester.run_due(raises=False)
    result.refresh()
    assert (result.status, result.attempts, len(result.errors)) == (TaskResultStatus.READY, 1, 1)
    tester.fast_forward("5m", raises=False)
    for signal in (ours.task_started, ours.task_finished):
        signal.disconnect(note_signal)
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.FAILED, 3)
    assert [error.exception_class for error in result.errors] == [ValueError] * 3
    assert all(error.traceback.endswith("ValueError: no paper\n") for error in result.errors)
    assert sent == [("RUNNING", 1, 0), ("RUNNING", 2, 1), ("RUNNING", 3, 2), ("FAILED", 3, 3)]


def test_cancelled_tasks_and_foreign_bodies_have_failed_and_unknown_ids_no_result(
    declared: Any, tester: DelaysTester
) -> None:
    from django.db import connection

    delays, result = project_delays(), declared.note.enqueue("never")
    delays.cancel(result.id)
    result.refresh()
    assert result.status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class.__name__ == "TaskCancelledError"
    result = declared.note.enqueue("never")
    with connection.cursor() as cursor:
        statement = "UPDATE yb_delay_task_message SET message_body = %s WHERE id = %s"
        cursor.execute(statement, ['{"args": 7}', result.id])
    [run] = tester.run_due(raises=False)
    assert "refuses the body" in str(run.error)
    assert delays.get(result.id).status is Status.FAILED
    for id in ("7", "", "1 OR 1=1", "9" * 40):
        with pytest.raises(TaskResultDoesNotExist):
            declared.note.get_result(id)
    delays.processor("order.close")(declared.noted.append)
    with pytest.raises(TaskResultDoesNotExist, match="no Django task"):
        declared.note.get_result(str(delays.schedule_delay("order.close", {}, 60).id))


def test_workers_must_be_able_to_find_a_task(declared: Any, tester: DelaysTester) -> None:
    with pytest.raises(ours.InvalidTask, match=r"declare it with @task\(backend='default'\)"):
        declared.of_another_backend.using(backend="default").enqueue()
    hidden = replace(declared.note, func=find_spec)  # which its module does not decorate
    with pytest.raises(ours.InvalidTask, match="decorate the function where it is defined"):
        hidden.enqueue()
    assert not tester.scheduled()


@pytest.mark.slow
def test_the_tests_of_the_frameworks_own_backends_pass(tmp_path: Path, task_suite: Path) -> None:
    """Run the tests of Django 6, or before Django 6 those of the package `django-tasks`."""
    package = "tests" if find_spec("django.tasks") is None else "tasks"
    suite = Path(django_task_suite.__file__)
    command = [sys.executable, "-W", "ignore", suite, task_suite, package]
    assert "not applicable" in output_of(command, tmp_path)
