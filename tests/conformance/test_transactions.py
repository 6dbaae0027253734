"""Tasks in callers' transactions, on every database."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, func, insert, select, text, update
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from delaytasks import DelayedTask, DelayTasks, NewTask, Status
from delaytasks.core.clock import to_us
from delaytasks.core.errors import (
    DuplicateTaskError,
    OutcomeUnknownError,
    SessionUnusableError,
    StoreUnavailableError,
    TaskNotFoundError,
)
from delaytasks.runtime import runtime_of
from delaytasks.storage import inserts, row_lists
from delaytasks.storage.sessions import _waiting, transaction_of
from delaytasks.storage.store import Store
from tests.conformance.store_rows import status_columns
from tests.recording import delays_on, record
from tests.world.broker import RecordingTimer


class SessionCaller:
    """A caller with its own engine and session on the same database."""

    def __init__(self, url: str, store: Store) -> None:
        self.delays: DelayTasks = delays_on(url, table_prefix="s_")
        self.timer: RecordingTimer = record(self.delays)
        self.engine = own_engine(url)
        self._store = store

    def session(self) -> Session:
        return Session(self.engine)

    def schedule(self, session: Any, delay: float = 5, **options: Any) -> DelayedTask:
        return self.delays.schedule_delay("mail", {"n": 1}, delay, session=session, **options)

    def seen(self) -> set[int]:
        """Return the ids that other transactions see."""
        with self._store.database.auto.connect() as connection:
            return set(connection.execute(select(self._store.schema.tasks.c.id)).scalars())

    def keys(self) -> int:
        with self._store.database.auto.connect() as connection:
            return connection.execute(
                select(func.count()).select_from(self._store.schema.keys)
            ).scalar_one()

    def set_status(self, task: DelayedTask, status: Status) -> None:
        t = self._store.schema.tasks
        with self._store.database.begin() as connection:
            connection.execute(update(t).where(t.c.id == task.id).values(status_columns(status)))

    @contextmanager
    def joined(self) -> Iterator[tuple[Connection, Session]]:
        """Yield a session that joins an outer transaction."""
        with self.engine.connect() as connection:
            outer = connection.begin()
            yield connection, Session(connection, join_transaction_mode="create_savepoint")
            if outer.is_active:
                outer.rollback()


def own_engine(url: str, **options: Any) -> Engine:
    engine = create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        # SQLAlchemy's documentation recommends this for savepoints with SQLite.
        event.listen(
            engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None)
        )
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


@pytest.fixture
def shop(store: Store, database_url: str) -> Iterator[SessionCaller]:
    made = SessionCaller(database_url, store)
    yield made
    made.delays.close()
    made.engine.dispose()
    assert not _waiting, "a connection's tasks are remembered beyond its end"


# Keys and moves in the caller's transaction


def test_a_key_that_is_taken_leaves_the_callers_transaction_usable(shop: SessionCaller) -> None:
    held = shop.delays.schedule_delay("mail", {}, 3600, key="k")
    with shop.session() as session:
        before = shop.schedule(session)
        with pytest.raises(DuplicateTaskError) as caught:
            shop.schedule(session, key="k")
        assert caught.value.id == held.id
        kept = shop.schedule(session, key="k", on_conflict="keep")
        assert kept.id == held.id
        after = shop.schedule(session)
        session.commit()
    assert shop.seen() == {held.id, before.id, after.id}
    assert shop.timer.ids == [before.id, after.id]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_replacing_belongs_to_the_callers_transaction(shop: SessionCaller, ending: str) -> None:
    held = shop.delays.schedule_delay("mail", {"old": 1}, 3600, key="k")
    with shop.session() as session:
        replaced = shop.schedule(session, key="k", on_conflict="replace")
        assert (replaced.id, replaced.version) == (held.id, 1)
        assert shop.delays.get(held).body == {"old": 1}
        getattr(session, ending)()
    now = shop.delays.get(tag="mail", key="k")
    assert now.body == ({"n": 1} if ending == "commit" else {"old": 1})
    assert [(entry.id, entry.version) for entry in shop.timer.armed] == (
        [(held.id, 1)] if ending == "commit" else []
    )


def test_an_id_that_exists_leaves_no_key_behind(shop: SessionCaller) -> None:
    plain = shop.delays.schedule_delay("mail", {"old": 1}, 3600, id=4711)
    with shop.session() as session:
        again = shop.schedule(session, key="k", id=4711)
        assert (again.id, again.body) == (plain.id, {"old": 1})
        session.commit()
    assert shop.keys() == 0
    with pytest.raises(TaskNotFoundError):
        shop.delays.get(tag="mail", key="k")


def test_two_callers_with_one_key_wait_for_each_other(shop: SessionCaller) -> None:
    if shop.engine.dialect.name == "sqlite":
        pytest.skip("SQLite lets one writer in at a time")
    with shop.session() as first, ThreadPoolExecutor(1) as pool:
        task = shop.schedule(first, key="k")
        second = pool.submit(shop.delays.schedule_delay, "mail", {}, 5, key="k", on_conflict="keep")
        assert not second.done()
        first.commit()
        assert second.result(10).id == task.id


# -- moves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_moves_belong_to_the_callers_transaction(shop: SessionCaller, ending: str) -> None:
    d, is_kept = shop.delays, ending == "commit"
    cancelled, moved, touched, failed, listed = (
        d.schedule_delay("mail", {}, 100, key=f"k{n}") for n in range(5)
    )
    shop.set_status(failed, Status.FAILED)
    with shop.session() as session:
        assert d.cancel(tag="mail", key="k0", session=session)
        assert d.reschedule(moved, 5, session=session).version == 1
        assert d.touch(touched, 500, session=session)
        assert d.touch(tag="mail", key=["k0", "k4", "new"], delay=500, session=session).gone == [
            "k0",
            "new",
        ]
        assert d.rerun(failed, 5, session=session).status is Status.NOT_COMPLETE
        assert d.get(cancelled, session=session).status is Status.CANCELLED
        assert [one.id for one in d.find(status="CANCELLED", session=session)] == [cancelled.id]
        if shop.engine.dialect.name != "sqlite":
            assert d.get(cancelled).status is Status.NOT_COMPLETE
        assert shop.timer.ids == []
        getattr(session, ending)()
    assert (d.get(cancelled).status is Status.CANCELLED) is is_kept
    assert (d.get(moved).expected_time < moved.expected_time) is is_kept
    assert (d.get(touched).expected_time > touched.expected_time) is is_kept
    assert (d.get(listed).expected_time > listed.expected_time) is is_kept
    assert (d.get(failed).status is Status.NOT_COMPLETE) is is_kept
    assert shop.timer.ids == ([moved.id, failed.id] if is_kept else [])


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_the_old_entry_of_a_moved_task_is_disarmed_after_the_commit(
    shop: SessionCaller, ending: str
) -> None:
    d = shop.delays
    cancelled, moved, replaced = (
        d.schedule_delay("mail", {}, 5, key=f"k{n}", priority=n) for n in range(3)
    )
    with shop.session() as session:
        d.cancel(cancelled, session=session)
        d.reschedule(moved, 3600, session=session)
        shop.schedule(session, key="k2", on_conflict="replace", priority=2)
        shop.schedule(session)
        assert shop.timer.disarmed == []
        getattr(session, ending)()
    old = [(task.id, 0, task.queue, task.priority) for task in (cancelled, moved, replaced)]
    disarmed = [
        (entry.id, entry.version, entry.queue, entry.priority) for entry in shop.timer.disarmed
    ]
    assert disarmed == (old if ending == "commit" else [])


def test_just_before_a_commit_that_may_fail_nothing_is_disarmed(shop: SessionCaller) -> None:
    cancelled, moved = (shop.delays.schedule_delay("mail", {}, 5) for _ in range(2))
    with shop.engine.begin() as connection:
        shop.delays.cancel(cancelled, session=connection)
        shop.delays.reschedule(moved, 3600, session=connection)
    assert shop.timer.disarmed == []


def test_a_task_is_scheduled_and_cancelled_in_one_transaction(shop: SessionCaller) -> None:
    with shop.session() as session:
        task = shop.schedule(session, key="k")
        shop.delays.reschedule(task, 1, session=session)
        shop.delays.cancel(tag="mail", key="k", session=session)
        session.commit()
    assert shop.delays.get(task).status is Status.CANCELLED
    assert shop.keys() == 0


# Rows that are written on a connection


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
    told: list[DelayedTask] = []
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
    told: list[DelayedTask] = []
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


# Rows that are written in a session, or in an asynchronous one


def test_a_row_is_seen_and_armed_after_the_commit_and_its_id_known_before(
    shop: SessionCaller,
) -> None:
    with shop.session() as session:
        task = shop.schedule(session)
        many: list[DelayedTask] = []
        shop.delays.schedule_many(
            [("mail", n, 5) for n in range(3)], session=session, on_batch=many.extend
        )
        assert task.id
        assert shop.delays.get(task, session=session).body == {"n": 1}
        assert (shop.seen(), shop.timer.ids) == (set(), [])
        session.commit()
        ids = [task.id, *(one.id for one in many)]
        assert (shop.seen(), shop.timer.ids) == (set(ids), ids)


def test_a_session_can_be_used_for_the_next_transaction(shop: SessionCaller) -> None:
    with shop.session() as session:
        first = shop.schedule(session)
        session.rollback()
        second = shop.schedule(session)
        session.commit()
        third = shop.schedule(session)
        session.commit()
        session.commit()
    assert shop.seen() == {second.id, third.id}
    assert shop.timer.ids == [second.id, third.id]
    assert first.id not in shop.seen()


def test_a_scoped_session_is_taken_for_the_session_it_stands_for(shop: SessionCaller) -> None:
    scope = scoped_session(sessionmaker(shop.engine))
    rolled_back = shop.schedule(scope)
    scope.rollback()
    task = shop.schedule(scope)
    scope.commit()
    scope.remove()
    assert (shop.seen(), shop.timer.ids) == ({task.id}, [task.id])
    assert rolled_back.id != task.id


def end_by_rollback(session: Session) -> None:
    session.rollback()


def end_by_close(session: Session) -> None:
    session.close()


def end_by_reset(session: Session) -> None:
    session.reset()


def end_by_invalidation(session: Session) -> None:
    session.invalidate()


def end_by_losing_the_connection(session: Session) -> None:
    session.connection().invalidate()
    session.rollback()


ENDS = [
    end_by_rollback,
    end_by_close,
    end_by_reset,
    end_by_invalidation,
    end_by_losing_the_connection,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_without_a_commit_there_is_no_row_and_nothing_is_armed(
    shop: SessionCaller, end: Callable[[Session], None]
) -> None:
    session = shop.session()
    shop.schedule(session)
    shop.schedule(session, key="k")
    shop.delays.schedule_many([("mail", {}, 5), NewTask("mail", {}, 5, key="l")], session=session)
    end(session)
    session.commit()
    session.close()
    assert (shop.seen(), shop.keys(), shop.timer.ids) == (set(), 0, [])


def test_a_savepoint_rolled_back_in_a_session_leaves_no_row_and_arms_nothing(
    shop: SessionCaller,
) -> None:
    with shop.session() as session:
        before = shop.schedule(session)
        with suppress(ZeroDivisionError), session.begin_nested():
            shop.schedule(session)
            raise ZeroDivisionError
        with session.begin_nested():
            kept = shop.schedule(session, delay=0)
        nested = session.begin_nested()
        shop.schedule(session)
        nested.rollback()
        after = shop.schedule(session)
        assert shop.timer.ids == [], "the end of a savepoint is not the commit"
        session.commit()
    ids = [before.id, kept.id, after.id]
    assert (shop.seen(), shop.timer.ids) == (set(ids), ids)
    assert shop.timer.armed[1].due_us == to_us(kept.expected_time), (
        "a session tells of the commit after it"
    )


def test_rolling_back_an_outer_savepoint_includes_the_inner_ones(shop: SessionCaller) -> None:
    with shop.session() as session:
        with session.begin_nested() as outer:
            shop.schedule(session)
            with session.begin_nested():
                shop.schedule(session, key="k")
                with session.begin_nested():
                    shop.delays.schedule_many([("mail", {}, 5)], session=session)
            outer.rollback()
        kept = shop.schedule(session, key="k")
        session.commit()
    assert (shop.seen(), shop.timer.ids, shop.keys()) == ({kept.id}, [kept.id], 1)


def test_rolling_back_an_inner_savepoint_undoes_only_its_own_tasks(shop: SessionCaller) -> None:
    with shop.session() as session:
        with session.begin_nested():
            outer = shop.schedule(session)
            inner = session.begin_nested()
            shop.schedule(session)
            inner.rollback()
        session.commit()
    assert (shop.seen(), shop.timer.ids) == ({outer.id}, [outer.id])


def test_a_session_joined_to_an_outer_transaction_arms_after_the_outer_commit(
    shop: SessionCaller,
) -> None:
    with shop.joined() as (connection, session):
        shop.schedule(session)
        session.commit()
        assert shop.timer.ids == []
        connection.get_transaction().rollback()  # type: ignore[union-attr]
    assert (shop.seen(), shop.timer.ids) == (set(), [])

    with shop.joined() as (connection, session):
        task = shop.schedule(session)
        session.commit()
        shop.schedule(session)
        session.rollback()
        connection.commit()
    assert (shop.seen(), shop.timer.ids) == ({task.id}, [task.id])


def test_two_interleaved_sessions_keep_their_tasks_separate(shop: SessionCaller) -> None:
    one, other = shop.session(), shop.session()
    first = shop.schedule(one)
    if shop.engine.dialect.name != "sqlite":  # SQLite has one writer at a time
        shop.schedule(other)
    other.rollback()
    one.commit()
    second = shop.schedule(other)
    one.rollback()
    other.commit()
    assert shop.timer.ids == [first.id, second.id]
    one.close()
    other.close()


def test_far_tasks_are_not_armed_at_the_commit(shop: SessionCaller) -> None:
    with shop.session() as session:
        shop.schedule(session, delay=3600)
        session.commit()
    assert shop.timer.ids == []


@pytest.mark.slow
@pytest.mark.parametrize("on", ["session", "connection"])
def test_many_far_tasks_are_not_held_in_memory_until_the_commit(
    shop: SessionCaller, on: str
) -> None:
    with shop.session() if on == "session" else shop.engine.connect() as caller:
        assert (
            shop.delays.schedule_many((("far", n, 86_400) for n in range(20)), session=caller) == 20
        )
        gc.collect()
        assert not [it for it in gc.get_objects() if type(it) is DelayedTask and it.tag == "far"]
        caller.commit()
    assert len(shop.seen()) == 20


def test_a_task_that_comes_within_the_horizon_before_the_commit_is_armed_at_it(
    shop: SessionCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop.session() as session:
        task = shop.schedule(session, delay=600)
        clock = runtime_of(shop.delays).clock
        later_us = clock.now_us() + 590_000_000
        monkeypatch.setattr(clock, "now_us", lambda: later_us)
        session.commit()
    assert shop.timer.ids == [task.id]


# -- asyncio -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_async_session_is_given_as_its_sync_session(store: Store, database_url: str) -> None:
    if not database_url.startswith("sqlite"):
        pytest.skip("the async driver in the test extra is SQLite's")
    aio = pytest.importorskip("sqlalchemy.ext.asyncio")
    delays = delays_on(database_url, table_prefix="s_")
    timer = record(delays)

    def schedule(session: Any) -> DelayedTask:
        return delays.schedule_delay("mail", {}, 5, session=session)

    async def go() -> tuple[DelayedTask, DelayedTask, DelayedTask]:
        engine = aio.create_async_engine(database_url.replace("sqlite:", "sqlite+aiosqlite:"))
        async with aio.AsyncSession(engine) as session:
            await session.run_sync(schedule)
            await session.rollback()
            first = await session.run_sync(schedule)
            second = await session.run_sync(lambda _: schedule(session))  # the AsyncSession itself
            await session.run_sync(lambda s: delays.schedule_many([("mail", {}, 5)], session=s))
            assert timer.ids == []
            await session.commit()
            # Outside of run_sync no driver can wait, and the error message explains this.
            for given in (session, session.sync_session):
                with pytest.raises(SessionUnusableError, match=r"await delays\.aschedule_delay\("):
                    schedule(given)
            gc.collect()  # unawaited coroutines cause warnings here
            await session.rollback()
        async with engine.connect() as connection:
            third = await connection.run_sync(schedule)
            await connection.run_sync(lambda _: schedule(connection))
            await connection.commit()
            with pytest.raises(SessionUnusableError, match=r"await delays\.aschedule_delay"):
                schedule(connection)
        await engine.dispose()
        return first, second, third

    first, second, third = asyncio.run(go())
    assert timer.ids[:2] == [first.id, second.id]
    assert timer.ids[3] == third.id
    assert len(timer.ids) == 5
    assert len(delays.find()) == 5
    delays.close()


# Transactions that cannot be used, and drivers with other defaults


def every_call(
    shop: SessionCaller, task: DelayedTask, failed: DelayedTask, session: Any
) -> list[Callable[[], Any]]:
    d = shop.delays
    return [
        lambda: shop.schedule(session),
        lambda: shop.schedule(session, key="new"),
        lambda: d.schedule_many([("mail", {}, 5)], session=session),
        lambda: d.cancel(task, session=session),
        lambda: d.reschedule(task, 5, session=session),
        lambda: d.touch(task, 500, session=session),
        lambda: d.touch([task], 500, session=session),
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

    def move(first: DelayedTask, second: DelayedTask) -> str:
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
