"""Rows that are written on a connection."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import create_engine

from delaytasks import DelayTask, NewTask
from delaytasks.core.errors import (
    OutcomeUnknownError,
    StoreUnavailableError,
)
from delaytasks.runtime import runtime_of
from delaytasks.storage import row_lists
from tests.conformance.transactions.shop import SessionCaller


def test_a_connections_row_is_seen_and_armed_with_its_commit(shop: SessionCaller) -> None:
    with shop.engine.connect() as connection:
        rolled_back = shop.schedule(connection)
        connection.rollback()
        task = shop.schedule(connection)
        assert (shop.seen(), shop.timer.ids) == (set(), [])
        connection.commit()
        connection.commit()
        shop.schedule(connection)  # the caller never commits this row
    assert (shop.seen(), shop.timer.ids) == ({task.id}, [task.id])
    assert rolled_back.id not in shop.seen()


def test_a_message_just_before_the_commit_is_sent_with_time_for_the_commit(
    shop: SessionCaller,
) -> None:
    with shop.engine.begin() as connection:
        task = shop.schedule(connection, delay=0)
        assert shop.timer.ids == []
    entry = shop.timer.armed[0]
    assert entry.id == task.id
    assert entry.due_us >= task.expected_time.timestamp() * 1e6 + 40_000


def test_a_savepoint_rolled_back_on_a_connection_leaves_no_row_and_arms_nothing(
    shop: SessionCaller,
) -> None:
    with shop.engine.connect() as connection:
        with connection.begin_nested() as early:  # set before delaytasks first used the connection
            shop.schedule(connection)
            early.rollback()
        before = shop.schedule(connection)
        with connection.begin_nested() as outer:
            shop.schedule(connection)
            with connection.begin_nested():
                shop.schedule(connection)
                shop.delays.schedule_many([("mail", {}, 5)], session=connection)
            outer.rollback()
        with connection.begin_nested():
            kept = shop.schedule(connection)
            with connection.begin_nested() as inner:
                shop.schedule(connection)
                inner.rollback()
        connection.commit()
    ids = [before.id, kept.id]
    assert (shop.seen(), shop.timer.ids) == (set(ids), ids)


def test_a_task_on_an_autocommit_connection_is_armed_immediately(
    shop: SessionCaller, database_url: str
) -> None:
    ids: list[int] = []
    plain = create_engine(database_url)
    engine = create_engine(database_url, isolation_level="AUTOCOMMIT")
    for connection in (
        plain.connect().execution_options(isolation_level="AUTOCOMMIT"),
        engine.connect(),
    ):
        with connection:
            ids.append(shop.schedule(connection).id)
            ids.append(shop.schedule(connection, key=f"k{len(ids)}").id)
            shop.delays.schedule_many(
                [("mail", {}, 5)],
                session=connection,
                on_batch=lambda batch: ids.append(batch[0].id),
            )
            assert (shop.seen(), shop.timer.ids) == (set(ids), ids)
            assert bool(shop.delays.cancel(ids[0], session=connection)) is (len(ids) == 3)
    plain.dispose()
    engine.dispose()


def test_if_an_id_is_taken_an_autocommit_batch_loses_and_duplicates_no_task(
    shop: SessionCaller, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Databases without COPY use several statements.
    monkeypatch.setattr(row_lists, "MAX_TEXT", 100_000)
    with shop.engine.begin() as connection:
        old = shop.schedule(connection)
    builder = runtime_of(shop.delays).producer._builder
    ids = [builder._make_id() for _ in range(249)]
    monkeypatch.setattr(builder, "_make_id", iter([*ids[:240], old.id, *ids[240:]]).__next__)
    told: list[DelayTask] = []
    engine = create_engine(database_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        many = (("mail", {"n": n}, 5) for n in range(250))
        assert shop.delays.schedule_many(many, session=connection, on_batch=told.extend) == 250
    engine.dispose()
    assert [task.body["n"] for task in told] == list(range(250))
    assert shop.seen() == {old.id, *(task.id for task in told)}
    assert len(shop.seen()) == 251


def test_a_batch_that_is_written_again_after_a_lost_answer_exists_once(
    shop: SessionCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One id was taken, so the builder made new ids."""
    with shop.engine.begin() as connection:
        old = shop.schedule(connection)
    tasks, builder = runtime_of(shop.delays).store.tasks, runtime_of(shop.delays).producer._builder
    ids, together = [builder._make_id() for _ in range(3)], tasks.together
    monkeypatch.setattr(builder, "_make_id", iter([ids[0], old.id, *ids[1:]]).__next__)
    monkeypatch.setattr(
        tasks, "together", lambda work, id: together(work, id) and together(work, id)
    )
    told: list[DelayTask] = []
    many = [*(NewTask("mail", n, 5) for n in range(3)), NewTask("mail", 3, 5, key="k")]
    assert shop.delays.schedule_many(many, on_batch=told.extend) == 4
    assert shop.seen() == {old.id, *(task.id for task in told)}
    assert sorted(task.body for task in told) == list(range(4))


def test_if_the_database_is_lost_after_an_id_was_taken_the_outcome_is_unknown(
    shop: SessionCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise StoreUnavailableError("the database is gone")

    for insert_in in ("insert", "insert_many"):
        monkeypatch.setattr(runtime_of(shop.delays).store.tasks, insert_in, lambda *_: False)
    monkeypatch.setattr(runtime_of(shop.delays).store.tasks, "get", gone)
    for schedule in (
        lambda: shop.delays.schedule_delay("mail", 1, 5),
        lambda: shop.delays.schedule_many([("mail", 1, 5)]),
    ):
        with pytest.raises(OutcomeUnknownError) as unknown:
            schedule()
        assert unknown.value.id is not None


def test_a_connection_that_the_pool_reuses_has_no_tasks_of_its_previous_user(
    shop: SessionCaller,
) -> None:
    for _ in range(3):
        with shop.engine.connect() as connection:
            shop.schedule(connection)
    with shop.engine.connect() as connection:
        shop.schedule(connection)
        connection.invalidate()
        connection.rollback()
    with shop.engine.begin() as connection:
        task = shop.schedule(connection)
    assert shop.timer.ids == [task.id]
