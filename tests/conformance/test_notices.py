"""Notices of tasks that are due soon, on databases that support them: the listeners receive them at
the commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from delaytasks import DelayedTask, DelayTasks, NewTask
from tests.conftest import open_store
from tests.waiting import wait_until
from tests.world.notices import ListeningWorker, Notified
from tests.world.recording import delays_on

NAMES = {"table_prefix": "n_", "timer": "direct", "arm": "inline"}


@pytest.fixture(scope="module", params=["postgresql_url", "psycopg_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    open_store(found, **NAMES).close()
    return found


@pytest.fixture
def delays(url: str) -> Iterator[DelayTasks]:
    with closing(delays_on(url, **NAMES)) as made:
        yield made


@pytest.fixture
def notified(delays: DelayTasks) -> Iterator[Notified]:
    with closing(Notified(delays)) as made:
        yield made


def schedule(delays: DelayTasks, delay: float = 0, **options: Any) -> DelayedTask:
    return delays.schedule_delay("mail", {}, delay, **options)


def test_only_tasks_that_are_due_soon_cause_notices(delays: DelayTasks, notified: Notified) -> None:
    tasks = [schedule(delays, delay, queue="q.1", priority=3) for delay in (0, 1, 60)]
    assert notified.count() == 2
    delays.reschedule(tasks[2], 0.5)
    assert notified.count() == 1


def test_a_notice_is_sent_at_the_commit(url: str, delays: DelayTasks, notified: Notified) -> None:
    engine = create_engine(url)
    with Session(engine) as session, engine.connect() as connection, Session(engine) as third:
        *_, undone = [schedule(delays, session=it) for it in (session, connection, third)]
        assert notified.count() == 0
        third.rollback()
        session.commit()
        assert notified.count() == 1
        connection.commit()
        assert notified.count() == 1
        assert undone not in delays.find(tag="mail").tasks
    engine.dispose()


def test_many_tasks_of_a_call_cause_one_notice(delays: DelayTasks, notified: Notified) -> None:
    delays.schedule_many(NewTask("mail", None, delay=0) for _ in range(2000))
    assert notified.count() == 1


def test_other_timers_send_no_notices(url: str, notified: Notified) -> None:
    with closing(delays_on(url, table_prefix="n_")) as other:
        schedule(other)
        assert notified.count() == 0


# -- listeners ------------------------------------------------------------------------------------


@pytest.fixture
def worker(delays: DelayTasks) -> Iterator[ListeningWorker]:
    with closing(ListeningWorker(delays)) as made:
        wait_until(lambda: made.is_listening, 10, "it to listen")
        yield made


def test_a_worker_reads_the_table_at_a_notice(delays: DelayTasks, worker: ListeningWorker) -> None:
    looks = worker.looks
    schedule(delays)
    wait_until(lambda: worker.looks > looks, 10, "the notice")


def test_a_listener_listens_again_after_a_loss(delays: DelayTasks, worker: ListeningWorker) -> None:
    worker.end_connection()
    wait_until(
        lambda: "notices.down" in worker.event_names and worker.is_listening, 10, "it to listen"
    )
    looks = worker.looks
    schedule(delays)
    wait_until(lambda: worker.looks > looks, 10, "the next notice")
