"""The Redis timer, what strangers write into its Redis, and a worker that takes its entries there.

The model of tests/property/test_redis_timer.py and the simulation cover dead pollers and outages,
and how soon a worker notices new entries, queues and losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest

from tests.waiting import wait_until
from tests.world import Entry, MainProcess, MakeWorld
from tests.world.recording import RedisTimerHarness as Bench


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
    assert bench.try_take(dict.fromkeys(bench.timer.slots("default"), 10)) is None
    assert not bench.timer.is_up
    bench.timer.link.connect().delete(key)
    wait_until(lambda: bench.timer.arm([bench.entry(1)]), 5, "the next attempt")
    assert bench.take_ids() == [1]


def test_a_worker_survives_garbage_and_does_not_read_redis_repeatedly(
    make_world: MakeWorld, bench: Bench, redis_url: str
) -> None:
    settings: Any = {"namespace": bench.settings.namespace, "_grace_s": 60, "sweep": 60}
    world = make_world(timer=redis_url, horizon=200, _self_sweep_s=120, **settings)
    timer: Any = world.runtime.redis_timer
    world.runtime.timer, timer.take = timer, Mock(wraps=timer.take)
    with closing(MainProcess(world, is_stepped=False)) as main:
        main.runtime.start()
        name = timer.slots("default")[0].name
        garbage: list[Any] = [b"", b"x", b"nobody 5", b"\xff\xff", b"a b c"]
        garbage += [f"{name} {time}" for time in ("soon", "nan", "-inf")]
        client, channel = timer.link.connect(), timer.channel("default")
        for text in garbage:
            wait_until(lambda text=text: client.publish(channel, text), 5, "the listener")  # type: ignore[misc]
        refused = "message.refused"
        wait_until(lambda: world.count(refused) == len(garbage), 5, "all of it to be refused")
        assert timer.arm([Entry(1, 0, main.clock.now_us() + 500_000)])
        wait_until(main.sizes, 5, "the entry, long before the next look at everything")
        assert timer.take.call_count < 10, "at the start, when it listens, and when one is due"
        assert not world.told("loop.failed")
        wait_until(lambda: not bench.members("store") + bench.members("prepare"), 5, "its deletion")
        main.runtime.stop()
