"""Notifications of tasks that are due soon, on databases that support them: the listeners
receive them at the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from delaytasks import DelayedTask, DelayTasks, NewTask
from delaytasks.core.clock import to_us
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Listener, Notices, Store
from delaytasks.timers.direct import LOOK, payloads_of, read_notice
from delaytasks.worker import table_poller as notify_listener
from delaytasks.worker.table_poller import NotifyListener
from tests.conftest import open_store
from tests.recording import delays_on
from tests.waiting import wait_until

NAMES = {"table_prefix": "n_", "timer": "direct", "arm": "inline"}


@pytest.fixture(scope="module", params=["postgresql_url", "psycopg_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def notice_store(url: str) -> Iterator[Store]:
    store = open_store(url, **NAMES)
    yield store
    store.close()


@pytest.fixture
def delays(notice_store: Store, url: str) -> Iterator[DelayTasks]:
    made = delays_on(url, **NAMES)
    yield made
    made.close()


@pytest.fixture
def listener(delays: DelayTasks) -> Iterator[Listener]:
    made = runtime_of(delays).store.notices.listen()
    assert made is not None
    yield made
    made.close()


def received(listener: Listener, delays: DelayTasks) -> list[Entry]:
    """Return all entries that the listener received so far."""
    runtime_of(delays).store.notices.send(["end"])
    payloads: list[str] = []
    wait_until(
        lambda: payloads.extend(listener.wait(1)) or payloads[-1:] == ["end"],
        10,
        "the end to be received",
    )
    return [entry for payload in payloads[:-1] for entry in read_notice(payload)]


def entry(task: DelayedTask) -> Entry:
    return Entry(task.id, task.version, to_us(task.expected_time), task.queue, task.priority)


def test_only_tasks_that_are_due_soon_cause_notices(delays: DelayTasks, listener: Listener) -> None:
    tasks = [
        delays.schedule_delay("mail", {}, delay, queue="q.1", priority=3) for delay in (0, 1, 60)
    ]
    assert received(listener, delays) == [entry(task) for task in tasks[:2]]
    moved = delays.reschedule(tasks[2], 0.5)
    assert received(listener, delays) == [entry(moved)]


def test_a_notice_is_sent_at_the_commit_of_the_transaction_that_wrote_the_task(
    delays: DelayTasks, listener: Listener
) -> None:
    engine = runtime_of(delays).store.database.tx
    with Session(engine) as session, engine.connect() as connection:
        one = delays.schedule_delay("mail", {}, 0, session=session)
        other = delays.schedule_delay("mail", {}, 0, session=connection)
        undone = delays.schedule_delay("mail", {}, 0, session=(third := Session(engine)))
        assert received(listener, delays) == []
        third.rollback()
        session.commit()
        assert received(listener, delays) == [entry(one)]
        connection.commit()
        assert received(listener, delays) == [entry(other)]
        assert delays.find(tag="mail").tasks.count(undone) == 0


def test_many_tasks_of_one_call_cause_a_few_notices_and_very_many_only_one(
    delays: DelayTasks, listener: Listener
) -> None:
    tasks: list[DelayedTask] = []
    delays.schedule_many(
        (NewTask("mail", None, delay=0) for _ in range(250)), on_batch=tasks.extend
    )
    assert sorted(received(listener, delays)) == sorted(entry(task) for task in tasks)
    delays.schedule_many(NewTask("mail", None, delay=0) for _ in range(2000))
    assert list(listener.wait(5)) == [LOOK]


def test_a_notice_of_the_longest_entries_fits() -> None:
    entries = [Entry(2**63 - 1 - n, 2**31, 10**17, "q" * 128, 9) for n in range(100)]
    [payload] = payloads_of(entries)
    assert len(payload.encode()) < 8000
    assert read_notice(payload) == entries


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "x",
        "{}",
        "[]",
        '["q"]',
        '["q", 1]',
        '["q q", []]',
        '["q", [[1, 2]]]',
        '["q", [[-1, 0, 0, 0]]]',
        "[" * 7000,
    ],
)
def test_invalid_notices_of_other_programs_are_refused(payload: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read_notice(payload)


def test_other_timers_send_no_notices(url: str, notice_store: Store, listener: Listener) -> None:
    other = delays_on(url, table_prefix="n_")
    try:
        producer = runtime_of(other).producer
        assert producer._notify is None
        assert runtime_of(other).direct_timer is None
    finally:
        other.close()


# -- listeners ------------------------------------------------------------------------------------


class RecordingListener:
    """A notify listener that records its calls."""

    def __init__(self, delays: DelayTasks) -> None:
        self.entries: list[Entry] = []
        self.looks = 0
        self.refused: list[Exception] = []
        self.event_names: list[str] = []
        events = Events()
        events.subscribe(lambda name, fields: self.event_names.append(name))
        self.listener = NotifyListener(
            runtime_of(delays).store.notices,
            events,
            self.entries.extend,
            self.look,
            self.refused.append,
        )
        self.listener.loop.start()

    def look(self) -> None:
        self.looks += 1


@pytest.fixture
def start_listener(
    delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], RecordingListener]]:
    short = {"NOTICE_WAIT_S": 0.1, "TEST_ANSWER_S": 1, "RECONNECT_REST_S": 0.1, "TEST_EVERY_S": 0.5}
    for name, seconds in short.items():
        monkeypatch.setattr(notify_listener, name, seconds)
    made: list[RecordingListener] = []

    def begin() -> RecordingListener:
        made.append(RecordingListener(delays))
        return made[-1]

    yield begin
    for recording in made:
        recording.listener.loop.stop()


def test_a_listener_receives_entries_read_requests_and_invalid_notices(
    delays: DelayTasks, start_listener: Callable[[], RecordingListener]
) -> None:
    recording = start_listener()
    wait_until(lambda: recording.listener.is_listening, 10, "it to listen")
    before = recording.looks
    task = delays.schedule_delay("mail", {}, 0)
    timer = runtime_of(delays).direct_timer
    assert timer is not None
    timer.request_poll()
    runtime_of(delays).store.notices.send(["garbage"])
    wait_until(lambda: recording.refused, 10, "all to be received")
    assert (recording.entries, recording.looks) == ([entry(task)], before + 1)


def test_a_listener_whose_connection_ends_reports_this_and_listens_again(
    delays: DelayTasks, start_listener: Callable[[], RecordingListener]
) -> None:
    recording = start_listener()
    wait_until(lambda: recording.listener.is_listening, 10, "it to listen")
    query = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = :listen "
        "AND datname = current_database()"
    )
    listen = {"listen": f'LISTEN "{runtime_of(delays).store.notices.channel}"'}
    with runtime_of(delays).store.database.auto.connect() as connection:
        assert connection.execute(text(query), listen).scalars().all() == [True]
    wait_until(
        lambda: "notices.down" in recording.event_names and recording.listener.is_listening,
        10,
        "it to listen again",
    )
    task = delays.schedule_delay("mail", {}, 0)
    wait_until(lambda: recording.entries == [entry(task)], 10, "the next notice")


@pytest.mark.slow
def test_a_listener_behind_a_pooler_that_drops_notices_knows_that_it_receives_none(
    delays: DelayTasks,
    start_listener: Callable[[], RecordingListener],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recording = start_listener()
    wait_until(lambda: recording.listener.is_listening, 10, "it to listen")
    send = Notices.send

    def elsewhere(notices: Notices, payloads: Any, on: Any = None) -> None:
        """Drop the notice, like a server connection other than the one that the listener waits
        on."""

    monkeypatch.setattr(Notices, "send", elsewhere)
    wait_until(lambda: "notices.down" in recording.event_names, 10, "it to notice")
    assert not recording.listener.is_listening
    monkeypatch.setattr(Notices, "send", send)
    wait_until(lambda: recording.listener.is_listening, 10, "it to listen again")


def test_a_database_without_notices_has_no_listener(sqlite_path: Callable[[str], str]) -> None:
    delays = delays_on(sqlite_path("quiet"), **NAMES)
    try:
        assert runtime_of(delays).store.notices.listen() is None
        assert RecordingListener(delays).listener._turn() is None
        runtime_of(delays).store.notices.send(["no listener"])
    finally:
        delays.close()


def test_first_due_between_returns_the_first_waiting_tasks(store: Store) -> None:
    """Each database returns the first of many waiting tasks."""
    delays = delays_on(
        store.database.url.render_as_string(hide_password=False), table_prefix="s_", timer="direct"
    )
    try:
        tasks = [delays.schedule_delay("mail", {}, delay) for delay in (3, 1, 2, 60)]
        delays.cancel(tasks[2])
        now = runtime_of(delays).clock.now()
        found = store.sweeps.first_due_between(now, now + timedelta(seconds=10), 10)
        assert found == [entry(tasks[1]), entry(tasks[0])]
        assert store.sweeps.first_due_between(now, now + timedelta(seconds=10), 1) == [
            entry(tasks[1])
        ]
    finally:
        delays.close()
