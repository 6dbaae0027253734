"""Workers read changed policies and miss no change: no late commit, and no change by SQL."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event

from tests.world import NO_POLICIES, PolicyReader, World

MANY = 60


@pytest.fixture
def reader(world: World) -> PolicyReader:
    return PolicyReader(world)


def insert_limits(world: World, count: int = MANY, **values: Any) -> None:
    """Insert policies by SQL."""
    usual = {"kind": "tag", "is_paused": False, "concurrency": 5, "version": 1, **values}
    world.insert("policies", *({**usual, "name": f"p{number:05}"} for number in range(count)))


def limit(world: World, tag: str, concurrency: int) -> None:
    world.delays.policies.set(tag=tag, concurrency=concurrency)


def test_policies_are_read_when_one_has_changed(world: World, reader: PolicyReader) -> None:
    child, of_a_starting_worker = PolicyReader(world), PolicyReader(world)
    child.follow(NO_POLICIES)
    assert child.read == [], "without policies nobody asks"
    insert_limits(world)
    assert len(reader.refresh()) == MANY
    reader.refresh()
    child.follow(reader.stamp)
    limit(world, "p00007", 9)
    limit(world, "new", 1)
    assert reader.refresh()["p00007"].concurrency == 9
    assert (reader.read, len(reader.known)) == ([MANY, 0, MANY + 1], MANY + 1)
    for _ in range(3):
        child.follow(reader.stamp)
    assert (child.read, child.known) == ([MANY, MANY + 1], reader.known), "and only if it is needed"
    assert of_a_starting_worker.follow(None) == reader.known


def test_a_change_that_is_committed_late_is_read_too(world: World, reader: PolicyReader) -> None:
    """A later change of another policy must not become visible before this change."""
    limit(world, "first", 1)
    reader.refresh()
    will_commit, may_commit = threading.Event(), threading.Event()

    def dawdle(_connection: Any) -> None:
        if threading.current_thread().name.startswith("slow"):
            will_commit.set()
            assert may_commit.wait(30)

    event.listen(world.engine, "commit", dawdle)
    with ThreadPoolExecutor(1, "slow") as slow, ThreadPoolExecutor(1) as quick:
        late = slow.submit(limit, world, "late", 2)
        assert will_commit.wait(30)
        other = quick.submit(limit, world, "other", 3)
        for _ in range(20):
            if not other.done():
                reader.refresh()
        may_commit.set()
        late.result(30)
        other.result(30)
    event.remove(world.engine, "commit", dawdle)
    limits = {name: policy.concurrency for name, policy in reader.refresh().items()}
    assert limits == {"first": 1, "late": 2, "other": 3}


@pytest.mark.parametrize("how", ["update", "insert", "delete"])
def test_a_change_by_sql_is_found(world: World, reader: PolicyReader, how: str) -> None:
    limit(world, "sms", 1)
    if how == "delete":
        world.delays.policies.pause(tag="mail")
    reader.refresh()
    child = PolicyReader(world)
    child.follow(reader.stamp)
    if how == "delete":
        world.delete("policies", name="mail")
    elif how == "update":
        world.set_columns("policies", {"name": "sms"}, is_paused=True, version=2)
    else:
        insert_limits(world, 1, is_paused=True)
    reader.refresh()
    assert reader.paused == {"delete": set(), "update": {"sms"}, "insert": {"p00000"}}[how]
    child.follow(reader.stamp)
    assert child.paused == reader.paused, "and so do the processes of its pool"


def test_a_server_with_equally_many_changes_is_found(world: World, reader: PolicyReader) -> None:
    """After a failover that lost changes, the count and the versions may be equal by chance."""
    limit(world, "mail", 1)
    limit(world, "sms", 1)
    reader.refresh()
    before = reader.stamp
    # SQLite counts milliseconds, so this time must differ from the time of the previous change.
    later = world.now() + timedelta(seconds=1)
    world.set_columns("policies", {"name": "mail"}, concurrency=2, update_time=later)
    assert reader.refresh()["mail"].concurrency == 2
    assert reader.stamp != before
    child = PolicyReader(world)
    child.follow(pickle.loads(pickle.dumps(reader.stamp)))
    assert child.stamp == reader.stamp


def test_a_late_refresh_replaces_no_newer_policies(world: World, reader: PolicyReader) -> None:
    limit(world, "mail", 1)
    reader.refresh()
    limit(world, "mail", 2)

    def overtake() -> None:
        reader.after_read = lambda: None
        limit(world, "mail", 3)
        reader.refresh()

    reader.after_read = overtake
    assert reader.refresh()["mail"].concurrency == 3


def test_chunks_of_other_threads_discard_no_read(world: World, reader: PolicyReader) -> None:
    reader.refresh()
    limit(world, "mail", 1)
    # In a pool of threads, a chunk begins while the thread of the policies reads.
    reader.after_read = lambda: reader.follow(reader.stamp)
    assert reader.refresh()["mail"].concurrency == 1
