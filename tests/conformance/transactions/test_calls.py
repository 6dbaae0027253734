"""Keys and moves in the caller's transaction."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from delaytasks import Status
from delaytasks.core.errors import (
    DuplicateTaskError,
    TaskNotFoundError,
)
from tests.conformance.transactions.shop import SessionCaller


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
        assert d.touch_many(
            tag="mail", keys=["k0", "k4", "new"], delay=500, session=session
        ).gone == [
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
