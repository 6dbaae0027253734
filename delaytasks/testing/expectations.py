"""Compares what was scheduled with what a test expects, and describes the difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pprint import pformat
from typing import Any

from delaytasks.core.inputs import Delay, check_delay, show_duration
from delaytasks.core.task import DelayTask
from delaytasks.core.text import count

#: How far a due time may be from the expected one: some time passes between call and assertion.
TOLERANCE = timedelta(seconds=1)
#: The most tasks that a message shows.
MAX_TASKS_SHOWN = 5


class _Any:
    """Matches each value."""

    def __repr__(self) -> str:
        return "ANY"


#: The default of expectations: the field is not compared.
ANY: Any = _Any()


@dataclass(frozen=True)
class Expectation:
    """What a test expects of a scheduled task; `ANY` matches every value."""

    tag: str
    key: Any = ANY
    body: Any = ANY
    queue: Any = ANY
    priority: Any = ANY
    meta: Any = ANY
    #: The due time is at most this long after the test's present time.
    within: Delay | None = None
    #: The due time, give or take a second.
    at: datetime | None = None

    def __post_init__(self) -> None:
        if self.within is not None and self.at is not None:
            raise TypeError("within= and at= exclude each other")

    def differences(self, task: DelayTask, now: datetime) -> list[str]:
        """Return a line for each field in which the task differs."""
        lines = []
        if task.tag != self.tag:
            lines.append(f"tag: expected {self.tag!r}, got {task.tag!r}")
        for name in ("key", "queue", "priority", "meta"):
            expected, got = getattr(self, name), getattr(task, name)
            if expected is not ANY and expected != got:
                lines.append(f"{name}: expected {expected!r}, got {got!r}")
        if self.body is not ANY and self.body != task.body:
            lines += _body_lines(self.body, task.body)
        lines += self._due_lines(task, now)
        return lines

    def _due_lines(self, task: DelayTask, now: datetime) -> list[str]:
        in_text = f"{_away(task.due - now)} ({task.due.isoformat(timespec='seconds')})"
        if (
            self.within is not None
            and task.due - now > check_delay(self.within, math.inf) + TOLERANCE
        ):
            return [f"due: expected within {self.within}, got {in_text}"]
        if self.at is not None and abs(task.due - self.at) > TOLERANCE:
            return [f"due: expected {self.at.isoformat()}, got {in_text}"]
        return []

    def __str__(self) -> str:
        given = [f"{self.tag!r}"]
        for name in ("key", "body", "queue", "priority", "meta"):
            if (value := getattr(self, name)) is not ANY:
                given.append(f"{name}={value!r}")
        given += [
            f"{name}={value!r}"
            for name in ("within", "at")
            if (value := getattr(self, name)) is not None
        ]
        return ", ".join(given)


def missing_text(expected: Expectation, tasks: Sequence[DelayTask], now: datetime) -> str:
    """Return the message for an expected task that was not scheduled."""
    same = [task for task in tasks if task.tag == expected.tag]
    lines = [f"no waiting task matches {expected}"]
    if not tasks:
        return lines[0] + "; no task is waiting"
    if not same:
        lines.append(f"no task of this tag is waiting; {_count(tasks)}:")
        lines += [f"  {line_of(task, now)}" for task in tasks[:MAX_TASKS_SHOWN]]
        return "\n".join(lines)
    nearest = sorted(same, key=lambda task: len(expected.differences(task, now)))
    lines.append(f"{_count(same)} of this tag, the most similar first:")
    for task in nearest[:MAX_TASKS_SHOWN]:
        lines.append(f"  {line_of(task, now)}")
        lines += [f"    {line}" for line in expected.differences(task, now)]
    return "\n".join(lines)


def present_text(expected: Expectation, found: Sequence[DelayTask], now: datetime) -> str:
    """Return the message for tasks that should not have been scheduled."""
    lines = [f"expected no waiting task to match {expected}; {_count(found)}:"]
    lines += [f"  {line_of(task, now)}" for task in found[:MAX_TASKS_SHOWN]]
    return "\n".join(lines)


def line_of(task: DelayTask, now: datetime) -> str:
    key = "" if task.key is None else f" key={task.key!r}"
    return f"{task.tag}{key} body={task.body!r} due {_away(task.due - now)}"


def _count(tasks: Sequence[DelayTask]) -> str:
    return f"{count(len(tasks), 'task')} {'is' if len(tasks) == 1 else 'are'} waiting"


def _away(away: timedelta) -> str:
    seconds = away.total_seconds()
    if abs(seconds) < 1:
        return "now"
    text = show_duration(round(abs(seconds)))
    return f"in {text}" if seconds > 0 else f"{text} ago"


def _body_lines(expected: Any, got: Any) -> list[str]:
    """Return the values that differ; of two dictionaries only the items that differ."""
    if isinstance(expected, dict) and isinstance(got, dict):
        return [
            f"body[{name!r}]: expected {_item(expected, name)}, got {_item(got, name)}"
            for name in _names([expected, got])
            if _item(expected, name) != _item(got, name)
        ]
    return [f"body: expected {pformat(expected)}, got {pformat(got)}"]


def _item(values: dict[Any, Any], name: Any) -> str:
    return repr(values[name]) if name in values else "nothing"


def _names(dictionaries: Iterable[dict[Any, Any]]) -> list[Any]:
    return list(dict.fromkeys(name for one in dictionaries for name in one))
