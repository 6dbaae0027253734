"""Processes that know a new shard and processes that do not know it share the same keys."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from sqlalchemy import create_engine, delete
from sqlalchemy.orm import Session

from delaytasks import DelayTask, DelayTasks, NewTask, Status
from delaytasks.core.errors import (
    DuplicateTaskError,
    InvalidStatusError,
    ShardMismatchError,
    TaskNotFoundError,
)
from delaytasks.core.ids import shard_of
from delaytasks.core.interfaces import OnConflict
from delaytasks.sharding.growth import Growth as Growing
from delaytasks.wiring import wiring_of
from tests.several import TAG, Several, keys_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["MariaDB added", "to MariaDB"])
def module_shards(shard_urls: list[str], request: pytest.FixtureRequest) -> Iterator[Several]:
    made = Several(shard_urls if request.param == "MariaDB added" else shard_urls[::-1])
    yield made
    made.close()


class Growth(NamedTuple):
    """A deployment that grows from one database to two, or from two to three.

    `new` knows the added shard, and `old` does not.
    """

    shards: Several
    old: DelayTasks
    new: DelayTasks
    #: `key` moves from the shard `home` to the added shard.
    key: str
    home: int
    added: int

    def schedule(
        self, delays: DelayTasks, on_conflict: OnConflict = "reject", **options: Any
    ) -> DelayTask:
        return delays.schedule_delay(
            TAG, None, 60, key=self.key, on_conflict=on_conflict, **options
        )

    @property
    def live(self) -> list[tuple[int, int]]:
        """Return (id, shard) of each live task of the key."""
        return [(task.id, task.shard) for task in self.shards.live(self.key)]


@pytest.fixture(params=[1, 2])
def growth(module_shards: Several, request: pytest.FixtureRequest) -> Growth:
    module_shards.empty()
    before = int(request.param)
    old, new = module_shards.delays(before), module_shards.delays(before + 1, shards_before=before)
    home = before - 1
    key = next(keys_of(before, before + 1, before, home))
    return Growth(module_shards, old, new, key, home, before)


# -- a task from before the shard was added -------------------------------------------------------


def test_an_existing_task_is_found_and_keeps_its_key_and_shard(growth: Growth) -> None:
    was = growth.schedule(growth.old)
    assert was.shard == growth.home
    assert growth.new.get(tag=TAG, key=growth.key).id == was.id
    with pytest.raises(DuplicateTaskError) as caught:
        growth.schedule(growth.new)
    assert caught.value.id == was.id
    assert growth.schedule(growth.new, "keep").id == was.id
    replaced = growth.schedule(growth.new, "replace")
    assert (replaced.id, replaced.version, replaced.shard) == (was.id, 1, growth.home)
    assert growth.new.touch(tag=TAG, key=growth.key, delay=500)
    assert growth.new.touch_many(tag=TAG, keys=[growth.key], delay=600).gone == []
    assert growth.live == [(was.id, growth.home)]
    assert growth.new.cancel(tag=TAG, key=growth.key)
    assert growth.schedule(growth.new).shard == growth.added


def test_a_task_that_runs_is_replaced_by_one_in_the_new_shard(growth: Growth) -> None:
    was = growth.schedule(growth.old)
    growth.shards.set_status(was, Status.RUNNING)
    assert growth.schedule(growth.new, "keep").id == was.id
    made = growth.schedule(growth.new, "replace")
    assert (made.shard, shard_of(made.id)) == (growth.added, growth.added)
    assert growth.new.get(tag=TAG, key=growth.key).id == made.id
    with pytest.raises(DuplicateTaskError):
        growth.schedule(growth.new)


# -- a task in the added shard --------------------------------------------------------------------


@pytest.mark.parametrize("on_conflict", ["reject", "keep", "replace"])
def test_a_process_without_the_new_shard_cannot_take_a_key_that_is_in_it(
    growth: Growth, on_conflict: OnConflict
) -> None:
    made = growth.schedule(growth.new)
    assert made.shard == growth.added
    with pytest.raises(
        DuplicateTaskError, match=rf"names shard {growth.added}.*longer delaytasks_database_url"
    ) as caught:
        growth.schedule(growth.old, on_conflict)
    assert caught.value.id == made.id
    assert growth.live == [(made.id, growth.added)]


def test_conflicts_of_keys_are_resolved_in_the_new_shard_as_in_others(growth: Growth) -> None:
    made = growth.schedule(growth.new)
    with pytest.raises(DuplicateTaskError):
        growth.schedule(growth.new)
    assert growth.schedule(growth.new, "keep").id == made.id
    assert growth.schedule(growth.new, "replace").version == 1
    growth.shards.finish(growth.new.reschedule(made.id, 0))
    again = growth.schedule(growth.new)
    assert growth.live == [(again.id, growth.added)]


def test_a_key_reserved_by_a_process_that_died_can_be_taken(growth: Growth) -> None:
    (dead,) = (
        wiring_of(growth.new)
        .shards[growth.added]
        .producer.build([NewTask(TAG, None, 60, key=growth.key)], "reject")
    )
    assert growth.shards.stores[growth.home].tasks.key_owners.point(dead, "reject") is None
    with pytest.raises(TaskNotFoundError):
        growth.new.get(tag=TAG, key=growth.key)
    with pytest.raises(DuplicateTaskError, match="which is not here"):
        growth.schedule(growth.old)
    made = growth.schedule(growth.new)
    assert growth.live == [(made.id, growth.added)]


def test_a_key_that_is_taken_right_after_it_was_reserved_is_not_taken_twice(growth: Growth) -> None:
    """Another process considered the reservation abandoned and removed it."""
    home = growth.shards.stores[growth.home]
    key_owners = wiring_of(growth.new).shards[growth.home].store.tasks.key_owners
    point, taken = key_owners.point, list[DelayTask]()

    def point_without_answer(*asked: Any) -> tuple[DelayTask, bool] | None:
        answer = point(*asked)
        if not taken:
            with home.database.begin() as connection:
                connection.execute(delete(home.schema.keys))
            taken.append(growth.schedule(growth.old))
        return answer

    key_owners.point = point_without_answer  # type: ignore[assignment, method-assign]
    with pytest.raises(DuplicateTaskError):
        growth.schedule(growth.new)
    assert growth.live == [(taken[0].id, growth.home)]


# -- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_over", [False, True], ids=["while it grows", "afterwards"])
def test_a_retried_old_task_has_its_key_again_in_its_old_shard(
    growth: Growth, is_over: bool
) -> None:
    was = growth.schedule(growth.old)
    growth.old.cancel(was)
    new = growth.shards.delays(growth.added + 1) if is_over else growth.new
    assert new.rerun(was.id, 60).shard == growth.home
    with pytest.raises(DuplicateTaskError) as caught:
        growth.schedule(new)
    assert caught.value.id == was.id
    assert new.get(tag=TAG, key=growth.key).id == was.id
    assert growth.schedule(new, "keep").id == was.id
    assert growth.schedule(new, "replace").id == was.id
    assert new.touch_many(tag=TAG, keys=[growth.key], delay=500).gone == []
    assert growth.live == [(was.id, growth.home)]
    growth.shards.finish(new.reschedule(was.id, 0))
    assert growth.schedule(new).shard == growth.added


@pytest.mark.parametrize("is_over", [False, True], ids=["while it grows", "afterwards"])
def test_an_old_task_is_not_retried_while_another_one_has_its_key(
    growth: Growth, is_over: bool
) -> None:
    was = growth.schedule(growth.old)
    growth.old.cancel(was)
    new = growth.shards.delays(growth.added + 1) if is_over else growth.new
    made = growth.schedule(new)
    assert made.shard == growth.added
    engine = create_engine(growth.shards.urls[growth.home])
    with Session(engine) as session:
        for options in ({}, {"session": session}):
            with pytest.raises(DuplicateTaskError, match="rerun: ") as caught:
                new.rerun(was.id, **options)
            assert caught.value.id == made.id
        session.commit()
    engine.dispose()
    assert growth.live == [(made.id, growth.added)]
    if not is_over:
        with pytest.raises(DuplicateTaskError, match="longer"):
            growth.schedule(growth.old)


# -- a caller's session ---------------------------------------------------------------------------


def test_a_key_that_is_scheduled_in_an_open_transaction_is_waited_for(growth: Growth) -> None:
    engine = create_engine(growth.shards.urls[growth.added])
    with Session(engine) as session, ThreadPoolExecutor() as threads:
        made = growth.schedule(growth.new, session=session)
        with pytest.raises(DuplicateTaskError):
            growth.schedule(growth.old)
        another = growth.shards.delays(growth.added + 1, shards_before=growth.added)
        other = threads.submit(growth.schedule, another, "keep")
        with pytest.raises(futures.TimeoutError):
            other.result(0.5)
        session.commit()
        assert other.result(20).id == made.id
        assert growth.live == [(made.id, growth.added)]
        growth.new.cancel(made)
        growth.schedule(growth.new, session=session)
        session.rollback()
        again = growth.schedule(growth.new)
        assert growth.live == [(again.id, growth.added)]
    engine.dispose()


@pytest.mark.parametrize("has_pointer", [False, True])
def test_a_task_that_is_retried_in_an_open_transaction_is_waited_for(
    growth: Growth, has_pointer: bool
) -> None:
    was = growth.schedule(growth.old)
    growth.old.cancel(was)
    if has_pointer:
        growth.new.cancel(growth.schedule(growth.new))
    engine = create_engine(growth.shards.urls[growth.home])
    with Session(engine) as session, ThreadPoolExecutor() as threads:
        growth.new.rerun(was.id, 60, session=session)
        other = threads.submit(growth.schedule, growth.shards.delays(growth.added + 1), "keep")
        with pytest.raises(futures.TimeoutError):
            other.result(0.5)
        session.commit()
        assert other.result(20).id == was.id
    engine.dispose()
    assert growth.live == [(was.id, growth.home)]


def test_a_session_on_the_new_shard_does_not_replace_a_task_in_the_old_one(growth: Growth) -> None:
    was = growth.schedule(growth.old)
    engine = create_engine(growth.shards.urls[growth.added])
    with Session(engine) as session:
        with pytest.raises(
            ShardMismatchError, match=rf"task {was.id}.*in shard {growth.home}.*without session="
        ):
            growth.schedule(growth.new, "replace", session=session)
        session.rollback()
    engine.dispose()
    assert growth.new.get(was.id).version == 0


# -- concurrent calls -----------------------------------------------------------------------------


class Race:
    """Make several calls on one key simultaneously."""

    def __init__(self, growth: Growth, views: list[DelayTasks]) -> None:
        self.growth = growth
        self._views = views
        self._chance = random.Random(f"{growth.added}")
        self._barrier = threading.Barrier(6, timeout=60)
        #: Maps the id of each scheduled task to its shard.
        self.places: dict[int, int] = {}
        self.answers: Counter[str] = Counter()

    def run(self, key: str, acts: list[str], rounds: int = 4) -> None:
        with ThreadPoolExecutor(self._barrier.parties) as pool:
            for _ in range(rounds):  # the key is free, then taken, then free again
                chosen = self._chance.choices(acts, k=self._barrier.parties)
                calls = [
                    pool.submit(self._call, self._chance.choice(self._views), act, key)
                    for act in chosen
                ]
                for each in calls:
                    each.result(60)
                live = self.growth.shards.live(key)
                assert len(live) <= 1, (key, chosen, live)

    def _call(self, delays: DelayTasks, act: str, key: str) -> None:
        known = list(self.places)
        self._barrier.wait()
        try:
            if act == "cancel":
                delays.cancel(tag=TAG, key=key)
            elif act == "rerun":
                delays.rerun(known[-1 - len(known) % 3], 60)
            else:
                on_conflict: Any = act
                task = delays.schedule_delay(TAG, None, 60, key=key, on_conflict=on_conflict)
                self.places[task.id] = task.shard
            self.answers[act] += 1
        except (DuplicateTaskError, TaskNotFoundError, InvalidStatusError) as error:
            self.answers[type(error).__name__] += 1

    def check(self, *expected: str) -> None:
        assert all(self.answers[answer] > 5 for answer in expected), self.answers
        assert set(self.places.values()) == {self.growth.home, self.growth.added}
        assert all(
            self.growth.shards.shard_of_row(id) == [shard] for id, shard in self.places.items()
        ), "no row moves"


def test_processes_that_know_the_new_shard_and_others_never_make_two_tasks_of_one_key(
    growth: Growth,
) -> None:
    moving = keys_of(growth.added, growth.added + 1, growth.added, growth.home)
    staying = keys_of(growth.home, growth.added + 1, growth.added, growth.home)
    another = growth.shards.delays(growth.added + 1, shards_before=growth.added)
    race = Race(growth, [growth.old, growth.shards.delays(growth.added), growth.new, another])
    for round in range(32):
        race.run(
            next(moving if round % 4 else staying),
            ["reject", "reject", "keep", "replace", "replace", "cancel"],
        )
    race.check("reject", "keep", "replace", "cancel", "DuplicateTaskError")


def test_tasks_that_are_retried_where_they_are_never_share_their_key_with_new_ones(
    growth: Growth,
) -> None:
    moving = keys_of(growth.added, growth.added + 1, growth.added, growth.home)
    race = Race(growth, [growth.new, growth.shards.delays(growth.added + 1)])
    for _ in range(12):
        key = next(moving)
        for _ in range(3):
            old = growth.old.schedule_delay(TAG, None, 60, key=key)
            race.places[old.id] = old.shard
            growth.old.cancel(old)
        race.run(key, ["rerun", "rerun", "keep", "replace", "cancel"], rounds=6)
    race.check("rerun", "keep", "replace", "cancel")


# -- after the change -----------------------------------------------------------------------------


def test_after_adding_a_shard_is_finished_processes_do_not_query_old_shards(growth: Growth) -> None:
    was = growth.schedule(growth.old)
    stays = next(keys_of(growth.home, growth.added + 1, growth.added, growth.home))
    growth.old.schedule_delay(TAG, None, 60, key=stays)
    after = growth.shards.delays(growth.added + 1)
    look = Growing(wiring_of(after).router.stores)
    assert [row.key for row in look.left(growth.home).unknown] == [growth.key]
    assert [row.id for row in look.finish(growth.home).unknown] == [was.id]
    assert look.left(growth.home) == ([], [])
    for delays in (after, growth.new):
        with pytest.raises(DuplicateTaskError) as caught:
            growth.schedule(delays)
        assert caught.value.id == was.id
        assert delays.get(tag=TAG, key=growth.key).id == was.id
        assert growth.schedule(delays, "keep").id == was.id
    replaced = growth.schedule(after, "replace")
    assert (replaced.id, replaced.shard) == (was.id, growth.home)
    growth.shards.finish(after.reschedule(was.id, 0))
    made = growth.schedule(after)
    assert growth.live == [(made.id, growth.added)]


def test_unneeded_pointers_to_other_shards_are_dropped_and_the_others_stay(growth: Growth) -> None:
    moving = keys_of(growth.added, growth.added + 1, growth.added, growth.home)
    live, gone = (growth.new.schedule_delay(TAG, None, 60, key=next(moving)) for _ in range(2))
    growth.new.cancel(gone)
    look = Growing(wiring_of(growth.new).router.stores)
    assert [row.key for row in look.left(growth.home).dead] == [gone.key]
    assert [row.key for row in look.finish(growth.home).dead] == [gone.key]
    assert look.left(growth.home) == ([], [])
    assert growth.old.schedule_delay(TAG, None, 60, key=gone.key).shard == growth.home
    with pytest.raises(DuplicateTaskError):
        growth.old.schedule_delay(TAG, None, 60, key=live.key)
