"""Keys, and how replacements delay a task, on every database."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from delaytasks import DelayedTask, DuplicateTaskError, Status
from tests.world import MonkeyPatch, World

pytestmark = pytest.mark.quick


def keyed(world: World, on_conflict: Any = "reject", delay: float = 0, **more: Any) -> DelayedTask:
    return world.schedule(key="k", on_conflict=on_conflict, delay=delay, **more)


# -- a tag has at most one live task with the same key --------------------------------------------


def test_a_live_key_is_rejected_or_keeps_its_task_unchanged(world: World) -> None:
    first = keyed(world)
    with pytest.raises(DuplicateTaskError, match="'k'") as caught:
        keyed(world, id=77)
    assert caught.value.id == first.id
    kept = keyed(world, "keep", body="new")
    assert (kept.id, kept.body, world.owner()) == (first.id, first.body, first.id)
    again = keyed(world, id=first.id)  # the same call again is harmless
    assert (again.id, again.version) == (first.id, first.version)
    assert world.counted()[Status.NOT_COMPLETE] == 1


@pytest.mark.parametrize("status", [Status.NOT_COMPLETE, Status.HELD])
def test_replacing_gives_an_id_a_new_version_body_and_time(world: World, status: Status) -> None:
    first = keyed(world)
    world.change(first, status=int(status), runs=3, lapses=2)
    new = keyed(world, "replace", 60, body="new", priority=3, queue="q")
    found = world.read(first)
    assert (new.id, new.version) == (found.id, found.version) == (first.id, 1)
    assert (found.body, found.expected_time, found.status) == (
        "new", new.expected_time, Status.NOT_COMPLETE,
    )  # fmt: skip
    assert (found.priority, found.queue, found.runs, found.lapses) == (3, "q", 0, 0)
    assert sum(world.counted().values()) == 1
    assert world.claim(first) == []


@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "finished"])
def test_a_key_whose_task_another_program_ended_is_free(world: World, is_deleted: bool) -> None:
    first = keyed(world)
    world.change(first, status=int(Status.DONE))
    if is_deleted:
        with world.begin() as connection:
            connection.execute(world.table().delete())
    assert keyed(world).id != first.id


def test_of_many_callers_with_one_key_one_gets_it(world: World) -> None:
    def schedule(_: int) -> bool:
        try:
            return bool(keyed(world, delay=60))
        except DuplicateTaskError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(schedule, range(8))) == {True: 1, False: 7}
    assert sum(world.counted().values()) == 1


def test_a_key_has_one_live_task_during_replacing(world: World, monkeypatch: MonkeyPatch) -> None:
    if world.kind == "postgresql":
        # Without this patch, a retry would hide a deadlock, apart from the second that each retry
        # takes.
        def once(_: Any, work: Callable[[Any], Any], connect: Any, *_args: Any, **_kw: Any) -> Any:
            with connect() as connection:
                return work(connection)

        monkeypatch.setattr(type(world.store.database), "repeat", once)
    ended = threading.Event()

    def settle() -> None:
        while not ended.is_set():
            world.worker().end(world.claim_due(most=10))

    with ThreadPoolExecutor(4) as pool:
        settling = pool.submit(settle)
        list(pool.map(lambda _: keyed(world, "replace"), range(30)))
        ended.set()
        settling.result(30)
    live = [task.id for task in world.delays.find(status="NOT_COMPLETE", key="k")]
    assert live in ([], [world.owner()])
