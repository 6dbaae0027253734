"""Log lines have the fields of their tasks, and frequent ones are counted."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from delaytasks import DelayedTask
from delaytasks import events as events_module
from delaytasks.events import Events, Repeats
from delaytasks.logging import LogFormatter, log_structured
from tests.world.recording import ManualTime

# -- structured log lines have the fields of their tasks ------------------------------------------


NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)
META = '{"tenant":"acme"}'
TASK = DelayedTask(7, "mail", "{}", NOON, key="k 1", runs=2, version=5, meta_json=META)
HOSTILE = 'a "quote", \x1b[31m and \n{"level":"forged"}'


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(LogFormatter())

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


@pytest.fixture
def log() -> Iterator[Lines]:
    handler, level = Lines(), events_module.logger.level
    events_module.logger.addHandler(handler)
    events_module.logger.setLevel(logging.INFO)
    yield handler
    events_module.logger.removeHandler(handler)
    events_module.logger.setLevel(level)


def test_a_change_of_a_task_is_one_line_with_its_fields(log: Lines, events: Events) -> None:
    events.emit("task.started", **TASK.event_fields, began=NOON + timedelta(seconds=1.5))
    [line] = log.documents
    assert line.pop("time").endswith("Z")
    expected = {"level": "INFO", "logger": "delaytasks", "process": "MainProcess", "version": 5}
    expected |= {"event": "task.started", "id": "7", "tag": "mail", "key": "k 1", "attempt": 2}
    expected |= {"queue": "default", "late_s": 1.5, "meta": {"tenant": "acme"}}
    assert line == expected


def test_an_error_has_its_text_and_traceback_in_one_line(log: Lines, events: Events) -> None:
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


# -- repeats --------------------------------------------------------------------------------------


CLOCKED = [events_module]


class Log:
    """Record the logged events by a clock that a test sets."""

    def __init__(self, time: ManualTime) -> None:
        self.time = time
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.repeats = Repeats(lambda name, fields: self.lines.append((name, fields)))

    def tell(self, tag: str, times: int = 1, name: str = "task.no_processor") -> None:
        for number in range(times):
            self.repeats(name, {"id": number, "tag": tag})

    def count(self) -> int:
        return sum(fields.get("count", 1) for _, fields in self.lines)


@pytest.fixture
def quiet_log(time: ManualTime) -> Log:
    return Log(time)


def test_a_tag_is_logged_once_a_minute_with_a_count(quiet_log: Log) -> None:
    quiet_log.tell("mail", 1000)
    assert quiet_log.lines == [("task.no_processor", {"id": 0, "tag": "mail"})]
    quiet_log.time.at += events_module.QUIET_S
    quiet_log.tell("mail", 6)
    last = {"id": 0, "tag": "mail", "count": 1000}
    assert quiet_log.lines[1:] == [("task.no_processor", last)], "its next minute has begun"
    quiet_log.time.at += events_module.QUIET_S
    quiet_log.tell("mail")
    assert quiet_log.lines[2][1]["count"] == 6
    assert quiet_log.count() == 1007, "none is left out"


def test_a_bounded_number_of_tags_is_counted_separately(quiet_log: Log) -> None:
    for number in range(10 * events_module.MOST_SUBJECTS):
        quiet_log.tell(f"tag{number}")
    assert len(quiet_log.lines) == events_module.MOST_SUBJECTS + 1
    quiet_log.time.at += events_module.QUIET_S
    quiet_log.tell("new")
    assert quiet_log.lines[-1][1] == {"id": 0, "tag": "new"}, "a new minute has room for new tags"


def test_failures_are_logged_one_by_one(quiet_log: Log) -> None:
    quiet_log.tell("mail", 50, name="task.failed")
    assert len(quiet_log.lines) == 50


def test_subscribers_and_counters_get_every_event(caplog: pytest.LogCaptureFixture) -> None:
    events, told = Events(), []
    events.subscribe(lambda name, fields: told.append(fields["id"]))
    with caplog.at_level(logging.WARNING, "delaytasks"):
        for number in range(100):
            events.emit("task.no_processor", id=number, tag="mail", next_try_s=5)
    assert told == list(range(100))
    assert events.counts["task.no_processor"] == 100
    assert len([record for record in caplog.records if "no_processor" in record.getMessage()]) == 1
