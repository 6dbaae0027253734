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


def schedule(delays: DelayTasks, delay: float = 0, **options: Any) -> DelayedTask:
    return delays.schedule_delay("mail", {}, delay, **options)


def test_calls_for_tasks_that_are_due_soon_cause_one_notice_each_at_the_commit(
    url: str, delays: DelayTasks
) -> None:
    engine = create_engine(url)
    with closing(Notified(delays)) as notified, closing(delays_on(url, table_prefix="n_")) as other:
        tasks = [schedule(delays, delay, queue="q.1", priority=3) for delay in (0, 1, 60)]
        assert notified.count() == 2
        delays.reschedule(tasks[2], 0.5)
        assert notified.count() == 1
        delays.schedule_many(NewTask("mail", None, delay=0) for _ in range(2000))
        assert notified.count() == 1
        with Session(engine) as session, engine.connect() as connection, Session(engine) as third:
            for place in (session, connection, third):
                schedule(delays, session=place)
            third.rollback()
            schedule(other)
            assert notified.count() == 0, "nothing is committed, and other timers send none"
            for place in (session, connection):
                place.commit()
                assert notified.count() == 1
    engine.dispose()


def test_a_worker_reads_the_table_at_a_notice_also_after_a_loss_of_its_connection(
    delays: DelayTasks,
) -> None:
    with closing(ListeningWorker(delays)) as worker:

        def hears() -> None:
            looks = worker.looks
            schedule(delays)
            wait_until(lambda: worker.looks > looks, 10, "the notice")

        wait_until(lambda: worker.is_listening, 10, "it to listen")
        hears()
        worker.end_connection()
        wait_until(lambda: "notices.down" in worker.event_names, 10, "the loss")
        wait_until(lambda: worker.is_listening, 10, "it to listen again")
        hears()
