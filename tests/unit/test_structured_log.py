"""Log lines have the fields of their tasks, and frequent ones are counted."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from delaytasks import DelayedTask
from delaytasks.events import MOST_SUBJECTS, QUIET_S, Events
from delaytasks.logging import LogFormatter, log_structured
from tests.world.recording import ManualTime

NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)
META = '{"tenant":"acme"}'
TASK = DelayedTask(7, "mail", "{}", NOON, key="k 1", runs=2, version=5, meta_json=META)
HOSTILE = 'a "quote", \x1b[31m and \n{"level":"forged"}'

# -- structured log lines have the fields of their tasks ------------------------------------------


def logged(caplog: pytest.LogCaptureFixture, name: str, **fields: Any) -> str:
    """Return the line of an event of the task."""
    events = Events()
    events.use_log(log_structured)
    with caplog.at_level(logging.INFO, "delaytasks"):
        events.emit(name, **TASK.event_fields, **fields)
    [record] = caplog.records
    return LogFormatter().format(record)


def test_a_change_of_a_task_is_one_line_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    line = json.loads(logged(caplog, "task.started", began=NOON + timedelta(seconds=1.5)))
    assert line.pop("time").endswith("Z")
    expected = {"level": "INFO", "logger": "delaytasks", "process": "MainProcess", "version": 5}
    expected |= {"event": "task.started", "id": "7", "tag": "mail", "key": "k 1", "attempt": 2}
    expected |= {"queue": "default", "late_s": 1.5, "meta": {"tenant": "acme"}}
    assert line == expected


def test_an_error_has_its_text_and_traceback_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        text = logged(caplog, "task.failed", error=error)
    assert not {"\x1b", "\n"} & {*text}
    line = json.loads(text)
    assert (line["level"], line["error"]) == ("ERROR", f"ValueError: {HOSTILE}")
    assert "test_structured_log.py" in line["traceback"]
    assert line["traceback"].rstrip().endswith(HOSTILE)


# -- repeats --------------------------------------------------------------------------------------


class Log:
    """Records the logged events by a clock that a test sets."""

    def __init__(self, time: ManualTime) -> None:
        self.time, self.lines = time, list[tuple[str, dict[str, Any]]]()
        self.events, self.told = Events(), list[str]()
        self.events.subscribe(lambda name, fields: self.told.append(name))
        self.events.use_log(lambda name, fields: self.lines.append((name, {**fields})))

    def tell(self, tag: str, times: int = 1, name: str = "task.no_processor") -> None:
        for number in range(times):
            self.events.emit(name, id=number, tag=tag)


@pytest.fixture
def log(time: ManualTime) -> Log:
    return Log(time)


def test_a_tag_is_logged_once_a_minute_with_a_count_and_failures_one_by_one(log: Log) -> None:
    log.tell("mail", 1000)
    assert log.lines == [("task.no_processor", {"id": 0, "tag": "mail"})]
    for times, last in ((6, 1000), (1, 6)):
        log.time.at += QUIET_S
        log.tell("mail", times)
        counted = {"id": 0, "tag": "mail", "count": last}
        assert log.lines[1:] == [("task.no_processor", counted)], "its next minute has begun"
        del log.lines[1]
    log.tell("mail", 50, name="task.failed")
    assert len(log.lines) == 51
    assert log.events.counts == {"task.no_processor": 1007, "task.failed": 50}
    assert len(log.told) == 1057


def test_a_bounded_number_of_tags_is_counted_separately(log: Log) -> None:
    for number in range(10 * MOST_SUBJECTS):
        log.tell(f"tag{number}")
    assert len(log.lines) == MOST_SUBJECTS + 1
    log.time.at += QUIET_S
    log.tell("new")
    assert log.lines[-1][1] == {"id": 0, "tag": "new"}, "a new minute has room for new tags"
