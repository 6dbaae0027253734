"""Monitors that use Celery's `State`, for example Flower, understand the events of rows."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.events.state import State, Task

from delaytasks.core import loop as availability
from delaytasks.core.interfaces import Settlement
from delaytasks.core.task import DelayedTask
from delaytasks.worker.task_events import FAILED_SEND_PAUSE_S, TaskEvents, wants_task_events

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
ROW = DelayedTask(
    7,
    "order.close",
    '{"order": 1}',
    NOON,
    runs=1,
    create_time=NOON - timedelta(seconds=60),
    delay_s=60,
)


class Heard:
    """Receive events in place of the broker, and pass them through JSON to Celery's State."""

    def __init__(self, rows: TaskEvents) -> None:
        self.messages: list[list[dict[str, Any]]] = []
        self.state = State()
        self._clock = 0
        rows._connect = lambda: setattr(rows, "_producer", self)  # type: ignore[method-assign]
        rows._publish = self._publish  # type: ignore[method-assign]

    def _publish(self, events: list[dict[str, Any]]) -> None:
        events = json.loads(json.dumps(events))
        self.messages.append(events)
        for event in events:
            self._clock += 1
            self.state.event({**event, "clock": self._clock, "local_received": event["timestamp"]})

    def task(self, uuid: str = "7-1") -> Task:
        return self.state.tasks[uuid]


@pytest.fixture
def rows() -> Iterator[TaskEvents]:
    app = Celery("test", broker="memory://", set_as_current=False)
    yield TaskEvents(app, "w@test", 0.5)
    app.close()


@pytest.fixture
def heard(rows: TaskEvents) -> Heard:
    return Heard(rows)


def fail(rows: TaskEvents, row: DelayedTask) -> None:
    rows.started(row, NOON, NOON)
    rows.ended(
        Settlement(row, "fail", NOON, "Traceback: no"),
        NOON + timedelta(seconds=2),
        ValueError("no"),
    )


def test_a_run_is_one_message(rows: TaskEvents, heard: Heard) -> None:
    for number in range(50):
        row = replace(ROW, id=number + 1)
        rows.started(row, NOON, NOON + timedelta(seconds=1))
        rows.ended(
            Settlement(row, "succeed", NOON + timedelta(seconds=1)), NOON + timedelta(seconds=3)
        )
    assert heard.messages == []
    rows.flush()
    assert len(heard.messages) == 1
    task = heard.task("7-1")
    assert (task.name, task.state, task.runtime, task.worker.hostname) == (
        "order.close",
        "SUCCESS",
        2,
        "w@test",
    )
    assert task.started - task.received == 1
    rows.flush()
    assert len(heard.messages) == 1, "nothing is sent when nothing happened"


def test_a_row_that_an_operator_retries_is_shown_without_its_old_error(
    rows: TaskEvents, heard: Heard
) -> None:
    fail(rows, ROW)
    rows.flush()
    assert heard.task().state == "FAILURE"
    # The row was claimed, failed, was retried and was claimed again. A retry resets the attempts.
    again = replace(ROW, expected_time=NOON + timedelta(seconds=1))
    rows.started(again, NOON, NOON)
    rows.flush()
    assert (heard.task().state, heard.task().exception, heard.task().traceback) == (
        "STARTED",
        None,
        None,
    )
    rows.ended(Settlement(again, "succeed", NOON), NOON)
    rows.flush()
    assert (heard.task().state, heard.task().exception) == ("SUCCESS", None)


def test_a_row_that_runs_as_scheduled_is_not_reported_as_retried(
    rows: TaskEvents, heard: Heard
) -> None:
    rows.started(ROW, NOON, NOON)
    retried = replace(ROW, expected_time=NOON + timedelta(seconds=9), due_time=NOON, runs=2)
    rows.started(retried, NOON, NOON)
    rows.flush()
    kinds = [event["type"] for events in heard.messages for event in events]
    assert kinds == ["task-received", "task-started"] * 2


def test_the_attempt_before_a_lapse_has_failed(rows: TaskEvents, heard: Heard) -> None:
    rows.started(ROW, NOON, NOON)
    rows.flush()
    second = replace(ROW, runs=2, lapses=1)
    rows.started(second, NOON, NOON)
    assert heard.task("7-2").state == "STARTED", "told at once: it may kill its process again"
    assert heard.task("7-1").state == "FAILURE"
    assert "lost its lease" in heard.task("7-1").exception
    assert heard.task("7-2").parent_id == "7-1"


def test_each_outcome_has_a_state_of_celery(rows: TaskEvents, heard: Heard) -> None:
    later = NOON + timedelta(hours=1)
    outcomes = [
        (
            Settlement(replace(ROW, id=1), "schedule_retry", NOON, "Traceback: busy", later),
            ValueError("busy"),
            "RETRY",
        ),
        (Settlement(replace(ROW, id=2), "snooze", NOON, None, later), None, "RETRY"),
        (Settlement(replace(ROW, id=3), "withdraw", NOON, "not needed"), None, "REVOKED"),
        (Settlement(replace(ROW, id=4), "fail", NOON, "no such order"), None, "FAILURE"),
        (Settlement(replace(ROW, id=5), "succeed", NOON, result='{"paid":1}'), None, "SUCCESS"),
    ]
    for ending, error, _ in outcomes:
        rows.started(ending.task, NOON, NOON)
        rows.ended(ending, NOON, error)
    rows.expired(Settlement(replace(ROW, id=6), "expire", error="expired: an hour late"), NOON)
    rows.flush()
    assert [heard.task(f"{n}-1").state for n in range(1, 7)] == [
        state for *_, state in outcomes
    ] + ["REVOKED"]
    assert (heard.task("1-1").exception, heard.task("1-1").traceback) == (
        "ValueError('busy')",
        "Traceback: busy",
    )
    assert (heard.task("4-1").exception, heard.task("5-1").result) == (
        "no such order",
        '{"paid":1}',
    )
    assert heard.task("6-1").exception == "expired: an hour late"


class UnreadableError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    "error", [UnreadableError(), ValueError("\x00\ud800"), ValueError("x" * 1_000_000)]
)
def test_any_error_text_can_be_sent(rows: TaskEvents, heard: Heard, error: Exception) -> None:
    rows.started(ROW, NOON, NOON)
    rows.ended(Settlement(ROW, "fail", NOON, "\x00\ud800" + "y" * 1_000_000), NOON, error)
    rows.flush()
    task = heard.task()
    assert task.state == "FAILURE"
    for text in (task.exception, task.traceback):
        assert len(text.encode()) <= 16 * 1024
        assert "\x00" not in text


def test_a_long_body_is_cut(rows: TaskEvents, heard: Heard) -> None:
    rows.started(replace(ROW, body_json="[" + "1," * 100_000 + "1]"), NOON, NOON)
    rows.flush()
    assert len(heard.task().args) < 1100


def test_threads_lose_no_event(rows: TaskEvents, heard: Heard) -> None:
    def run(thread: int) -> None:
        for number in range(300):
            row = replace(ROW, id=thread * 1000 + number)
            rows.started(row, NOON, NOON)
            rows.ended(Settlement(row, "succeed", NOON), NOON)
            rows.flush()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(map(len, heard.messages)) == 4 * 300 * 3
    assert {task.state for task in heard.state.tasks.values()} == {"SUCCESS"}


def test_a_connection_that_was_closed_while_idle_is_replaced(
    rows: TaskEvents, heard: Heard
) -> None:
    publish, failures = rows._publish, [ConnectionError("idle for too long")]

    def publish_or_fail(events: list[dict[str, Any]]) -> None:
        if failures:
            raise failures.pop()
        publish(events)

    rows._connect()
    rows._publish = publish_or_fail  # type: ignore[method-assign]
    fail(rows, ROW)
    rows.flush()
    assert heard.task().state == "FAILURE"


@pytest.fixture
def black_hole() -> Iterator[int]:
    """Yield a port that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "silent"])
def test_an_unavailable_broker_takes_little_time_and_no_memory(
    scheme: str,
    is_closed: bool,
    black_hole: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = 1 if is_closed else black_hole
    app = Celery("test", broker=f"{scheme}://127.0.0.1:{port}//", set_as_current=False)
    rows = TaskEvents(app, "w@test", 0.2)
    began = time.monotonic()
    fail(rows, ROW)
    rows.flush()
    assert time.monotonic() - began < 2
    again = time.monotonic()
    for _ in range(100):
        fail(rows, ROW)
        rows.flush()
    assert time.monotonic() - again < 0.5, "it rests before it tries again"
    assert not rows._pending
    assert caplog.text.count("row events are not sent, tasks run on") == 1

    monkeypatch.setattr(availability, "monotonic", lambda: time.monotonic() + FAILED_SEND_PAUSE_S)
    heard = Heard(rows)
    fail(rows, ROW)
    rows.flush()
    assert heard.task().state == "FAILURE", "it comes back by itself"


@pytest.mark.parametrize("consumer", [None, SimpleNamespace(event_dispatcher=None)])
def test_there_are_no_row_events_while_the_worker_is_not_connected(consumer: Any) -> None:
    assert wants_task_events(consumer) is False


def test_bodies_are_shown_unless_the_setting_hides_them(rows: TaskEvents, heard: Heard) -> None:
    rows.started(ROW, NOON, NOON)
    rows.flush()
    assert heard.task().args == ROW.body_json
    quiet = TaskEvents(rows._app, "w@test", 0.5, shows_bodies=False)
    silent = Heard(quiet)
    quiet.started(ROW, NOON, NOON)
    quiet.ended(Settlement(ROW, "succeed", NOON, result='"rEsUlT"'), NOON)
    quiet.flush()
    assert ROW.body_json not in json.dumps(silent.messages)
    assert "rEsUlT" not in json.dumps(silent.messages)
    assert "event_bodies" in silent.task().args
