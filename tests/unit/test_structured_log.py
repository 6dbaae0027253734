"""Structured log lines have the fields of their tasks."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals

from delaytasks import DelayTask, DelayTasks, LogFormatter
from delaytasks.core.events import Events, logger
from delaytasks.core.structured_log import log_structured

NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)
TASK = DelayTask(
    7, "mail", "{}", NOON, key="k 1", attempts=2, version=5, meta_json='{"tenant":"acme"}'
)
HOSTILE = 'a "quote", \x1b[31m and \n{"level":"forged"}'


class Lines(logging.Handler):
    def __init__(self, log_format: Any) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(LogFormatter(log_format))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def events() -> Events:
    made = Events()
    made.use_log(log_structured)
    return made


def _handler(log_format: str) -> Iterator[Lines]:
    handler, level = Lines(log_format), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def log() -> Iterator[Lines]:
    yield from _handler("json")


@pytest.fixture
def logfmt() -> Iterator[Lines]:
    yield from _handler("logfmt")


def test_a_change_of_a_task_is_one_line_with_its_fields(log: Lines, events: Events) -> None:
    events.emit("task.started", **TASK.event_fields, began=NOON + timedelta(seconds=1.5))
    [line] = log.documents
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": "delaytasks",
        "process": "MainProcess",
        "event": "task.started",
        "id": "7",
        "tag": "mail",
        "key": "k 1",
        "queue": "default",
        "attempt": 2,
        "version": 5,
        "late_s": 1.5,
        "meta": {"tenant": "acme"},
    }


def test_an_error_has_its_text_and_its_traceback_in_the_same_line(
    log: Lines, events: Events
) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        events.emit("task.failed", **TASK.event_fields, error=error)
    assert "\x1b" not in log.lines[0]
    assert "\n" not in log.lines[0]
    [line] = log.documents
    assert line["level"] == "ERROR"
    assert line["error"] == f"ValueError: {HOSTILE}"
    assert "test_structured_log.py" in line["traceback"]
    assert line["traceback"].rstrip().endswith(HOSTILE)


def test_logfmt_quotes_characters_that_could_end_a_value(logfmt: Lines, events: Events) -> None:
    events.emit("task.withdrawn", **TASK.event_fields, reason=HOSTILE)
    [line] = logfmt.lines
    assert ' event=task.withdrawn id=7 tag=mail key="k 1" queue=default attempt=2 ' in line
    assert " meta.tenant=acme " in line
    assert r'reason="a \"quote\", \u001b[31m and \n{\"level\":\"forged\"}"' in line
    assert line.isprintable()


def test_a_record_of_another_logger_has_its_message(log: Lines) -> None:
    logger.warning("celery %s", "began")
    assert log.documents[0]["message"] == "celery began"
    assert log.documents[0]["level"] == "WARNING"


def test_a_value_that_json_does_not_know_is_text(log: Lines, events: Events) -> None:
    events.emit("wheel.late", seconds=float("inf"), big=10**30, other=object())
    assert log.documents[0]["seconds"] == "inf"
    assert log.documents[0]["big"] == 10**30
    assert "other" not in log.documents[0]


def test_other_formatters_print_the_text_of_the_text_log(log: Lines, events: Events) -> None:
    log.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    events.emit("task.cancelled", **TASK.event_fields)
    assert log.lines == ["INFO task.cancelled id=7 tag='mail'"]


def test_the_text_log_has_no_line_for_each_change(log: Lines) -> None:
    Events().emit("task.cancelled", **TASK.event_fields)
    assert log.lines == []


def test_the_loggers_of_a_worker_get_the_format_of_the_settings(tmp_path: Path) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    DelayTasks(app, f"sqlite:///{tmp_path / 'shop.sqlite3'}", log_format="json")
    made = logging.Logger("celery")
    made.addHandler(logging.StreamHandler())
    gc.collect()  # nothing but the app refers to the instance
    signals.after_setup_logger.send(sender=None, logger=made)
    assert isinstance(made.handlers[0].formatter, LogFormatter)
