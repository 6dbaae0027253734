"""What the worker's main process looks after."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

from celery import Celery

from delaytasks import DelayTasks
from delaytasks.core.ports import Entry
from delaytasks.worker.desk import Desk
from tests.waiting import wait_until


class Worker:
    """As much of Celery's worker as a desk sees."""

    hostname = "w@test"
    hub = None
    consumer: Any = None

    class pool:
        limit = 1
        info: dict[str, Any] = {}

        @staticmethod
        def apply_async(*args: Any, **options: Any) -> object:
            return object()


def make_desk(tmp_path: Path) -> Desk:
    app = Celery("test", broker="memory://", set_as_current=False)
    delays = DelayTasks(app, f"sqlite:///{tmp_path / 'test.db'}")
    with delays.store.database.begin() as connection:
        delays.store.schema.metadata.create_all(connection)
    return Desk(delays, Worker())


def test_a_wheel_that_died_is_told_of_and_turns_again(tmp_path: Path) -> None:
    desk = make_desk(tmp_path)
    desk.wheel.start()
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    lives, desk.wheel._thread = desk.wheel._thread, ended
    assert math.isinf(desk.wheel.late_s)
    desk._look()
    assert desk.delays.events.counts["wheel.late"] == 1
    assert desk.wheel.late_s == 0
    desk.hold([Entry(1, 0, desk.delays.clock.now_us() + 1000)])
    wait_until(lambda: len(desk.wheel) == 0, 5, "the new thread to bring the entry out")
    assert lives is not desk.wheel._thread
    desk.wheel.stop()


def test_what_fails_when_entries_fall_due_does_not_stop_the_wheel(tmp_path: Path) -> None:
    desk = make_desk(tmp_path)
    desk.wheel.start()

    def fail(entries: Any) -> None:
        raise RuntimeError("no")

    take, desk.dispatcher.take = desk.dispatcher.take, fail  # type: ignore[method-assign]
    desk.hold([Entry(1, 0, desk.delays.clock.now_us() + 1000)])
    wait_until(lambda: desk.delays.events.counts["loop.failed"], 5, "the failure to be told")
    desk.dispatcher.take = take  # type: ignore[method-assign]
    assert desk.wheel.late_s == 0
    desk.wheel.stop()


def test_an_entry_far_beyond_the_horizon_is_not_held(tmp_path: Path) -> None:
    desk = make_desk(tmp_path)
    now = desk.delays.clock.now_us()
    desk.hold([Entry(1, 0, now + 20_000_000), Entry(2, 0, now + 10**13)])
    assert len(desk.wheel) == 1
    assert desk.delays.events.counts["message.refused"] == 1
