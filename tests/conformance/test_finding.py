"""Pages of tasks from the newest to the oldest, on each database."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaytasks import DelayTask, DelayTasks
from delaytasks.runtime import runtime_of
from tests.recording import RecordingTimer


@pytest.fixture
def tasks(delays: DelayTasks, timer: RecordingTimer) -> list[DelayTask]:
    """Return tasks of two queues and two tags in the order of their due times; some times are
    equal."""
    now = runtime_of(delays).clock.now()
    tags, queues = ("a", "b"), ("default", "other")
    made = [
        delays.schedule_at(
            tags[n % 2], n, now + timedelta(minutes=n // 3), queue=queues[n % 3 // 2]
        )
        for n in range(1, 12)
    ]
    return sorted(made, key=lambda task: (task.expected_time, task.id))


@pytest.mark.parametrize("filters", [{}, {"tag": "a"}, {"status": "NOT_COMPLETE"}])
@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_pages_from_the_newest_to_the_oldest_are_the_others_reversed(
    delays: DelayTasks, tasks: list[DelayTask], filters: dict[str, str], limit: int
) -> None:
    wanted = [task.id for task in tasks if task.tag == filters.get("tag", task.tag)]

    def pages(newest_first: bool) -> list[int]:
        found: list[int] = []
        cursor: str | None = None
        while True:
            page = delays.find(**filters, limit=limit, cursor=cursor, newest_first=newest_first)
            found += [task.id for task in page]
            cursor = page.cursor
            if cursor is None:
                return found

    assert pages(newest_first=False) == wanted
    assert pages(newest_first=True) == wanted[::-1]


def test_a_task_that_is_scheduled_between_two_pages_does_not_shift_them(
    delays: DelayTasks, tasks: list[DelayTask]
) -> None:
    first = delays.find(limit=4, newest_first=True)
    delays.schedule_delay("a", {}, 86_400)
    rest = delays.find(limit=100, newest_first=True, cursor=first.cursor)
    assert [task.id for task in [*first, *rest]] == [task.id for task in tasks][::-1]
