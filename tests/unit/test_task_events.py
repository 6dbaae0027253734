"""Monitors that use Celery's `State`, for example Flower, understand the events of rows."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.events.state import State, Task

from delaytasks import DelayedTask
from delaytasks.core import loop as availability
from delaytasks.worker.task_events import FAILED_SEND_PAUSE_S, TaskEvents, wants_task_events
from tests.world import Settlement

NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)
LATER = NOON + timedelta(hours=1)
MADE = NOON - timedelta(seconds=60)
ROW = DelayedTask(7, "order.close", '{"order": 1}', NOON, runs=1, create_time=MADE, delay_s=60)


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


def end(
    rows: TaskEvents, row: DelayedTask, move: Any, *end: Any, error: Any = None, after_s: float = 0
) -> None:
    rows.started(row, NOON, NOON)
    rows.ended(Settlement(row, move, NOON, *end), NOON + timedelta(seconds=after_s), error)


def fail(rows: TaskEvents) -> None:
    end(rows, ROW, "fail", "Traceback: no", error=ValueError("no"))


def test_a_run_is_one_message(rows: TaskEvents, heard: Heard) -> None:
    began = NOON + timedelta(seconds=1)
    for number in range(50):
        row = replace(ROW, id=number + 1)
        rows.started(row, NOON, began)
        rows.ended(Settlement(row, "succeed", began), began + timedelta(seconds=2))
    assert heard.messages == []
    rows.flush()
    assert len(heard.messages) == 1
    task = heard.task("7-1")
    assert (task.name, task.state, task.runtime) == ("order.close", "SUCCESS", 2)
    assert (task.worker.hostname, task.started - task.received) == ("w@test", 1)
    rows.flush()
    assert len(heard.messages) == 1, "nothing is sent when nothing happened"


def test_a_row_that_is_rerun_is_shown_without_its_old_error(rows: TaskEvents, heard: Heard) -> None:
    fail(rows)
    rows.flush()
    assert heard.task().state == "FAILURE"
    # The row was claimed, failed, was retried and was claimed again. A retry resets the attempts.
    again = replace(ROW, expected_time=NOON + timedelta(seconds=1))
    rows.started(again, NOON, NOON)
    rows.flush()
    task = heard.task()
    assert (task.state, task.exception, task.traceback) == ("STARTED", None, None)
    rows.ended(Settlement(again, "succeed", NOON), NOON)
    rows.flush()
    assert (heard.task().state, heard.task().exception) == ("SUCCESS", None)


def test_a_row_that_runs_as_planned_is_not_shown_as_retried(rows: TaskEvents, heard: Heard) -> None:
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
    runs: list[tuple[str, str, Any, Any]] = [
        ("RETRY", "schedule_retry", ("Traceback: busy", LATER), ValueError("busy")),
        ("RETRY", "snooze", (None, LATER), None),
        ("REVOKED", "withdraw", ("not needed",), None),
        ("FAILURE", "fail", ("no such order",), None),
        ("SUCCESS", "succeed", (None, None, None, '{"paid":1}'), None),
    ]
    for number, (_, move, values, error) in enumerate(runs, 1):
        end(rows, replace(ROW, id=number), move, *values, error=error)
    rows.expired(Settlement(replace(ROW, id=6), "expire", error="expired: an hour late"), NOON)
    rows.flush()
    tasks = [heard.task(f"{number}-1") for number in range(1, 7)]
    assert [task.state for task in tasks] == [*(state for state, *_ in runs), "REVOKED"]
    assert (tasks[0].exception, tasks[0].traceback) == ("ValueError('busy')", "Traceback: busy")
    assert (tasks[3].exception, tasks[4].result) == ("no such order", '{"paid":1}')
    assert tasks[5].exception == "expired: an hour late"


class UnreadableError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.mark.parametrize(
    "error", [UnreadableError(), ValueError("\x00\ud800"), ValueError("x" * 1_000_000)]
)
def test_any_error_text_can_be_sent(rows: TaskEvents, heard: Heard, error: Exception) -> None:
    end(rows, ROW, "fail", "\x00\ud800" + "y" * 1_000_000, error=error)
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
            end(rows, replace(ROW, id=thread * 1000 + number), "succeed")
            rows.flush()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert sum(map(len, heard.messages)) == 4 * 300 * 3
    assert {task.state for task in heard.state.tasks.values()} == {"SUCCESS"}


def test_a_connection_that_was_closed_is_replaced(rows: TaskEvents, heard: Heard) -> None:
    publish, failures = rows._publish, [ConnectionError("idle for too long")]

    def publish_or_fail(events: list[dict[str, Any]]) -> None:
        if failures:
            raise failures.pop()
        publish(events)

    rows._connect()
    rows._publish = publish_or_fail  # type: ignore[method-assign]
    fail(rows)
    rows.flush()
    assert heard.task().state == "FAILURE"


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "silent"])
def test_an_unavailable_broker_takes_little_time_and_no_memory(
    scheme: str, is_closed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # accepts connections and never answers
    port = 1 if is_closed else silent.getsockname()[1]
    app = Celery("test", broker=f"{scheme}://127.0.0.1:{port}//", set_as_current=False)
    rows = TaskEvents(app, "w@test", 0.2)
    began = time.monotonic()
    fail(rows)
    rows.flush()
    assert time.monotonic() - began < 2
    again = time.monotonic()
    for _ in range(100):
        fail(rows)
        rows.flush()
    assert time.monotonic() - again < 0.5, "it rests before it tries again"
    assert not rows._pending
    assert caplog.text.count("row events are not sent, tasks run on") == 1
    silent.close()
    monkeypatch.setattr(availability, "monotonic", lambda: time.monotonic() + FAILED_SEND_PAUSE_S)
    heard = Heard(rows)
    fail(rows)
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
    end(quiet, ROW, "succeed", None, None, None, '"rEsUlT"')
    quiet.flush()
    assert ROW.body_json not in json.dumps(silent.messages)
    assert "rEsUlT" not in json.dumps(silent.messages)
    assert "event_bodies" in silent.task().args
