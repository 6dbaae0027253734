"""Celery's own ways to end a task work in a processor, or raise an error with the alternative."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task, current_task
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CeleryRetry

from delaytasks import DelayTask
from delaytasks.worker.celery_context import CeleryTaskContext
from tests.recording import RunnerHarness
from tests.unit.conftest import Make

CELERYS_WAIT = timedelta(seconds=180)


@pytest.fixture
def app() -> Celery:
    """Return an app whose broker does not exist, so that publishing a message fails."""
    return Celery(broker="memory://nowhere", set_as_current=False)


@pytest.fixture
def bench(make: Make, app: Celery) -> RunnerHarness:
    made = make()
    made.execute = CeleryTaskContext(app, "w@host", made.clock)  # type: ignore[method-assign]
    made.runner = made.make_runner()
    return made


def run(
    bench: RunnerHarness, function: Callable[[], Any], attempts: int = 0, **options: Any
) -> DelayTask:
    """Run a task that has already had `attempts` attempts, and return the stored task."""
    bench.registry.processor("celery", **options)(lambda given: function())
    task = bench.schedule("celery", {"n": 1})
    bench.change(task, attempts=attempts)
    bench.run(task)
    return bench.now(task)


def waits(bench: RunnerHarness, task: DelayTask) -> timedelta:
    assert task.status.name == "NOT_COMPLETE"
    return task.expected_time - bench.clock.now()


def retry(**options: Any) -> Callable[[], Any]:
    def ask() -> None:
        raise current_task.retry(**options)

    return ask


SECOND = timedelta(seconds=2)


@pytest.mark.parametrize(
    "options", [{}, {"batch": 5}, {"in_flight": 5}], ids=["single", "batch", "in_flight"]
)
def test_current_task_retry_is_a_retry(bench: RunnerHarness, options: Any) -> None:
    task = run(bench, retry(countdown=600, exc=ValueError("the bank is closed")), **options)
    assert abs(waits(bench, task) - timedelta(seconds=600)) < SECOND
    assert task.attempts == 1
    assert "ValueError: the bank is closed" in (task.error or "")


def test_a_retry_without_a_countdown_takes_the_next_delay_of_the_retry_schedule(
    bench: RunnerHarness,
) -> None:
    task = run(bench, retry(), attempts=1, retries="1m 1h")
    assert abs(waits(bench, task) - timedelta(hours=1)) < SECOND


def test_a_retry_past_the_retry_schedule_fails(bench: RunnerHarness) -> None:
    task = run(bench, retry(exc=ValueError("still closed")), attempts=2, retries="1m 1h")
    assert task.status.name == "FAILED"
    assert "still closed" in (task.error or "")


def test_a_tag_without_a_retry_schedule_has_celerys_defaults(bench: RunnerHarness) -> None:
    task = run(bench, retry())
    assert abs(waits(bench, task) - CELERYS_WAIT) < SECOND


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "MaxRetriesExceededError"), ({"exc": ValueError("closed")}, "ValueError: closed")],
    ids=["without an error", "with an error"],
)
def test_a_retry_beyond_max_retries_fails(bench: RunnerHarness, options: Any, said: str) -> None:
    task = run(bench, retry(**options), attempts=3)
    assert task.status.name == "FAILED"
    assert said in (task.error or "")
    other = run(bench, retry(max_retries=9), attempts=3)
    assert other.status.name == "NOT_COMPLETE"


def test_a_retry_with_an_eta_is_due_at_the_eta(bench: RunnerHarness) -> None:
    task = run(bench, lambda: retry(eta=bench.clock.now() + timedelta(minutes=7))())
    assert abs(waits(bench, task) - timedelta(minutes=7)) < SECOND
    naive = run(
        bench, lambda: retry(eta=(bench.clock.now() - timedelta(hours=1)).replace(tzinfo=None))()
    )
    assert abs(waits(bench, naive)) < SECOND, (
        "naive is UTC, as the app has it, and what is over is now"
    )


def test_a_retry_exception_that_is_raised_or_returned_is_a_retry(bench: RunnerHarness) -> None:
    def ask() -> None:
        raise CeleryRetry("busy", when=60)

    for function in (ask, lambda: CeleryRetry("busy", when=60)):
        task = run(bench, function)
        assert abs(waits(bench, task) - timedelta(minutes=1)) < SECOND
        assert "busy" in (task.error or "")
        bench.registry._processors.clear()


def test_the_retry_of_a_celery_task_that_a_processor_calls_retries_the_row(
    bench: RunnerHarness, app: Celery
) -> None:
    @app.task(bind=True)
    def charge(self: Task) -> None:
        raise self.retry(countdown=5, exc=ValueError("closed"))

    task = run(bench, lambda: charge(), retries="1m")
    assert task.status.name == "NOT_COMPLETE"
    assert "ValueError: closed" in (task.error or "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"args": (1,)}, "retry(args=…) cannot change task"),
        ({"kwargs": {}, "queue": "other"}, "retry(kwargs, queue=…) cannot change task"),
        ({"throw": False}, "retry(throw=False) has no effect on task"),
    ],
)
def test_the_error_names_options_that_a_retry_does_not_support(
    bench: RunnerHarness, options: Any, said: str
) -> None:
    task = run(bench, retry(**options))
    assert task.status.name == "FAILED"
    assert said in (task.error or "")


@pytest.mark.parametrize("error", [Ignore(), Reject("no", requeue=True)])
@pytest.mark.parametrize(
    "options", [{}, {"batch": 5}, {"in_flight": 5}], ids=["single", "batch", "in_flight"]
)
def test_other_control_exceptions_of_celery_are_errors_that_name_the_outcomes(
    bench: RunnerHarness, error: Exception, options: Any
) -> None:
    def end() -> None:
        raise error

    task = run(bench, end, **options)
    assert task.status.name == "FAILED"
    assert f"raised celery.exceptions.{type(error).__name__}" in (task.error or "")
    assert "Snooze(after), Cancel(reason)" in (task.error or "")


@pytest.mark.parametrize("call", ["delay", "apply_async", "s"])
def test_a_tag_cannot_be_sent_as_a_message(bench: RunnerHarness, call: str) -> None:
    def send() -> None:
        made = getattr(current_task, call)()
        made.apply_async()

    task = run(bench, send)
    assert task.status.name == "FAILED"
    assert "use schedule_delay('celery', body, delay)" in (task.error or "")
