"""Thousands of queue names: a sweep queries a bounded number of them, and each one is swept in
turn, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, insert, update

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.filters import Filter
from delaytasks.core.interfaces import Level, QueuePlace
from delaytasks.core.states import Status
from delaytasks.maintenance import sweeper as overdue
from delaytasks.maintenance import sweeper as sweeper_module
from delaytasks.maintenance.sweeper import (
    MOST_MESSAGES_PER_QUEUE,
    MOST_NAMED,
    MOST_OTHERS,
    OverdueQueues,
    Sweeper,
)
from delaytasks.storage import policy_rows as store_holding
from delaytasks.storage import worker_table as store_workers
from delaytasks.storage.policy_rows import WAITLISTS_PER_CALL
from delaytasks.storage.store import Store
from tests.conftest import settings_for
from tests.recording import RecordingTimer

pytestmark = pytest.mark.slow

#: A sweep may use this number of statements for each queue that it queries.
EACH = 8
MANY = 12 * MOST_OTHERS


class ManyQueues:
    """A sweeper on tables with rows in many queues."""

    def __init__(self, store: Store) -> None:
        self.store, self.timer, self.events = store, RecordingTimer(), Events()
        self.settings = settings_for(store.database.url.render_as_string(hide_password=False))
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.events.subscribe(lambda name, fields: self.told.append((name, fields)))
        parts = (
            self.settings,
            store.sweeps,
            store.workers,
            Clock(store.tasks.now),
            self.timer,
            self.events,
        )
        self.sweeper = Sweeper(*parts)

    def rows(self, *queues: str, in_s: float = -60, priority: int = 0) -> None:
        self._insert([{"queue": queue, "priority": priority} for queue in queues], in_s)

    def priorities(self, queue: str, *priorities: int) -> None:
        self._insert([{"queue": queue, "priority": priority} for priority in priorities], -60)

    def _insert(self, rows: list[dict[str, Any]], in_s: float) -> None:
        due = self.store.tasks.now() + timedelta(seconds=in_s)
        common = {
            "tag": "mail",
            "message_body": "{}",
            "expected_time": due,
            "status": int(Status.NOT_COMPLETE),
        }
        with self.store.database.begin() as connection:
            connection.execute(insert(self.store.schema.tasks), [{**common, **row} for row in rows])

    def serve(self, name: str, *queues: str) -> None:
        self.store.workers.report(name, queues, "prefork", 2, 0)

    def sweep(self, beat: Callable[[], None] = lambda: None) -> None:
        s = self.store.schema.sweeps
        self.timer.requested_drains.clear()
        self.told.clear()
        with self.store.database.begin() as connection:
            connection.execute(
                update(s).values(swept_at=self.store.tasks.now() - timedelta(seconds=60))
            )
        assert self.sweeper.sweep(on_step=beat)
        assert self.of("loop.failed") == []

    def of(self, name: str) -> list[dict[str, Any]]:
        return [fields for event_name, fields in self.told if event_name == name]

    @contextmanager
    def counted(self) -> Iterator[list[str]]:
        """Yield the list of statements that are sent inside the block."""
        seen: list[str] = []

        def note(*given: Any) -> None:
            seen.append(given[2])

        engines = (self.store.database.auto, self.store.database.tx)
        for engine in engines:
            event.listen(engine, "before_cursor_execute", note)
        yield seen
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)


@pytest.fixture
def site(store: Store) -> ManyQueues:
    return ManyQueues(store)


def names(count: int) -> list[str]:
    return [f"q{number:06}" for number in range(count)]


def test_a_sweep_checks_a_bounded_number_of_queues_and_those_of_live_workers_first(
    site: ManyQueues,
) -> None:
    site.rows(*names(MANY))
    site.rows("served", priority=3)
    site.serve("w1", "served", "default")
    beats: list[None] = []
    with site.counted() as seen:
        site.sweep(lambda: beats.append(None))
    assert len(seen) < EACH * MOST_OTHERS, "the cost is not that of all queues"
    assert [(queue, list(priorities)) for queue, priorities, _ in site.timer.requested_drains] == [
        ("served", [3])
    ]
    assert len(beats) >= MOST_OTHERS / overdue.QUEUES_PER_QUERY, "the loop shows that it goes on"


def test_one_log_line_summarizes_the_queues_that_no_worker_serves(site: ManyQueues) -> None:
    site.rows(*names(MANY))
    site.serve("w1", "default")
    site.sweep()
    [told] = site.of("queue.unserved")
    assert told["queue"] == "q000000, q000001, q000002, q000003, q000004"
    assert told["count"] == MOST_OTHERS == site.events.counts["queue.unserved"]
    named = ",".join(f"delaytasks.q00000{number}" for number in range(5))
    assert told["remedy"].endswith(f"worker -Q {named}")


def test_each_queue_is_drained_in_one_of_several_sweeps(site: ManyQueues) -> None:
    """A worker without queue names of its own serves all of them."""
    site.rows(*names(3 * MOST_OTHERS - 10))
    site.serve("w1", "*")
    drained: list[str] = []
    for _ in range(3):
        site.sweep()
        drained += [queue for queue, _, _ in site.timer.requested_drains]
    assert sorted(drained) == names(3 * MOST_OTHERS - 10), "each of them once"
    site.sweep()
    assert site.timer.requested_drains[0][0] == "q000000", "and again from the beginning"


def test_a_worker_that_names_thousands_of_queues_has_each_of_them_swept(
    site: ManyQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overdue, "MOST_NAMED", 20)
    site.rows(*names(50))
    site.serve("w1", *names(50), "default")
    drained: list[str] = []
    for _ in range(3):
        site.sweep()
        drained += [queue for queue, _, _ in site.timer.requested_drains]
    assert set(drained) == set(names(50))
    assert len(drained) <= 60 < MOST_NAMED
    assert site.of("queue.unserved") == []


def test_waitlists_of_many_queues_are_visited_over_several_sweeps(site: ManyQueues) -> None:
    line = site.store.schema.waitlists
    values = {
        "tag": "mail",
        "concurrency_key": "",
        "place": 0,
        "due": site.store.tasks.now(),
        "task_id": 1,
        "version": 1,
    }
    with site.store.database.begin() as connection:
        connection.execute(insert(line), [{**values, "queue": queue} for queue in names(25)])
    found: set[str] = set()
    place = QueuePlace()
    for _ in range(3):
        queues, place = site.store.sweeps.next_queues(place, 10)
        assert len(queues) <= 10
        found |= queues
    assert found == set(names(25))
    assert place == QueuePlace(), "the next call begins again"
    assert site.store.sweeps.levels_of(["q000003", "none"], 1.0) == [Level("q000003", 0)]


def test_each_sweep_visits_some_of_thousands_of_waitlists(site: ManyQueues) -> None:
    line = site.store.schema.waitlists
    values = {
        "queue": "default",
        "concurrency_key": "",
        "place": 0,
        "due": site.store.tasks.now(),
        "task_id": 1,
        "version": 1,
    }
    with site.store.database.begin() as connection:
        connection.execute(
            insert(line), [{**values, "tag": tag} for tag in names(2 * WAITLISTS_PER_CALL + 50)]
        )
    waitlists, found = site.store.waitlist_names, list[str]()
    for _ in range(3):
        with site.counted() as seen:
            some = waitlists.in_queue("default")
        assert len(some) <= WAITLISTS_PER_CALL
        assert len(seen) <= WAITLISTS_PER_CALL + 1
        found += sorted(tag for _, tag in some)
    assert found == names(2 * WAITLISTS_PER_CALL + 50)
    assert min(waitlists.in_queue("default")) == ("default", "q000000"), (
        "and again from the beginning"
    )


def test_thousands_of_worker_rows_cause_a_bounded_number_of_messages(site: ManyQueues) -> None:
    site.rows("default")
    w = site.store.schema.workers
    values = {"queues": '["default"]', "pool": "prefork", "concurrency": 1}
    now = site.store.tasks.now()
    with site.store.database.begin() as connection:
        rows = [
            {"name": name, "seen_at": now, "started_at": now, **values}
            for name in names(MOST_MESSAGES_PER_QUEUE)
        ]
        connection.execute(insert(w), rows)
    site.sweep()
    [(_, _, messages)] = site.timer.requested_drains
    assert messages == MOST_MESSAGES_PER_QUEUE


def test_each_sweep_reports_some_of_many_lost_workers_in_one_line(
    site: ManyQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_workers, "EXPIRED_PER_SWEEP", 10)
    for name in names(15):
        site.serve(name, "default")
    w = site.store.schema.workers
    with site.store.database.begin() as connection:
        connection.execute(update(w).values(seen_at=site.store.tasks.now() - timedelta(seconds=60)))
    told = []
    for _ in range(3):
        site.sweep()
        told += [fields["count"] for fields in site.of("worker.lost")]
    assert told == [10, 5]


def test_a_sweep_with_near_rows_of_many_queues_ends_in_time(
    site: ManyQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each queue needs its own message.

    The next sweep continues where this one ended, without a gap.
    """
    site.rows(*names(1200), in_s=20)
    site.rows(*names(1200), in_s=25)
    ids = {row.id for row in site.store.tasks.find(Filter(), 10_000).tasks}
    now = iter(range(10**6))
    monkeypatch.setattr(sweeper_module, "monotonic", lambda: next(now) * 100.0)
    armed: list[int] = []
    for _ in range(4):
        before = len(site.timer.armed)
        site.sweep()
        armed.append(len(site.timer.armed) - before)
    assert armed[0] < len(ids)
    assert set(site.timer.ids) == ids
    assert armed[-1] == 0, "and each sweep came further"


def test_a_pause_sweep_over_many_queues_works_step_by_step(
    site: ManyQueues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_holding, "QUEUES_PER_CALL", 10)
    site.rows(*names(25), priority=2)
    site.rows("q000003", priority=7)
    rows, found, after = site.store.paused_rows, list[Level](), None
    with site.counted() as seen:
        some, after = rows.levels(Status.NOT_COMPLETE)
    assert len(seen) < EACH * 10
    assert some[0] == Level("q000003", 7), "the highest priority comes first"
    while True:
        found += some
        if after is None:
            break
        some, after = rows.levels(Status.NOT_COMPLETE, after)
    assert sorted(found) == sorted([Level(queue, 2) for queue in names(25)] + [Level("q000003", 7)])


def test_a_check_that_may_read_no_queue_executes_no_statement(site: ManyQueues) -> None:
    site.rows(*names(3))
    with site.counted() as seen:
        assert OverdueQueues(site.store.sweeps, 1.0).of_others((), most=0) == {}
    assert seen == []
