"""Transactions that cannot be used, and drivers with other defaults."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, insert, text
from sqlalchemy.orm import Session

from delaytasks import DelayTask, NewTask, Status
from delaytasks.core.errors import (
    DuplicateTaskError,
    SessionUnusableError,
)
from delaytasks.runtime import runtime_of
from delaytasks.storage import inserts
from delaytasks.storage.sessions import transaction_of
from delaytasks.storage.store import Store
from tests.conformance.transactions.shop import SessionCaller, own_engine
from tests.recording import delays_on, record


def every_call(
    shop: SessionCaller, task: DelayTask, failed: DelayTask, session: Any
) -> list[Callable[[], Any]]:
    d = shop.delays
    return [
        lambda: shop.schedule(session),
        lambda: shop.schedule(session, key="new"),
        lambda: d.schedule_many([("mail", {}, 5)], session=session),
        lambda: d.cancel(task, session=session),
        lambda: d.reschedule(task, 5, session=session),
        lambda: d.touch(task, 500, session=session),
        lambda: d.touch_many([task], 500, session=session),
        lambda: d.rerun(failed, session=session),
    ]


def test_a_transaction_that_failed_is_refused_and_nothing_sent(shop: SessionCaller) -> None:
    if shop.engine.dialect.name != "postgresql":
        pytest.skip("elsewhere a failed statement does not end its transaction")
    task, failed = (shop.delays.schedule_delay("mail", {}, 100) for _ in range(2))
    shop.set_status(failed, Status.FAILED)
    with shop.session() as session, shop.engine.connect() as connection:
        for place in (session, connection):
            place.execute(text("SELECT 1"))
            with pytest.raises(Exception, match="division by zero"):
                place.execute(text("SELECT 1 / 0"))
            for call in every_call(shop, task, failed, place):
                with pytest.raises(SessionUnusableError, match="aborted"):
                    call()
            place.rollback()
            assert shop.schedule(place).id  # the session is usable again after the rollback
            place.rollback()
    assert (shop.seen(), shop.timer.ids) == ({task.id, failed.id}, [])


READ_ONLY = {
    "postgresql": "SET TRANSACTION READ ONLY",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
    "sqlite": "PRAGMA query_only = on",
}


def test_a_read_only_transaction_is_refused_and_nothing_sent(
    shop: SessionCaller, database_url: str
) -> None:
    task, failed = (shop.delays.schedule_delay("mail", {}, 100) for _ in range(2))
    shop.set_status(failed, Status.FAILED)
    engine = own_engine(database_url)  # the connections of this engine stay read-only
    for number in range(7):
        with Session(engine) as session:
            session.execute(text(READ_ONLY[engine.dialect.name]))
            if engine.dialect.name == "mysql":
                session.commit()  # the setting applies from the next transaction
            with pytest.raises(SessionUnusableError):
                every_call(shop, task, failed, session)[number]()
            session.rollback()
            session.commit()
    engine.dispose()
    assert (shop.seen(), shop.timer.ids) == ({task.id, failed.id}, [])


def test_a_deadlock_in_the_callers_transaction_is_raised_and_not_retried(
    shop: SessionCaller,
) -> None:
    if shop.engine.dialect.name == "sqlite":
        pytest.skip("SQLite lets one writer in at a time")
    one, other = (shop.delays.schedule_delay("mail", {}, 100) for _ in range(2))
    statements: list[str] = []
    meet = threading.Barrier(2, timeout=10)

    def move(first: DelayTask, second: DelayTask) -> str:
        with shop.session() as session:
            scheduled = shop.schedule(session)
            shop.delays.reschedule(first, 5, session=session)
            meet.wait()
            session.info["seen"] = statements
            try:
                shop.delays.reschedule(second, 5, session=session)
            except SessionUnusableError as error:
                session.rollback()
                return f"refused {scheduled.id} {error}"
            session.commit()
            return f"done {scheduled.id}"

    count_moves(shop.engine, statements)
    with ThreadPoolExecutor(2) as pool:
        answers = sorted(
            future.result(20)
            for future in (pool.submit(move, one, other), pool.submit(move, other, one))
        )
    assert [answer.split()[0] for answer in answers] == ["done", "refused"]
    assert "eadlock" in answers[1]
    assert int(answers[0].split()[1]) in shop.seen()
    assert int(answers[1].split()[1]) not in shop.seen() | set(shop.timer.ids)
    assert len(shop.timer.ids) == 3
    # Each call reads and locks two rows once: four reads, although one call ended in the deadlock.
    assert len(statements) == 4


def count_moves(engine: Engine, statements: list[str]) -> None:
    @event.listens_for(engine, "before_cursor_execute")
    def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FOR UPDATE" in statement:
            statements.append(statement)


def test_a_session_bound_to_another_database_is_refused(shop: SessionCaller) -> None:
    elsewhere = create_engine("sqlite://")
    with Session(elsewhere) as session:
        for call in (
            lambda: shop.schedule(session),
            lambda: shop.delays.schedule_many([("mail", {}, 5)], session=session),
        ):
            with pytest.raises(SessionUnusableError):
                call()
            session.rollback()
    elsewhere.dispose()
    assert shop.timer.ids == []


def test_missing_tables_are_named_with_the_remedy(database_url: str) -> None:
    delays, engine = delays_on(database_url, table_prefix="gone_"), create_engine(database_url)
    with Session(engine) as session:
        remedy = "nothing was sent; to make the tables, run: delaytasks -A APP db upgrade"
        with pytest.raises(SessionUnusableError, match=remedy):
            delays.schedule_delay("mail", {}, 5, session=session)
    engine.dispose()
    delays.close()


def test_errors_about_the_callers_transaction_do_not_show_its_data(shop: SessionCaller) -> None:
    canary = "s3cr3t-canary"
    store = runtime_of(shop.delays).store
    t = store.schema.tasks
    with shop.session() as session:
        transaction = transaction_of(session, store.database.remedy_at)
        with pytest.raises(SessionUnusableError) as caught, transaction.guard():
            session.execute(insert(t).values(id=1, tag=None, message_body=canary))
        session.rollback()
    assert canary not in str(caught.value)


# -- SQLite with the driver's defaults -----------------------------------------------------------


@pytest.mark.parametrize("what", ["one", "keyed", "many"])
def test_a_rollback_undoes_everything_on_sqlite_with_default_driver_settings(
    store: Store, database_url: str, what: str
) -> None:
    """Python's driver begins a transaction at the first INSERT, so an earlier savepoint would
    commit."""
    delays = delays_on(database_url, table_prefix="s_")
    timer = record(delays)
    engine = create_engine(database_url)
    with Session(engine) as session:
        if what == "many":
            delays.schedule_many(
                [("mail", {}, 5), NewTask("mail", {}, 5, key="k")], session=session
            )
        else:
            delays.schedule_delay(
                "mail", {}, 5, key="k" if what == "keyed" else None, session=session
            )
        session.rollback()
    assert len(delays.find()) == 0
    assert timer.ids == []
    with Session(engine) as session:
        delays.schedule_many([("mail", {}, 5)], session=session)
        session.commit()
    assert len(delays.find()) == len(timer.ids) == 1
    engine.dispose()
    delays.close()


def test_a_retry_that_is_refused_leaves_nothing_in_the_callers_transaction(
    shop: SessionCaller,
) -> None:
    was = shop.delays.schedule_delay("mail", None, 60, key="order-1")
    shop.delays.cancel(was)
    now = shop.delays.schedule_delay("mail", None, 60, key="order-1")
    with shop.session() as session:
        with pytest.raises(DuplicateTaskError) as caught:
            shop.delays.rerun(was.id, session=session)
        session.commit()
    assert caught.value.id == now.id
    assert shop.delays.get(was.id).status is Status.CANCELLED
    assert shop.delays.get(tag="mail", key="order-1").id == now.id


# -- the caller's drivers ------------------------------------------------------------------------


def test_a_key_is_taken_once_though_the_driver_counts_no_inserts(
    shop: SessionCaller, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLAlchemy with psycopg 3 or asyncpg reads the row count of an INSERT only on request.

    Other drivers are made to behave in this way.
    """
    monkeypatch.setattr(inserts, "_is_psycopg2", lambda on: False)

    def counted(self: Any) -> int:
        is_read = not self.isinsert or self.execution_options.get("preserve_rowcount")
        return int(self.cursor.rowcount) if is_read else -1

    dialect: Any = shop.engine.dialect
    context = type("Context", (dialect.execution_ctx_cls,), {"rowcount": property(counted)})
    if dialect.driver != "psycopg":
        monkeypatch.setattr(dialect, "execution_ctx_cls", context)
    with shop.session() as session:
        task = shop.schedule(session, key="k")
        with pytest.raises(DuplicateTaskError):
            shop.schedule(session, key="k")
        assert shop.schedule(session, key="k", on_conflict="keep").id == task.id
        session.commit()
    assert shop.seen() == {task.id}
