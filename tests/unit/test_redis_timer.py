"""The Redis timer, and a worker that takes its entries from Redis, whose chunks the test ends.

The model of tests/property/test_redis_timer.py and the simulation cover dead pollers and outages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.waiting import wait_until
from tests.world import MakeWorld
from tests.world.recording import RedisTimerHarness as Bench
from tests.world.redis_worker import RedisWorker


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    with closing(Bench(redis_url)) as bench:
        yield bench


def test_a_slot_that_redis_lost_is_noticed_once(bench: Bench) -> None:
    assert all(some.was_lost for some in bench.take()), "new ones are as good as lost"
    assert not any(some.was_lost for some in bench.take())
    lost = bench.lose_slot()
    bench.timer.arm([bench.entry(id, 1000) for id in range(1, 100)])
    assert [some.slot for some in bench.take() if some.was_lost] == [lost]
    assert not any(some.was_lost for some in bench.take())


def test_invalid_members_of_other_programs_are_counted_and_ignored(bench: Bench) -> None:
    no_worker_takes = [bench.entry(-1), bench.entry(2, queue="a q"), bench.entry(3, version=-1)]
    assert bench.timer.arm(no_worker_takes)
    assert bench.members("store") == []
    bench.timer.arm([bench.entry(1)])
    wrong = ["0 0", "x", "1", "1:2:3:4", "0:0", f"{2**63}:0", "1:-1", "5:0:3", "a:b"]
    bench.put(0, *wrong)
    taken = bench.take()
    assert {some.refused for some in taken} == {len(wrong)}
    assert [entry.id for some in taken for entry in some.entries] == [1]
    bench.hand_on(taken)
    assert bench.members("prepare") == []


@pytest.mark.parametrize("part", ["store", "prepare"])
def test_a_key_of_another_type_counts_as_an_outage(bench: Bench, part: str) -> None:
    key = bench.block_slot(bench.timer.slot(bench.entry(1)), part)
    assert bench.timer.take(dict.fromkeys(bench.timer.slots("default"), 10)) is None
    assert not bench.timer.is_up
    bench.timer.link.connect().delete(key)
    wait_until(lambda: bench.timer.arm([bench.entry(1)]), 5, "the next attempt")
    assert bench.take_ids() == [1]


@pytest.fixture
def post(make_world: MakeWorld, redis_url: str) -> Iterator[RedisWorker]:
    with closing(RedisWorker(make_world, redis_url)) as post:
        yield post


def test_a_worker_notices_new_entries_queues_and_losses(post: RedisWorker) -> None:
    post.arm(range(1, 201))
    post.start()
    wait_until(lambda: post.here() >= 40 and post.left()[1] == 0, 5, "the first ones")
    assert post.here() < 50, "one more of each slot at most"
    assert post.left() == (200 - post.here(), 0)
    assert sorted(post.end_all(200)) == list(range(1, 201))
    wait_until(lambda: post.left() == (0, 0), 5, "the last ones to be deleted")

    garbage: list[Any] = [b"", b"x", b"nobody 5", b"\xff\xff", b"a b c"]
    garbage += [f"{post.slot_name} {time}" for time in ("soon", "nan", "-inf")]
    for other in garbage:
        wait_until(lambda other=other: post.publish(other), 5, "the listener")  # type: ignore[misc]
    refused = "message.refused"
    wait_until(lambda: post.world.count(refused) == len(garbage), 5, "all of it to be refused")
    post.arms_again.reset_mock()
    post.arm(range(201, 202))
    wait_until(lambda: post.here() == 1, 5, "the entry, long before the next look at everything")
    assert not post.world.told("loop.failed")

    post.arm(range(202, 203), queue="mail")
    post.processes.queues = ["default", "mail"]
    wait_until(lambda: post.here() == 2, 5, "what waits in the other queue")
    post.arm(range(203, 204), queue="mail")
    wait_until(lambda: post.here() == 3, 5, "what comes later")
    post.lose_slots()
    post.arms_again.reset_mock()
    post.arm(range(204, 205), 100)
    wait_until(lambda: post.arms_again.called, 5, "the loss to be noticed by the next entry")


def test_redis_is_not_read_repeatedly_while_nothing_is_due(post: RedisWorker) -> None:
    post.start()
    wait_until(lambda: post.reads, 5, "the first looks")
    post.arm(range(1, 2), 0.5)
    wait_until(lambda: post.here() == 1, 5, "the entry")
    assert len(post.reads) < 10, "at the start, when it listens, after a loss, and when one is due"
    wait_until(lambda: post.left() == (0, 0), 5, "it to be deleted")
    post.stop_after_passing_on(range(2, 11))
    assert post.left() == (0, 0), "what was just passed on is deleted at the stop"
