"""Frequent log lines are counted."""

from __future__ import annotations

from typing import Any

import pytest

from delaytasks.events import MOST_SUBJECTS, QUIET_S, Events
from tests.world.recording import ManualTime


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
