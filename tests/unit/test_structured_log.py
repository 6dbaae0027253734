"""Log lines have the fields of their tasks, and frequent ones are counted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from delaytasks import DelayedTask
from delaytasks.core import events as repeats_module
from delaytasks.core.events import (
    _LOG_LEVELS,
    MOST_SUBJECTS,
    QUIET_S,
    SUBJECTS,
    Events,
    Repeats,
    logger,
)
from delaytasks.logging import LogFormatter, log_structured

# -- structured log lines have the fields of their tasks ------------------------------------------


NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)
TASK = DelayedTask(
    7, "mail", "{}", NOON, key="k 1", runs=2, version=5, meta_json='{"tenant":"acme"}'
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


# -- repeats --------------------------------------------------------------------------------------


class Log:
    """Record the logged events. The test sets the clock `now`."""

    now = 1000.0

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.repeats = Repeats(lambda name, fields: self.lines.append((name, fields)))

    def tell(self, tag: str, times: int = 1, name: str = "task.no_processor") -> None:
        for number in range(times):
            self.repeats(name, {"id": number, "tag": tag})


@pytest.fixture
def quiet_log(monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(repeats_module, "monotonic", lambda: Log.now)
    monkeypatch.setattr(Log, "now", 1000.0)
    return Log()


def test_a_tag_is_logged_once_a_minute_with_a_count(quiet_log: Log) -> None:
    quiet_log.tell("mail", 1000)
    assert quiet_log.lines == [("task.no_processor", {"id": 0, "tag": "mail"})]
    Log.now += QUIET_S
    quiet_log.repeats.flush()
    assert quiet_log.lines[1:] == [("task.no_processor", {"id": 999, "tag": "mail", "count": 999})]
    quiet_log.tell("mail", 5)
    assert len(quiet_log.lines) == 2, "its next minute has begun"
    Log.now += QUIET_S
    quiet_log.tell("mail")
    assert quiet_log.lines[2][1]["count"] == 5
    Log.now += 2 * QUIET_S
    quiet_log.repeats.flush()
    assert sum(fields.get("count", 1) for _, fields in quiet_log.lines) == 1006, "none is left out"


def test_a_bounded_number_of_tags_is_counted_separately(quiet_log: Log) -> None:
    for number in range(10 * MOST_SUBJECTS):
        quiet_log.tell(f"tag{number}")
    assert len(quiet_log.lines) == MOST_SUBJECTS + 1
    Log.now += QUIET_S
    quiet_log.repeats.flush()
    assert sum(fields.get("count", 1) for _, fields in quiet_log.lines) == 10 * MOST_SUBJECTS


def test_failures_are_logged_one_by_one(quiet_log: Log) -> None:
    quiet_log.tell("mail", 50, name="task.failed")
    assert len(quiet_log.lines) == 50


def test_every_throttled_event_has_a_log_level() -> None:
    assert SUBJECTS.keys() <= _LOG_LEVELS.keys()


def test_subscribers_and_counters_get_every_event(caplog: pytest.LogCaptureFixture) -> None:
    events, told = Events(), []
    events.subscribe(lambda name, fields: told.append(fields["id"]))
    with caplog.at_level(logging.WARNING, "delaytasks"):
        for number in range(100):
            events.emit("task.no_processor", id=number, tag="mail", next_try_s=5)
    assert told == list(range(100))
    assert events.counts["task.no_processor"] == 100
    assert len([record for record in caplog.records if "no_processor" in record.getMessage()]) == 1


def test_the_last_line_about_an_unblocked_key_reports_its_end(quiet_log: Log) -> None:
    for name in ["queue.blocked"] * 5 + ["queue.unblocked"]:
        quiet_log.repeats(name, {"key": "mail"})
    Log.now += QUIET_S
    quiet_log.repeats.flush()
    assert [name for name, _ in quiet_log.lines] == ["queue.blocked", "queue.unblocked"]
    for name in ["queue.blocked", "queue.unblocked", "queue.blocked"]:
        quiet_log.repeats(name, {"key": "mail"})
    Log.now += QUIET_S
    quiet_log.repeats.flush()
    assert [name for name, _ in quiet_log.lines][-1] == "queue.blocked"
