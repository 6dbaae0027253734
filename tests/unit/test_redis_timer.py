"""The Redis timer, and a worker that takes its entries from Redis, whose chunks the test ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.proxy import Proxy, proxy_to
from tests.waiting import wait_until
from tests.world import MakeWorld, MonkeyPatch
from tests.world.recording import RedisTimerHarness as Bench
from tests.world.redis_worker import RedisWorker

# -- the timer hands out each entry once and in time, and again if its poller died ----------------


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
    bench.timer.arm([bench.entry(1)])
    wrong = ["0 0", "x", "1", "1:2:3:4", "0:0", f"{2**63}:0", "1:-1", "5:0:3", "a:b"]
    bench.put(0, *wrong)
    taken = bench.take()
    assert {some.refused for some in taken} == {len(wrong)}
    assert [entry.id for some in taken for entry in some.entries] == [1]
    bench.hand_on(taken)
    assert bench.members("prepare") == []


def test_entries_that_no_worker_would_take_are_not_armed(bench: Bench) -> None:
    wrong = [bench.entry(-1), bench.entry(2, queue="a queue"), bench.entry(3, version=-1)]
    assert bench.timer.arm(wrong)
    assert bench.members("store") == []


@pytest.mark.parametrize("part", ["store", "prepare"])
def test_a_key_of_another_type_counts_as_an_outage(bench: Bench, part: str) -> None:
    key = bench.block_slot(bench.timer.slot(bench.entry(1)), part)
    assert bench.timer.take(dict.fromkeys(bench.timer.slots("default"), 10)) is None
    assert not bench.timer.is_up
    bench.timer.link.connect().delete(key)
    wait_until(lambda: bench.timer.arm([bench.entry(1)]), 5, "the next attempt")
    assert bench.take_ids() == [1]


# -- a worker that takes entries from a real Redis ------------------------------------------------

Make = Callable[..., RedisWorker]


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with closing(proxy_to(redis_url)) as proxy:
        yield proxy


@pytest.fixture
def make(make_world: MakeWorld, redis_url: str, proxy: Proxy, monkeypatch: MonkeyPatch) -> Make:
    return lambda **options: RedisWorker(make_world, redis_url, proxy, monkeypatch, **options)


@pytest.fixture
def post(make: Make, proxy: Proxy) -> Iterator[RedisWorker]:
    with closing(make()) as post:
        yield post
        proxy.heal()


@pytest.mark.slow
def test_entries_are_taken_up_to_the_capacity_and_more_when_chunks_end(post: RedisWorker) -> None:
    post.arm(range(1, 201))
    post.start()
    wait_until(lambda: post.here() >= 40 and post.left()[1] == 0, 5, "the first ones")
    assert post.here() < 50, "one more of each slot at most"
    assert post.left() == (200 - post.here(), 0)
    turns = post.count_turns()
    for _ in range(100):
        post.dispatcher.pump()
        threading.Event().wait(0.002)
    assert turns.call_count < 20, "no chunk has ended, so that nothing wakes the poller"
    assert sorted(post.end_all(200)) == list(range(1, 201))
    wait_until(lambda: post.left() == (0, 0), 5, "the last ones to be deleted")


def test_entries_that_wait_longer_since_the_clock_was_set_back_use_no_capacity(make: Make) -> None:
    with closing(make(ahead_ms=5000)) as post:
        post.start()
        post.arm(range(1, 201), in_s=4)
        wait_until(lambda: post.held >= 40, 5, "what is taken ahead of its time")
        post.clock.back_us = 3_600_000_000
        post.arm(range(201, 211))
        wait_until(lambda: post.here() == 10, 5, "what is due now")


def test_invalid_messages_of_other_programs_are_ignored_and_counted(post: RedisWorker) -> None:
    post.arm(range(1, 101), 100)
    post.start()
    garbage: list[Any] = [b"", b"x", b"nobody 5", b"\xff\xff", b"a b c"]
    garbage += [f"{post.slot_name} {time}" for time in ("soon", "nan", "-inf")]
    wait_until(lambda: post.publish(garbage[0]), 5, "the listener to subscribe")
    for other in garbage[1:]:
        assert post.publish(other) == 1
    refused = "message.refused"
    wait_until(lambda: post.world.count(refused) == len(garbage), 5, "all of it to be refused")
    post.arm(range(101, 102))
    wait_until(lambda: post.here() == 1, 5, "the entry, long before the next look at everything")
    assert post.world.count("loop.failed") == 0


@pytest.mark.slow
def test_a_queue_that_is_added_is_served(post: RedisWorker) -> None:
    post.start()
    post.arm(range(1, 11), queue="mail")
    post.processes.queues = ["default", "mail"]
    wait_until(lambda: len(post.pool.requests) == 2, 5, "what waits in it")
    left = 10 - len(post.end_chunk())
    post.arm(range(11, 12), queue="mail")
    wait_until(lambda: post.here() == left + 1, 5, "what comes later")


def test_entries_that_a_stopping_worker_has_just_passed_on_are_deleted(post: RedisWorker) -> None:
    post.start()
    post.stop_after_passing_on(range(1, 11))
    assert post.left() == (0, 0)


def test_near_rows_are_armed_again_when_redis_lost_a_slot(post: RedisWorker) -> None:
    post.arm(range(2, 3), 50)
    post.start()
    post.arms_again.reset_mock()
    post.lose_slots()
    post.arm(range(1, 2), 100)
    wait_until(lambda: post.arms_again.called, 5, "the loss to be noticed by the next entry")


@pytest.mark.slow
def test_without_redis_the_poller_waits_between_two_tries(post: RedisWorker, proxy: Proxy) -> None:
    post.start()
    proxy.refuse()
    post.look_at_all()
    wait_until(lambda: not post.own_timer.is_up, 5, "the flag to go down")
    post.reads.clear()
    wait_until(lambda: len(post.reads) >= 3, 10, "three tries")
    assert post.reads[2] - post.reads[0] > 1, "a service rests for a second after a failure"


def test_redis_is_not_read_repeatedly_while_nothing_is_due(post: RedisWorker) -> None:
    post.start()
    wait_until(lambda: post.reads, 5, "the first looks")
    post.arm(range(1, 2), 0.5)
    wait_until(lambda: post.here() == 1, 5, "the entry")
    assert len(post.reads) < 10, "at the start, when it listens, after a loss, and when one is due"


@pytest.mark.slow
def test_the_listener_subscribes_again_after_a_failed_call(post: RedisWorker) -> None:
    post.start()
    heard, listen = [], post.own_timer.listen
    post.own_timer.listen = lambda queues: heard.append(queues) or listen(queues)

    def fail(client: Any) -> None:
        raise TimeoutError("as asked")

    assert post.own_timer.link.attempt(fail) is None
    wait_until(lambda: heard, 5, "a new subscription")
