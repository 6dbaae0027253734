"""Tasks in callers' transactions, on every database."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import delaytasks as e
from delaytasks import DelayedTask, DelayTasks, NewTask, Status
from tests.world import MonkeyPatch, World
from tests.world.recording import delays_on, engine_at, run


def own_engine(url: Any, **options: Any) -> Engine:
    engine = create_engine(url, **options)
    if engine.dialect.name == "sqlite":
        # SQLAlchemy's documentation recommends this for savepoints with SQLite.
        event.listen(engine, "connect", lambda link, _: setattr(link, "isolation_level", None))
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return engine


class Caller:
    """A caller with its own engine on the database of a world."""

    def __init__(self, world: World) -> None:
        self.world, self.delays, self.timer = world, world.delays, world.broker
        self.engine = own_engine(world.url)

    def session(self) -> Session:
        return Session(self.engine)

    def schedule(self, session: Any, delay: float = 5, **options: Any) -> DelayedTask:
        return self.world.schedule(body={"n": 1}, delay=delay, session=session, **options)

    def seen(self) -> set[int]:
        """Return the ids that other transactions see."""
        return {row.id for row in self.world.rows(select(self.world.table().c.id))}

    def keys(self) -> int:
        return len(self.world.rows(select(self.world.table("keys"))))

    def has(self, *tasks: DelayedTask) -> bool:
        """Whether other transactions see these tasks alone, and only these were armed, in order."""
        ids = [task.id for task in tasks]
        return (self.seen(), self.timer.ids) == ({*ids}, ids)

    @contextmanager
    def joined(self) -> Iterator[tuple[Connection, Session]]:
        """Yield a session that joins an outer transaction."""
        with self.engine.connect() as connection:
            outer = connection.begin()
            yield connection, Session(connection, join_transaction_mode="create_savepoint")
            if outer.is_active:
                outer.rollback()


@pytest.fixture
def shop(world: World) -> Iterator[Caller]:
    made = Caller(world)
    yield made
    made.engine.dispose()
    assert not world.open_transactions(), "a connection's tasks are remembered beyond its end"


PLACES: dict[str, Callable[[Engine], Any]] = {
    "session": Session,
    "connection": Engine.connect,
    "scoped session": lambda engine: scoped_session(sessionmaker(engine)),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, shop: Caller) -> Iterator[Any]:
    """A session or a connection, whose transaction the caller begins and ends."""
    made = PLACES[request.param](shop.engine)
    yield made
    made.close()


# -- commit and rollback --------------------------------------------------------------------------


def test_a_row_is_seen_and_armed_after_the_commit_its_id_before(shop: Caller, place: Any) -> None:
    many: list[DelayedTask] = []
    rolled_back = shop.schedule(place)
    place.rollback()
    first, far = shop.schedule(place), shop.schedule(place, delay=3600)
    shop.delays.schedule_many([("mail", 0, 5)] * 3, session=place, on_batch=many.extend)
    assert shop.delays.get(first, session=place).body == {"n": 1}
    assert shop.has(), "nothing is seen or armed yet"
    place.commit()
    ids = [first.id, *(task.id for task in many)]
    assert (shop.seen(), shop.timer.ids) == ({far.id, *ids}, ids), "distant tasks are not armed"
    place.commit()
    second = shop.schedule(place)
    place.commit()
    shop.schedule(place)  # the caller never commits this row
    place.rollback()
    assert shop.timer.ids == [*ids, second.id]
    assert rolled_back.id not in shop.seen()


def test_an_error_of_the_timer_reaches_no_caller(
    shop: Caller, place: Any, monkeypatch: MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rows are committed: a caller that repeats the call would make another task."""
    error = RuntimeError("cannot notify on un-acquired lock")
    monkeypatch.setattr(shop.timer, "arm", mock.Mock(side_effect=error))
    for session, commit in ((None, lambda: None), (place, place.commit)):
        task = shop.schedule(session)
        shop.delays.schedule_many([("mail", 0, 5)], session=session)
        commit()
        shop.delays.reschedule(task, 3, session=session)
        commit()
        shop.delays.cancel(task, session=session)
        commit()
        assert shop.delays.get(task).status is Status.CANCELLED
    assert "the sweep will find them" in caplog.text
    assert "un-acquired lock" in caplog.text


def test_savepoints_rolled_back_leave_no_row_and_arm_nothing(shop: Caller, place: Any) -> None:
    with place.begin_nested() as early:  # set before delaytasks first used the connection
        shop.schedule(place)
        early.rollback()
    before = shop.schedule(place)
    with place.begin_nested() as outer:
        shop.schedule(place)
        with place.begin_nested():
            shop.schedule(place, key="k")
            with place.begin_nested():
                shop.delays.schedule_many([("mail", {}, 5)], session=place)
        outer.rollback()
    with place.begin_nested():
        kept = shop.schedule(place, delay=0, key="k")
        with place.begin_nested() as inner:
            shop.schedule(place)
            inner.rollback()
    after = shop.schedule(place)
    assert shop.timer.ids == [], "the end of a savepoint is not the commit"
    place.commit()
    assert shop.has(before, kept, after)
    assert shop.keys() == 1


def test_a_message_just_before_the_commit_is_sent_with_time_for_the_commit(shop: Caller) -> None:
    for place, is_after in ((shop.session(), True), (shop.engine.connect(), False)):
        with place, place.begin():
            task = shop.schedule(place, delay=0)
            moved = shop.schedule(place)
            shop.delays.cancel(moved, session=place)
        entry = next(entry for entry in shop.timer.armed if entry.id == task.id)
        ahead_s = entry.due_us / 1e6 - task.expected_time.timestamp()
        assert abs(ahead_s) < 1e-6 if is_after else ahead_s >= 0.04


ENDS: dict[str, Callable[[Session], object]] = {
    "rollback": Session.rollback,
    "close": Session.close,
    "reset": lambda session: session.reset(),
    "invalidate": Session.invalidate,
    "lost connection": lambda session: (session.connection().invalidate(), session.rollback()),
}


@pytest.mark.parametrize("end", ENDS)
def test_without_a_commit_there_is_no_row_and_nothing_is_armed(shop: Caller, end: str) -> None:
    with shop.session() as session:
        shop.schedule(session)
        many = [("mail", {}, 5), NewTask("mail", {}, 5, key="l")]
        shop.delays.schedule_many(many, session=session)
        ENDS[end](session)
        session.commit()
    assert shop.has()
    assert shop.keys() == 0
    for leave in (Connection.close, Connection.invalidate):
        with shop.engine.connect() as connection:  # which the pool reuses
            shop.schedule(connection)
            leave(connection)
    with shop.engine.begin() as connection:
        task = shop.schedule(connection)
    assert shop.has(task)


def test_a_session_joined_to_an_outer_transaction_arms_after_the_outer_commit(shop: Caller) -> None:
    with shop.joined() as (_, session):
        shop.schedule(session)
        session.commit()
        assert shop.timer.ids == []
    assert shop.has()
    with shop.joined() as (connection, session):
        task = shop.schedule(session)
        session.commit()
        shop.schedule(session)
        session.rollback()
        connection.commit()
    assert shop.has(task)


# -- keys -----------------------------------------------------------------------------------------


def test_a_taken_key_leaves_the_callers_transaction_usable(shop: Caller, place: Any) -> None:
    was = shop.world.schedule(delay=3600, key="k")
    shop.delays.cancel(was)
    owner = shop.world.read(shop.world.schedule(delay=3600, key="k"))
    before = shop.schedule(place)
    rerun = partial(shop.delays.rerun, was.id, session=place)
    for call in (partial(shop.schedule, place, key="k"), rerun):
        with pytest.raises(e.DuplicateTaskError) as caught:
            call()
        assert caught.value.id == owner.id
    assert shop.schedule(place, key="k", on_conflict="keep").id == owner.id
    assert shop.schedule(place, key="k", on_conflict="replace").id == owner.id
    assert shop.world.read(owner) == owner, "replacing belongs to the transaction, too"
    place.commit()
    assert shop.seen() == {was.id, owner.id, before.id}
    assert shop.timer.ids == [before.id, owner.id]
    assert shop.world.read(was).status is Status.CANCELLED
    assert shop.delays.get(tag="note", key="k").version == 1


# -- autocommit, and ids that are taken -----------------------------------------------------------


def test_a_task_on_an_autocommit_connection_is_armed_immediately(shop: Caller) -> None:
    ids: list[int] = []
    url = shop.world.url
    plain, engine = create_engine(url), create_engine(url, isolation_level="AUTOCOMMIT")
    set_later = plain.connect().execution_options(isolation_level="AUTOCOMMIT")
    for connection in (set_later, engine.connect()):
        with connection:
            ids.append(shop.schedule(connection).id)
            ids.append(shop.schedule(connection, key=f"k{len(ids)}").id)
            assert (shop.seen(), shop.timer.ids) == (set(ids), ids)
            assert bool(shop.delays.cancel(ids[0], session=connection)) is (len(ids) == 2)
    plain.dispose()
    engine.dispose()


def test_a_call_with_an_id_that_exists_leaves_no_key_behind(shop: Caller) -> None:
    plain = shop.world.schedule(body="old", delay=3600, id=4711)
    with shop.session() as session, session.begin():
        again = shop.schedule(session, key="k", id=4711)
    assert (again.id, again.body, shop.keys()) == (plain.id, "old", 0)


def test_if_an_id_is_taken_a_batch_loses_and_duplicates_no_task(
    shop: Caller, monkeypatch: MonkeyPatch
) -> None:
    # Databases without COPY use several statements.
    monkeypatch.setattr("delaytasks.db.statements.MAX_TEXT", 100_000)
    old, producer = shop.world.schedule(), shop.world.runtime.producer
    make_id, told = producer._make_id, list[DelayedTask]()
    ids = chain([make_id() for _ in range(240)], [old.id], iter(make_id, None))
    monkeypatch.setattr(producer, "_make_id", ids.__next__)
    many = (("mail", {"n": n}, 5) for n in range(250))
    assert shop.delays.schedule_many(many, on_batch=told.extend) == 250
    assert [task.body["n"] for task in told] == list(range(250))
    assert shop.seen() == {old.id, *(task.id for task in told)}
    assert len(shop.seen()) == 251


# -- asyncio --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_an_async_session_is_given_as_its_sync_session(shop: Caller, database_url: str) -> None:
    refuses = pytest.raises(e.SessionUnusableError, match=r"await delays\.aschedule_delay\(")
    tasks: list[DelayedTask] = []

    async def go() -> None:
        async with engine_at(database_url) as engine, AsyncSession(engine) as session:
            # The session that SQLAlchemy passes, and the asynchronous one itself.
            for schedule in (shop.schedule, lambda _: shop.schedule(session)):
                tasks.append(await session.run_sync(schedule))
            assert shop.has()
            await session.commit()
            if shop.world.has_row_locks:  # on SQLite, the listener of the test's engine would fail
                # Outside of run_sync no driver can wait, and the error message explains this.
                with refuses:
                    shop.schedule(session)
                gc.collect()  # unawaited coroutines cause warnings here
                await session.rollback()

    run(go())
    assert shop.has(*tasks)


# -- transactions that cannot be used, and drivers with other defaults ----------------------------


def every_call(d: DelayTasks, task: DelayedTask, failed: DelayedTask, session: Any) -> list[Any]:
    """Return the calls that change rows in a session."""
    return [
        lambda: d.schedule_delay("mail", {}, 5, session=session),
        lambda: d.schedule_delay("mail", {}, 5, key="new", session=session),
        lambda: d.schedule_many([("mail", {}, 5)], session=session),
        lambda: d.cancel(task, session=session),
        lambda: d.reschedule(task, 5, session=session),
        lambda: d.touch(task, 500, session=session),
        lambda: d.touch([task], 500, session=session),
        lambda: d.rerun(failed, session=session),
    ]


def test_a_transaction_that_failed_is_refused_and_nothing_sent(shop: Caller, place: Any) -> None:
    if shop.world.kind != "postgresql":
        pytest.skip("elsewhere a failed statement does not end its transaction")
    task, failed = shop.world.put(due_s=100), shop.world.put(Status.FAILED)
    with pytest.raises(Exception, match="division by zero"):
        place.execute(text("SELECT 1 / 0"))
    for call in every_call(shop.delays, task, failed, place):
        with pytest.raises(e.SessionUnusableError, match="aborted"):
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


def test_a_transaction_that_is_read_only_or_elsewhere_is_refused_and_nothing_sent(
    shop: Caller,
) -> None:
    task, failed = shop.world.put(due_s=100), shop.world.put(Status.FAILED)
    read_only, elsewhere = own_engine(shop.world.url), create_engine("sqlite://")
    for engine, statement in (read_only, READ_ONLY[shop.world.kind]), (elsewhere, "SELECT 1"):
        with Session(engine) as session:
            for call in every_call(shop.delays, task, failed, session):
                session.execute(text(statement))
                if shop.world.kind == "mysql":
                    session.commit()  # the setting applies from the next transaction
                with pytest.raises(e.SessionUnusableError):
                    call()
                session.rollback()
            session.commit()
        engine.dispose()
    assert (shop.seen(), shop.timer.ids) == ({task.id, failed.id}, [])


SHORT_WAIT = {
    "postgresql": "SET LOCAL lock_timeout = '50ms'",
    "mysql": "SET innodb_lock_wait_timeout = 1",
}


def test_a_conflict_in_the_callers_transaction_is_raised_and_not_retried(shop: Caller) -> None:
    """A deadlock may have rolled back the caller's own work."""
    if not shop.world.has_row_locks:
        pytest.skip("SQLite lets one writer in at a time")
    task, seen = shop.world.put(due_s=100), list[str]()
    event.listen(shop.engine, "before_cursor_execute", lambda *call: seen.append(call[2]))
    with shop.world.locked(task), shop.session() as session:
        session.execute(text(SHORT_WAIT[shop.world.kind]))
        with pytest.raises(e.SessionUnusableError, match=r"[Ll]ock"):
            shop.delays.reschedule(task, 5, session=session)
    assert [statement.partition(" ")[0] for statement in seen].count("UPDATE") == 1
    assert (shop.seen(), shop.timer.ids) == ({task.id}, [])


def test_missing_tables_are_named_with_the_remedy(database_url: str) -> None:
    delays, engine = delays_on(database_url, table_prefix="gone_"), create_engine(database_url)
    remedy = "delaytasks -A APP db upgrade"
    with pytest.raises(e.StoreError, match=remedy):
        delays.get(1)
    says = f"nothing was sent; to make the tables, run: {remedy}"
    unusable = pytest.raises(e.SessionUnusableError, match=says)
    with Session(engine) as session, unusable:
        delays.schedule_delay("mail", {}, 5, session=session)
    engine.dispose()
    delays.close()


def test_a_rollback_undoes_all_on_sqlite_with_default_settings(shop: Caller) -> None:
    """Python's driver begins a transaction at the first INSERT, so an earlier savepoint would
    commit."""
    engine, one = create_engine(shop.world.url), NewTask("mail", {}, 5)
    many = partial(shop.delays.schedule_many, [one, one._replace(key="k")])
    for schedule in (shop.schedule, partial(shop.schedule, key="k"), many):
        with Session(engine) as session:
            schedule(session=session)
            session.rollback()
        assert shop.has()
    with Session(engine) as session:
        shop.delays.schedule_many([one], session=session)
        session.commit()
    assert len(shop.seen()) == len(shop.timer.ids) == 1
    engine.dispose()
