"""`Shards`: several databases as one, here SQLite files. tests/integration/test_shards.py has
servers and workers."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import create_engine

import delaytasks as e
from delaytasks import DelayedTask, DelayTasks, NewTask, Shards
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
    for same in ({"shard": 0}, {"namespace": "shop-0"}, {"database_url": url}):
        with pytest.raises(e.ConfigError, match="give each its"):
            Shards([member(tmp_path, 0), member(tmp_path, 1, **same)])
    other = member(tmp_path, 1, database_url=url, table_prefix="b_")
    assert Shards([member(tmp_path, 0), other]).members[1] is other, "the tables differ"


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
    called = [shards.any(lambda one: one.callbacks.publish("a", {}, 60)) for _ in range(4)]
    assert [shard_of(task.id) for task in made + called] == [0, 1, 2, 3] * 3
    for task in made:
        assert shards.members[shard_of(task.id)].get(task.id).id == task.id


def test_every_process_sends_a_key_to_the_same_member(process: Process) -> None:
    first, places = process(), Counter[int]()
    reversed_list = Shards(process().members[::-1])
    for number in range(60):
        task = first.schedule_delay(TAG, None, 60, key=f"k{number}")
        places[shard_of(task.id)] += 1
        with pytest.raises(e.DuplicateTaskError):
            reversed_list.schedule_delay(TAG, None, 60, key=f"k{number}")
    assert all(8 < places[number] < 32 for number in range(3)), places


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


def test_a_task_is_found_although_its_id_or_key_is_that_of_another_member(
    process: Process, tmp_path: Path
) -> None:
    """Other programs write rows with ids that mean nothing here, and a new member takes keys."""
    old, new = process(2), process(3)
    for id in (17, new.members[2].new_id()):
        new.members[1].schedule_delay(TAG, None, 60, id=id)
        assert new.get(id).id == new.reschedule(id, 30).id == new.cancel(id).id == id
    key = key_at(new, 2)
    for shards in (old, new):
        task = shards.schedule_delay(TAG, None, 60, key=key)
        assert (shard_of(task.id) == 2) is (shards is new)
        assert new.get(tag=TAG, key=key).id == task.id
        assert new.touch(tag=TAG, key=key, delay=120).touched == [key]
        assert new.reschedule(tag=TAG, key=key, delay=9).id == task.id
        assert new.cancel(tag=TAG, key=key).id == task.id
        assert not new.cancel(tag=TAG, key=key)
    assert new.cancel(new.any(DelayTasks.new_id)).status is None
    engine = create_engine(f"sqlite:///{tmp_path}/0.sqlite3")
    with engine.connect() as connection, invalid("session", match="session"):
        new.schedule_delay(TAG, None, 60, session=connection)
    engine.dispose()


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
    with pytest.raises(e.StoreUnavailableError):
        none.get(7)
