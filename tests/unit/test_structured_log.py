"""Structured log lines have the fields of their tasks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from delaytasks import DelayTask, LogFormatter
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
