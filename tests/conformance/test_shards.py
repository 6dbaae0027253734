"""Several databases used as one: two of PostgreSQL, and one of MariaDB or MySQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from delaytasks import BulkResult, DelayTask, DelayTasks, NewTask, Status
from delaytasks.core.errors import (
    ConfigError,
    InvalidIdError,
    InvalidScheduleError,
    ShardMismatchError,
    StoreUnavailableError,
    TaskNotFoundError,
)
from delaytasks.core.ids import IdMaker, home_of, shard_of
from delaytasks.wiring import wiring_of
from tests.recording import delays_on
from tests.services import free_port
from tests.several import TAG, Several, keys_of

SHARDS = range(3)


@pytest.fixture(scope="module")
def module_shards(shard_urls: list[str]) -> Iterator[Several]:
    made = Several(shard_urls)
    yield made
    made.close()


@pytest.fixture
def shards(module_shards: Several) -> Several:
    module_shards.empty()
    return module_shards


@pytest.fixture
def delays(shards: Several) -> DelayTasks:
    return shards.delays()


def key_at(shard: int) -> str:
    return next(keys_of(shard, 3))


def schedule_at(delays: DelayTasks, shard: int, delay: float = 60) -> DelayTask:
    return delays.schedule_delay(TAG, {"n": 1}, delay, key=key_at(shard))


# -- shard selection ------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.text(max_size=20), st.text(max_size=20), st.integers(1, 31))
def test_a_new_shard_takes_keys_and_no_other_key_moves(tag: str, key: str, shards: int) -> None:
    before, after = home_of(tag, key, shards), home_of(tag, key, shards + 1)
    assert after in (before, shards)


def test_keys_spread_evenly() -> None:
    homes = Counter(home_of(TAG, f"order-{n}", 4) for n in range(8000))
    assert all(1700 < homes[shard] < 2300 for shard in range(4)), homes


@pytest.mark.slow
def test_tasks_without_a_key_spread_and_their_ids_name_their_shards(
    shards: Several, delays: DelayTasks
) -> None:
    made = [delays.schedule_delay(TAG, None, 60) for _ in range(60)]
    places = Counter(shard_of(task.id) for task in made)
    assert set(places) == set(SHARDS)
    assert all(shards.shard_of_row(task.id) == [shard_of(task.id)] == [task.shard] for task in made)


def test_each_process_schedules_the_tasks_of_a_key_in_the_same_shard(shards: Several) -> None:
    for delays in (shards.delays(), shards.delays()):
        for shard in SHARDS:
            key = key_at(shard)
            task = delays.schedule_delay(TAG, None, 60, key=key, on_conflict="replace")
            assert shards.shard_of_row(task.id) == [shard] == [delays.shard_for(TAG, key).number]


def test_ids_that_are_made_ahead_name_the_right_shard(shards: Several, delays: DelayTasks) -> None:
    for shard in SHARDS:
        id = delays.new_id(TAG, key_at(shard))
        assert delays.schedule_delay(TAG, None, 60, key=key_at(shard), id=id).shard == shard
    id = delays.new_id()
    assert delays.schedule_delay(TAG, None, 60, id=id).shard == shard_of(id)
    assert delays.schedule_delay(TAG, None, 60, id=id).id == id, (
        "again, as after an unknown outcome"
    )
    assert len(shards.shard_of_row(id)) == 1
    with pytest.raises(InvalidScheduleError):
        delays.new_id(TAG)


def test_an_id_of_no_shard_and_an_id_of_another_shard_than_its_key_are_refused(
    shards: Several, delays: DelayTasks
) -> None:
    with pytest.raises(InvalidIdError, match=r"shard 3 of 3.*new_id\(\)"):
        delays.schedule_delay(TAG, None, 60, id=IdMaker(lambda: 2**41, 3)())
    with pytest.raises(
        ShardMismatchError, match=r"belongs to shard 1.* names shard 2.*new_id\(tag, key\)"
    ):
        delays.schedule_delay(TAG, None, 60, key=key_at(1), id=delays.new_id(TAG, key_at(2)))
    assert [shards.count(shard) for shard in SHARDS] == [0, 0, 0]


def test_schedule_many_uses_one_shard_for_tasks_without_key_and_id(
    shards: Several, delays: DelayTasks
) -> None:
    new = [NewTask(TAG, n, 60) for n in range(50)]
    new += [NewTask(TAG, None, 60, key=f"b{n}") for n in range(30)]
    new += [NewTask(TAG, None, 60, id=wiring_of(delays).shards[shard].new_id()) for shard in SHARDS]
    written: list[DelayTask] = []
    assert delays.schedule_many(new, on_batch=written.extend) == 83
    assert len(written) == 83
    assert len({task.shard for task in written if task.key is None and task.body is not None}) == 1
    assert all(task.shard == home_of(TAG, task.key, 3) for task in written if task.key is not None)
    assert all(
        shards.shard_of_row(task.id) == [task.shard] == [shard_of(task.id)] for task in written
    )


def test_one_invalid_task_prevents_its_whole_batch_in_every_shard(
    shards: Several, delays: DelayTasks
) -> None:
    new = [NewTask(TAG, None, 60, key=f"b{n}") for n in range(30)]
    with pytest.raises(ShardMismatchError):
        delays.schedule_many(
            [*new, NewTask(TAG, None, 60, key=key_at(0), id=wiring_of(delays).shards[1].new_id())]
        )
    with pytest.raises(InvalidScheduleError):
        delays.schedule_many([*new, NewTask(TAG, None)])
    assert [shards.count(shard) for shard in SHARDS] == [0, 0, 0]


# -- each call finds the shard of its task --------------------------------------------------------


@pytest.fixture(params=SHARDS)
def shard(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=["id", "task", "key"])
def name(request: pytest.FixtureRequest) -> Callable[[DelayTask], dict[str, Any]]:
    """Return a function that names a task by its id, by the task itself, or by its key."""
    ways: dict[str, Callable[[DelayTask], dict[str, Any]]] = {
        "id": lambda task: {"task": task.id},
        "task": lambda task: {"task": task},
        "key": lambda task: {"tag": task.tag, "key": task.key},
    }
    return ways[request.param]


def test_every_call_finds_the_shard_of_its_task(
    delays: DelayTasks, shard: int, name: Callable[[DelayTask], dict[str, Any]]
) -> None:
    task = schedule_at(delays, shard)
    assert delays.get(**name(task)).shard == shard
    moved = delays.reschedule(**name(task), delay=90)
    assert (moved.id, moved.shard) == (task.id, shard)
    assert delays.touch(**name(task), delay=200)
    touched = delays.get(task.id)
    assert touched.expected_time > moved.expected_time
    assert delays.cancel(**name(task))
    assert delays.get(task.id).status is Status.CANCELLED
    assert delays.rerun(task.id, 60).status is Status.NOT_COMPLETE
    assert delays.attempts(task.id) == []
    assert delays.get(**name(task)).id == task.id, "its key too is back"


def test_touch_many_touches_tasks_in_all_shards(delays: DelayTasks) -> None:
    keyed = [schedule_at(delays, shard) for shard in SHARDS]
    plain = [delays.schedule_delay(TAG, None, 60) for _ in range(20)]
    gone = schedule_at_and_cancel(delays)
    assert delays.touch_many([*keyed, *(task.id for task in plain), gone.id], 500).gone == [gone.id]
    assert delays.touch_many(
        tag=TAG, keys=[*(task.key or "" for task in keyed), "nobody"], delay=900
    ).gone == ["nobody"]
    now = wiring_of(delays).clock.now()
    assert all((delays.get(task.id).expected_time - now).total_seconds() > 800 for task in keyed)
    assert all((delays.get(task.id).expected_time - now).total_seconds() > 400 for task in plain)


@pytest.mark.slow
def test_a_shard_that_is_down_does_not_prevent_touches_in_other_shards(
    shards: Several,
) -> None:
    url = f"postgresql://nobody@127.0.0.1:{free_port()}/nothing"
    tasks = [schedule_at(shards.delays(), shard) for shard in SHARDS]
    delays = delays_on(
        [url if shard == 1 else shards.urls[shard] for shard in SHARDS], table_prefix=shards.prefix
    )
    for delay, names in (
        (500, {"tasks": [task.id for task in tasks]}),
        (900, {"tag": TAG, "keys": [task.key for task in tasks]}),
    ):
        with pytest.raises(StoreUnavailableError, match="shard 1"):
            delays.touch_many(delay=delay, **names)
        later = [shards.delays().get(task).expected_time - task.expected_time for task in tasks]
        assert [round(late.total_seconds(), -2) for late in later] == [delay - 100, 0, delay - 100]
    delays.close()


@pytest.mark.slow
def test_cancel_many_cancels_in_all_shards_and_reports_one_that_is_down(shards: Several) -> None:
    tasks = [schedule_at(shards.delays(), shard) for shard in SHARDS]
    url = f"postgresql://nobody@127.0.0.1:{free_port()}/nothing"
    delays = delays_on(
        [url if shard == 1 else shards.urls[shard] for shard in SHARDS], table_prefix=shards.prefix
    )
    seen: list[BulkResult] = []
    result = delays.cancel_many(tag=TAG, on_progress=seen.append)
    assert (result.matched, result.changed, result.missing, len(result.runs)) == (2, 2, (1,), 2)
    assert [(one.matched, one.changed) for one in seen] == [(2, 1), (2, 2)]
    assert [shards.delays().get(task).status.name for task in tasks] == [
        "CANCELLED",
        "NOT_COMPLETE",
        "CANCELLED",
    ]
    delays.close()
    again = shards.delays().cancel_many(tag=TAG)
    assert (again.matched, again.changed, again.missing) == (1, 1, ())
    assert sorted((one.shard, one.changed) for one in shards.delays().audit()) == [
        (0, 0),
        (0, 1),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    nowhere = delays_on([url] * 2, table_prefix=shards.prefix)
    with pytest.raises(StoreUnavailableError):
        nowhere.cancel_many(tag=TAG)
    nowhere.close()


def test_rerun_many_reruns_tasks_in_their_shards_with_their_keys(
    shards: Several, delays: DelayTasks
) -> None:
    tasks = [schedule_at(delays, shard) for shard in SHARDS]
    for task in tasks:
        delays.cancel(task)
        shards.set_status(task, Status.FAILED)
    taken = schedule_at(delays, 1)
    result = delays.rerun_many(tag=TAG)
    assert (result.matched, result.changed, result.refused) == (3, 2, 1)
    assert [delays.get(tag=TAG, key=task.key).id for task in tasks] == [
        tasks[0].id,
        taken.id,
        tasks[2].id,
    ]


def schedule_at_and_cancel(delays: DelayTasks) -> DelayTask:
    task = delays.schedule_delay(TAG, None, 60)
    delays.cancel(task)
    return task


def test_ids_that_a_database_made_are_found_in_any_shard(
    shards: Several, delays: DelayTasks, shard: int
) -> None:
    shards.insert_foreign(shard, 5 + shard)
    found = delays.get(5 + shard)
    assert (found.id, found.shard) == (5 + shard, shard)
    assert delays.touch(5 + shard, 60)
    assert delays.touch_many([5 + shard], 90).gone == []
    assert delays.cancel(5 + shard)
    with pytest.raises(TaskNotFoundError):
        delays.get(99)


def test_a_move_of_a_read_task_selects_its_shard_if_two_tasks_have_one_id(
    shards: Several, delays: DelayTasks
) -> None:
    for shard in SHARDS:
        shards.insert_foreign(shard, 7)
    assert {task.shard for task in delays.find()} == set(SHARDS)
    for task in delays.find():
        delays.cancel(task)
        assert [shards.stores[n].tasks.read(7).status is Status.CANCELLED for n in SHARDS].count(
            True
        ) == 1
        delays.rerun(task)


def test_ids_are_found_and_moved_in_all_shards(shards: Several, delays: DelayTasks) -> None:
    ids = [schedule_at(delays, shard, 60 + shard).id for shard in SHARDS]
    for number in SHARDS:
        shards.insert_foreign(number, 7)
    assert [task.id for task in delays.find(ids=ids[::-1])] == ids
    assert len(delays.find(ids=[7])) == len(SHARDS), "ids of other programs may be in each"
    assert delays.cancel_many(ids=ids).changed == len(SHARDS)
    assert {task.id for task in delays.find(status="NOT_COMPLETE")} == {7}


def test_pages_merge_all_shards_in_order_without_loss(shards: Several, delays: DelayTasks) -> None:
    due = wiring_of(delays).clock.now()
    made = [delays.schedule_at(TAG, n, due) for n in range(20)]
    made += [delays.schedule_delay(TAG, n, 60 - n) for n in range(40)]
    for number in SHARDS:
        shards.insert_foreign(number, 7)
    everything = [(task.expected_time, task.id, task.shard) for task in delays.find(limit=1000)]
    assert everything == sorted(everything)
    assert len(everything) == len(made) + 3
    for limit in (1, 7, 62):
        met: list[tuple[Any, int, int]] = []
        cursor = None
        while True:
            page = delays.find(limit=limit, cursor=cursor)
            met += [(task.expected_time, task.id, task.shard) for task in page]
            assert len(page) <= limit
            cursor = page.cursor
            if cursor is None:
                break
        assert met == everything
        assert page.missing == ()


# -- a caller's session ---------------------------------------------------------------------------


@pytest.fixture
def session(shards: Several) -> Iterator[Session]:
    """Yield a session on the second shard."""
    engine = create_engine(shards.urls[1])
    with Session(engine) as made:
        yield made
    engine.dispose()


def test_a_task_without_a_key_goes_to_the_sessions_shard(
    shards: Several, delays: DelayTasks, session: Session
) -> None:
    task = delays.schedule_delay(TAG, None, 60, session=session)
    assert delays.schedule_many([(TAG, None, 60)] * 3, session=session) == 3
    assert task.shard == 1
    assert shards.count(1) == 0
    session.commit()
    assert [shards.count(shard) for shard in SHARDS] == [0, 4, 0]


def test_a_session_on_another_shard_than_the_keys_is_refused_with_the_remedy(
    shards: Several, delays: DelayTasks, session: Session
) -> None:
    assert delays.schedule_delay(TAG, None, 60, key=key_at(1), session=session).shard == 1
    for shard in (0, 2):
        with pytest.raises(
            ShardMismatchError,
            match=rf"belongs to shard {shard}.*on shard 1.*shard_for\(tag, key\)",
        ):
            delays.schedule_delay(TAG, None, 60, key=key_at(shard), session=session)
    with pytest.raises(ShardMismatchError):
        delays.schedule_many(
            [(TAG, None, 60), NewTask(TAG, None, 60, key=key_at(0))], session=session
        )
    session.commit()
    assert [shards.count(shard) for shard in SHARDS] == [0, 1, 0]


def test_a_task_that_is_moved_in_a_session_must_be_on_its_shard(
    delays: DelayTasks, session: Session
) -> None:
    here, there = schedule_at(delays, 1), schedule_at(delays, 2)
    assert delays.cancel(here.id, session=session)
    for move in (
        lambda: delays.cancel(there.id, session=session),
        lambda: delays.reschedule(tag=TAG, key=there.key, delay=5, session=session),
        lambda: delays.touch(there, 500, session=session),
        lambda: delays.touch_many([there.id], 500, session=session),
    ):
        with pytest.raises(ShardMismatchError, match=rf"task {there.id} is in shard 2.*on shard 1"):
            move()
    assert delays.get(there.id, session=session).id == there.id, (
        "what is only looked at may be anywhere"
    )
    assert {task.id for task in delays.find(session=session)} == {here.id, there.id}
    assert delays.cancel(99, session=session).status is None
    with pytest.raises(TaskNotFoundError):
        delays.cancel(99, session=session, strict=True)


def test_a_session_on_none_of_the_shards_is_refused(delays: DelayTasks) -> None:
    engine = create_engine("sqlite://")
    with (
        Session(engine) as session,
        pytest.raises(ShardMismatchError, match=r"is not in delaytasks_database_url"),
    ):
        delays.schedule_delay(TAG, None, 60, session=session)


# -- the list of URLs -----------------------------------------------------------------------------


def test_a_list_in_another_order_is_refused_with_the_remedy(shards: Several) -> None:
    delays = shards.delays()
    urls = [shards.urls[1], shards.urls[0], shards.urls[2]]
    wrong = delays_on(urls, table_prefix=shards.prefix)
    with pytest.raises(ConfigError, match=r"is shard [01], but has position [01] .*old order"):
        wiring_of(wrong).checks.check_ready()
    for shard in (0, 1):
        with pytest.raises(ConfigError, match=rf"has position {shard} "):
            schedule_at(wrong, shard)
    assert schedule_at(wrong, 2).shard == 2
    wiring_of(delays).checks.check_ready()
    wrong.close()
