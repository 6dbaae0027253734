"""`Shards`: several databases as one, here SQLite files."""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import create_engine

import delaytasks as e
from delaytasks import DelayedTask, DelayTasks, NewTask, Shards, Status
from delaytasks.testing import DelaysTester, create_tables
from tests.conftest import closing_all
from tests.refusals import invalid
from tests.world import MonkeyPatch, shard_of

pytestmark = pytest.mark.slow

TAG = "order.close"
Process = Callable[..., Shards]


def member(folder: Path, number: int, **settings: Any) -> DelayTasks:
    """Return one of several `DelayTasks`, with a database of its own."""
    usual: Any = {"shard": number, "namespace": f"shop-{number}", "timer": "direct"}
    settings = {"database_url": f"sqlite:///{folder}/{number}.sqlite3", **usual, **settings}
    app = Celery(f"shop-{number}", broker="memory://", set_as_current=False)
    return DelayTasks(app, **settings)


def unavailable(folder: Path, number: int) -> DelayTasks:
    return member(folder, number, database_url=f"postgresql://127.0.0.1:1/{number}")


@pytest.fixture(scope="module")
def empty_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with empty tables, of which each test gets copies."""
    folder = tmp_path_factory.mktemp("empty")
    engine, delays = create_engine(f"sqlite:///{folder}/0.sqlite3"), member(folder, 0)
    with engine.begin() as connection:
        create_tables(connection, delays)
    delays.close()
    engine.dispose()
    return folder / "0.sqlite3"


@pytest.fixture
def process(tmp_path: Path, empty_file: Path) -> Iterator[Process]:
    """Return the `Shards` of a new process that has the first `count` of four members."""

    def new(count: int = 3, down: int | None = None) -> Shards:
        members = [
            unavailable(tmp_path, number) if number == down else member(tmp_path, number)
            for number in range(count)
        ]
        shards = Shards(members)
        shards.processor(TAG, keep_result=True)(lambda body: body)
        return shards

    for number in range(4):
        shutil.copy(empty_file, tmp_path / f"{number}.sqlite3")
    with closing_all(new) as process:
        yield process


@pytest.fixture
def shards(process: Process) -> Shards:
    return process()


def key_at(shards: Shards, place: int) -> str:
    """Return a key of the member at a place of the list."""
    keys = (f"k{number}" for number in range(1000))
    return next(key for key in keys if shards.member(TAG, key) is shards.members[place])


def test_members_must_differ_in_number_namespace_and_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/0.sqlite3"
    same = {"shard": 0, "namespace": "shop-0", "database_url": url}
    for (name, value), what in zip(same.items(), ("shard", "namespace", "database"), strict=True):
        with pytest.raises(e.ConfigError, match=rf"share a (delaytasks_)?{what}: give each its"):
            Shards([member(tmp_path, 0), member(tmp_path, 1, **{name: value})])
    other = member(tmp_path, 1, database_url=url, table_prefix="b_")
    assert Shards([member(tmp_path, 0), other]).members[1] is other, "the tables differ"
    with pytest.raises(e.ConfigError, match="needs a member"):
        Shards([])


# -- new tasks ------------------------------------------------------------------------------------


def test_tasks_without_a_key_go_to_each_member_in_turn_and_run_there(process: Process) -> None:
    shards = process(4)
    delays = shards.members[3]
    assert shard_of(delays.new_id()) == 3
    with DelaysTester(delays) as tester:
        task = delays.schedule_delay(TAG, 7, 0, key="7")
        tester.run_due()
        assert delays.result(task.id) == 7, "the processor is registered with each member"
    made = [shards.schedule_delay(TAG, n, 0) for n in range(8)]
    many = list[DelayedTask]()
    for _ in shards.members:
        shards.schedule_many([(TAG, None, 60)] * 4, on_batch=many.extend)
    called = [shards.any(lambda one: one.callbacks.publish("a", {}, 60)) for _ in range(4)]
    for tasks, each in ((made, 1), (many, 4), (called, 1)):
        places = [shard_of(task.id) for task in tasks]
        assert places == [number for number in [0, 1, 2, 3] * 2 for _ in range(each)][: len(tasks)]
        for task in tasks:
            assert shards.members[shard_of(task.id)].get(task.id).id == task.id


def test_every_process_sends_a_key_to_the_same_member(process: Process) -> None:
    first, second = process(), process()
    reversed_list = Shards(second.members[::-1])
    places = Counter[int]()
    for number in range(60):
        task = first.schedule_delay(TAG, None, 60, key=f"k{number}")
        places[shard_of(task.id)] += 1
        for other in (second, reversed_list):
            with pytest.raises(e.DuplicateTaskError):
                other.schedule_delay(TAG, None, at=task.expected_time, key=f"k{number}")
        assert shard_of(first.member(TAG, f"k{number}").new_id()) == shard_of(task.id)
    assert all(8 < places[number] < 32 for number in range(3)), places


def test_an_id_of_the_callers_own_selects_the_member(shards: Shards) -> None:
    id = shards.members[2].new_id()
    for _ in range(2):
        assert shards.schedule_delay(TAG, None, 60, id=id).id == shards.members[2].get(id).id == id
    with invalid("task", match="no member has the number 9"):
        shards.schedule_delay(TAG, None, 60, id=shards.members[0].new_id() | 9 << 17)


def test_many_tasks_go_to_their_members_in_batches(shards: Shards) -> None:
    own = shards.members[1].new_id()
    batches: list[int] = []

    def tasks() -> Iterator[Any]:
        yield NewTask(TAG, None, 60, id=own)
        for number in range(11_000):
            yield NewTask(TAG, None, 60, key=f"k{number}") if number < 30 else (TAG, None, 60)

    done = shards.schedule_many(tasks(), on_batch=lambda batch: batches.append(len(batch)))
    assert done == sum(batches) == 11_001
    assert max(batches) <= 5000
    assert shards.members[1].get(own).id == own
    assert all(shards.get(tag=TAG, key=f"k{number}") for number in range(30))
    # The batches without keys went to the members in turn.
    assert all(len(member.find(limit=1000)) == 1000 for member in shards.members)


# -- calls that name a task -----------------------------------------------------------------------


def test_calls_by_id_reach_only_its_member(shards: Shards, monkeypatch: MonkeyPatch) -> None:
    for task in [shards.schedule_delay(TAG, {"n": 1}, 60) for _ in shards.members]:
        for other in shards.members:
            if other is not shards.member_of(task):
                for method in ("get", "cancel", "reschedule", "touch", "rerun"):
                    monkeypatch.setattr(other, method, None)  # calling None would raise
        assert shards.get(str(task.id)).body == {"n": 1}
        assert shards.get(task, attempts=True).attempts == ()
        assert shards.touch(task.id, 120).touched == [task.id]
        assert shards.reschedule(task, delay=3600).expected_time > task.expected_time
        assert shards.cancel(task.id)
        assert shards.touch(task.id, 120).gone == [task.id]
        assert shards.rerun(task.id).status is Status.NOT_COMPLETE
        monkeypatch.undo()


def has_the_key(shards: Shards, key: str, task: DelayedTask) -> None:
    """Check that calls by the key find the task, and cancel it."""
    assert shards.get(tag=TAG, key=key).id == task.id
    assert shards.touch(tag=TAG, key=key, delay=120).touched == [key]
    assert shards.reschedule(tag=TAG, key=key, delay=9).id == task.id
    assert shards.cancel(tag=TAG, key=key).id == task.id
    assert not shards.cancel(tag=TAG, key=key)


def test_calls_by_key_reach_the_member_of_the_key(shards: Shards) -> None:
    for place in range(3):
        task = shards.schedule_delay(TAG, None, 60, key=(key := key_at(shards, place)))
        assert shard_of(task.id) == place
        has_the_key(shards, key, task)


def test_a_task_is_found_although_its_id_or_key_is_that_of_another_member(process: Process) -> None:
    """Other programs write rows with ids that mean nothing here, and a new member takes keys."""
    old, new = process(2), process(3)
    for id in (17, new.members[2].new_id()):
        new.members[1].schedule_delay(TAG, None, 60, id=id)
        assert new.get(id).id == id
        assert new.touch(id, 90).touched == [id]
        assert new.reschedule(id, 30).id == id
        assert new.cancel(id).id == id
    key = key_at(new, 2)
    has_the_key(new, key, old.schedule_delay(TAG, None, 60, key=key))
    assert shard_of(new.schedule_delay(TAG, None, 60, key=key).id) == 2


def test_a_new_member_takes_keys_and_no_other_key_moves(process: Process) -> None:
    three, four = process(3), process(4)
    moved = 0
    for number in range(400):
        before, after = three.member(TAG, f"k{number}"), four.member(TAG, f"k{number}")
        if after is four.members[3]:
            moved += 1
        else:
            assert four.members.index(after) == three.members.index(before)
    assert 60 < moved < 140


def test_a_call_names_one_task_that_exists(shards: Shards) -> None:
    id = shards.any(DelayTasks.new_id)
    assert shards.cancel(id).status is None
    for call in (shards.get, shards.touch, shards.rerun):
        with pytest.raises(e.TaskNotFoundError, match=str(id)):
            call(id, *[5] * (call == shards.touch))
    for name in ({}, {"key": "7"}, {"task": 7, "tag": TAG, "key": "7"}):
        with invalid("task", match="name the task by its id, or by"):
            shards.get(**name)
    with invalid("key"):
        shards.touch(tag=TAG, key=["7", "8"], delay=9)
    with invalid("id"):
        shards.touch([7, 8], 9)


def test_a_session_is_for_a_member(shards: Shards, tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/1.sqlite3")
    key = key_at(shards, 1)
    with engine.begin() as connection:
        for call in (
            lambda: shards.schedule_delay(TAG, None, 60, key=key, session=connection),
            lambda: shards.cancel(7, session=connection),
        ):
            with invalid("session", match="session"):
                call()
        shards.member(TAG, key).schedule_delay(TAG, None, 60, key=key, session=connection)
    assert shard_of(shards.get(tag=TAG, key=key).id) == 1
    engine.dispose()


# -- a member is unavailable ----------------------------------------------------------------------


def test_keyless_tasks_avoid_a_missing_member(process: Process, monkeypatch: MonkeyPatch) -> None:
    shards, tries = process(down=1), list[str]()
    schedule = shards.members[1].schedule_delay

    def counted(*args: Any, **options: Any) -> DelayedTask:
        tries.append("")
        return schedule(*args, **options)

    monkeypatch.setattr(shards.members[1], "schedule_delay", counted)
    made = [shards.schedule_delay(TAG, None, 60) for _ in range(12)]
    assert {shard_of(task.id) for task in made} == {0, 2}
    assert len(tries) == 1
    assert shards.schedule_many([(TAG, None, 60)] * 5) == 5
    with pytest.raises(e.StoreUnavailableError):
        shards.schedule_delay(TAG, None, 60, key=key_at(shards, 1))


def test_calls_of_missing_members_fail_and_say_which_members_have_done_it(
    process: Process, tmp_path: Path
) -> None:
    with pytest.raises(e.StoreUnavailableError, match=r"members \[0, 2\] have done") as said:
        process(down=1).each(lambda member: member.policies.pause(tag=TAG))
    assert isinstance(said.value.__cause__, e.StoreUnavailableError)
    policies = process().each(lambda member: member.policies.list(tag=TAG))
    assert [bool(policies[number]) for number in range(3)] == [True, False, True]
    none = Shards([unavailable(tmp_path, 0), unavailable(tmp_path, 1)])
    for call in (lambda: none.schedule_delay(TAG, None, 60), lambda: none.get(7)):
        with pytest.raises(e.StoreUnavailableError):
            call()


# -- asyncio --------------------------------------------------------------------------------------


def test_what_waits_has_an_asynchronous_twin() -> None:
    without = {"member", "member_of", "processor"}
    methods = {name for name, _ in inspect.getmembers(Shards, inspect.isfunction)}
    public = {name for name in methods if name[0] != "_"}
    twins = {name for name in public if name[0] == "a" and name[1:] in public}
    assert {f"a{name}" for name in public - twins - without} == twins


def test_a_coroutine_waits_for_a_task_of_any_member(shards: Shards) -> None:
    async def work() -> None:
        key = key_at(shards, 2)
        task = await shards.aschedule_delay(TAG, 5, 60, key=key)
        waiting = asyncio.create_task(shards.member_of(task).aresult(task, 30))
        assert await shards.acancel(tag=TAG, key=key)
        with pytest.raises(e.TaskCancelledError):
            await waiting
        await shards.aclose()

    asyncio.run(work())
