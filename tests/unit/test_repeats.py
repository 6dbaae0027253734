"""An event that occurs for each row is logged once a minute, with the number of repetitions."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from delaytasks.core import events as repeats_module
from delaytasks.core.events import (
    _LOG_LEVELS,
    MOST_SUBJECTS,
    QUIET_S,
    SUBJECTS,
    Events,
    Repeats,
)


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
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(repeats_module, "monotonic", lambda: Log.now)
    monkeypatch.setattr(Log, "now", 1000.0)
    return Log()


def test_a_tag_is_logged_once_a_minute_with_a_count(log: Log) -> None:
    log.tell("mail", 1000)
    assert log.lines == [("task.no_processor", {"id": 0, "tag": "mail"})]
    Log.now += QUIET_S
    log.repeats.flush()
    assert log.lines[1:] == [("task.no_processor", {"id": 999, "tag": "mail", "count": 999})]
    log.tell("mail", 5)
    assert len(log.lines) == 2, "its next minute has begun"
    Log.now += QUIET_S
    log.tell("mail")
    assert log.lines[2][1]["count"] == 5
    Log.now += 2 * QUIET_S
    log.repeats.flush()
    assert sum(fields.get("count", 1) for _, fields in log.lines) == 1006, "none is left out"


def test_a_rare_event_is_logged_immediately(log: Log) -> None:
    for _ in range(3):
        log.tell("mail")
        Log.now += QUIET_S + 1
    assert [fields.get("count") for _, fields in log.lines] == [None, None, None]


def test_a_bounded_number_of_tags_is_counted_separately(log: Log) -> None:
    for number in range(10 * MOST_SUBJECTS):
        log.tell(f"tag{number}")
    assert len(log.lines) == MOST_SUBJECTS + 1
    Log.now += QUIET_S
    log.repeats.flush()
    assert sum(fields.get("count", 1) for _, fields in log.lines) == 10 * MOST_SUBJECTS


def test_failures_are_logged_one_by_one(log: Log) -> None:
    log.tell("mail", 50, name="task.failed")
    assert len(log.lines) == 50


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


def test_the_last_line_about_an_unblocked_key_reports_its_end(log: Log) -> None:
    for name in ["queue.blocked"] * 5 + ["queue.unblocked"]:
        log.repeats(name, {"key": "mail"})
    Log.now += QUIET_S
    log.repeats.flush()
    assert [name for name, _ in log.lines] == ["queue.blocked", "queue.unblocked"]
    for name in ["queue.blocked", "queue.unblocked", "queue.blocked"]:
        log.repeats(name, {"key": "mail"})
    Log.now += QUIET_S
    log.repeats.flush()
    assert [name for name, _ in log.lines][-1] == "queue.blocked"
