"""The Redis timer, and a worker's Redis poller with a pool whose chunks the test ends."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest

from delaytasks import ConfigError
from delaytasks.core import loop as loops
from delaytasks.core import workers as chunk_size
from delaytasks.core.clock import Clock, monotonic
from delaytasks.core.loop import SERVICE_REST_S
from delaytasks.core.settings import load_settings
from delaytasks.timers import redis_timer as redis
from delaytasks.timers.redis_timer import RedisTimer, redis_location
from delaytasks.worker import redis_poller
from tests.proxy import Proxy, proxy_to
from tests.unit.conftest import Gate
from tests.waiting import wait_until
from tests.world import Entry, MainProcess, MakeWorld
from tests.world.recording import RedisTimerHarness as Bench

# -- the `redis` timer hands out each entry once and in time, and again if its poller died --------


@pytest.fixture
def bench(redis_url: str) -> Iterator[Bench]:
    with closing(Bench(redis_url)) as bench:
        yield bench


def put(bench: Bench, late_ms: int, *members: str) -> None:
    """Put these members into each slot, as another program does."""
    at = bench.clock.now_us() // 1000 - late_ms
    for slot in bench.timer.slots("default"):
        bench.timer.link.connect().zadd(bench.timer.keys(slot)[0], dict.fromkeys(members, at))


def test_an_invalid_priority_is_not_requested_from_the_table(bench: Bench) -> None:
    put(bench, 100_000, "1:0:3", "2:0:99999999999999999999")
    [taken] = bench.timer.take({bench.timer.slots("default")[0]: 10}) or []
    assert taken.dropped == 2
    assert sorted(taken.priorities) == [0, 3]


def test_a_slot_that_redis_lost_is_noticed_once(bench: Bench) -> None:
    assert all(some.was_lost for some in bench.take()), "new ones are as good as lost"
    assert not any(some.was_lost for some in bench.take())
    lost = bench.timer.slots("default")[3]
    bench.timer.link.connect().delete(*bench.timer.keys(lost))
    bench.timer.arm([bench.entry(id, 1000) for id in range(1, 100)])
    assert [some.slot for some in bench.take() if some.was_lost] == [lost]
    assert not any(some.was_lost for some in bench.take())


def test_only_an_entry_that_is_first_in_its_slot_is_published(redis_url: str) -> None:
    with closing(Bench(redis_url, _redis_slots=1)) as bench:
        listener = bench.timer.listen(["default"])
        bench.timer.arm([bench.entry(7, 7000)])
        bench.take()
        for some in ([5000], [6000], [5000], [4000], [9000, 1000, 2000]):
            bench.timer.arm([bench.entry(in_ms, in_ms) for in_ms in some])
        bench.timer.link.connect().publish(bench.timer.channel("default"), "end")
        heard: list[bytes] = []
        while b"end" not in heard:
            message = listener.get_message(timeout=5)
            heard += [message["data"]] if message else []
        now = bench.clock.now_us() // 1000
        told = [b"0 %.1f" % (now + in_ms) for in_ms in (5000, 4000, 1000)]
        assert heard == [b"0 0", *told, b"end"], "and of a slot that Redis lost, or that is new"
        listener.close()


def test_invalid_members_of_other_programs_are_counted_and_ignored(bench: Bench) -> None:
    bench.timer.arm([bench.entry(1)])
    wrong = ["0 0", "x", "1", "1:2:3:4", "0:0", f"{2**63}:0", "1:-1", "5:0:99999", "a:b"]
    put(bench, 0, *wrong)
    taken = bench.take()
    assert {some.refused for some in taken} == {len(wrong)}
    assert [entry.id for some in taken for entry in some.entries] == [1]
    bench.timer.take({}, taken)
    assert bench.members("prepare") == []


def test_entries_that_no_worker_would_take_are_not_armed(bench: Bench) -> None:
    wrong = [bench.entry(-1), bench.entry(2, queue="a queue"), bench.entry(3, version=-1)]
    assert bench.timer.arm(wrong)
    assert bench.members("store") == []


@pytest.mark.parametrize(
    ("given", "broker", "url"),
    [
        ("redis://a/1", "amqp://b", "redis://a/1"),
        ("", "redis://b/2", "redis://b/2"),
        ("", "redis://b/2;redis://c/2", "redis://b/2;redis://c/2"),
        ("redis://a;redis://b", None, "redis://a;redis://b"),
        ("", ["rediss://b/2?ssl_cert_reqs=CERT_REQUIRED"], "rediss://b/2?ssl_cert_reqs=required"),
        ("", "redis+socket:///run/x.sock?virtual_host=3", "unix:///run/x.sock?db=3"),
    ],
)
def test_the_redis_is_the_brokers_unless_one_is_named(given: str, broker: Any, url: str) -> None:
    assert ";".join(redis_location(given, broker).urls) == url


def test_sentinels_are_asked_for_the_primary_that_the_url_or_celery_names() -> None:
    url = "sentinel://:secret@a:26379/2;sentinel://b"
    options = {"master_name": "shop", "sentinel_kwargs": {"password": "other"}}
    assert redis_location("", url, options).primary == "shop"
    assert redis_location(url + "?master_name=mail", None, options).primary == "mail"
    with pytest.raises(ConfigError, match="master_name") as caught:
        redis_location(url, None)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="needs a Redis"):
        redis_location("sentinel://a;redis://b", None)


def test_several_urls_may_be_a_list() -> None:
    urls = ["redis://a/0", "redis://b/0"]
    assert load_settings({"delaytasks_timer": urls}, {}).redis_url == "redis://a/0;redis://b/0"


INVALID: list[tuple[str, Any]] = [("", "amqp://u:secret@b"), ("http://u:secret@a", "redis://b")]
WRONG = ["", "redis://:se/cret@a", "redis://a:port/0", "redis://[::1", "redis://a/0?nonsense=1"]
INVALID += [(url, None) for url in (*WRONG, "rediss://a?ssl_cert_reqs=x")]


@pytest.mark.parametrize(("given", "broker"), INVALID)
def test_a_wrong_redis_is_an_error_that_shows_no_password(given: str, broker: Any) -> None:
    with pytest.raises(ConfigError, match=r"delaytasks_timer") as caught:
        redis_location(given, broker)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize("part", [0, 1], ids=["store", "prepare"])
def test_a_key_of_another_type_blocks_only_its_slot_and_is_reported(
    bench: Bench, part: int
) -> None:
    timer, told = bench.timer, []
    bench.events.subscribe(
        lambda name, fields: name == "timer.blocked" and told.append(fields["key"])
    )
    entries = [bench.entry(id) for id in range(1, 101)]
    blocked = timer.slot(entries[0])
    key = timer.keys(blocked)[part]
    timer.link.connect().set(key, "a stranger's")
    assert not timer.arm(entries), "the sweep has to look after some of them"
    others = sorted(entry.id for entry in entries if timer.slot(entry) != blocked)
    assert sorted(bench.take_ids(1000)) == others
    assert timer.is_up
    assert timer.counts(["default"]) is not None
    assert len(told) == 1, "told at once, and not each time"
    assert key in told[0]

    timer.link.connect().delete(key)
    assert timer.arm(entries)
    assert sorted(bench.take_ids(1000)) == [entry.id for entry in entries]


# -- test a worker's Redis poller on a real Redis, with a pool whose chunks the test ends ---------


class Post(MainProcess):
    """The main process of a worker, and the timer of another process."""

    def __init__(
        self, make_world: MakeWorld, url: str, proxy: Proxy, clock: Clock | None = None
    ) -> None:
        settings: dict[str, Any] = {
            "namespace": "t" + secrets.token_hex(4), "_grace_s": 60, "sweep": 60,
            "horizon": 200, "_self_sweep_s": 120, "_publish_limit_s": 2,
        }  # fmt: skip
        world = make_world(timer=proxy.url(url), **settings)
        world.runtime.clock = clock or world.runtime.clock
        world.runtime.timer = world.runtime.redis_timer
        self.timer: RedisTimer = make_world(timer=url, **settings).runtime.redis_timer
        super().__init__(world, is_stepped=False)
        self.poller: Any = self.runtime.redis_poller
        self.forget = self.runtime.sweep_loop.forget_armed = Mock()  # type: ignore[method-assign]

    def start(self) -> None:
        self.runtime.start()
        wait_until(lambda: self.forget.called, 10, "the first read of all slots")

    def arm(self, ids: range, in_s: float = 0, **fields: Any) -> None:
        due = self.clock.now_us() + int(in_s * 1e6)
        assert self.timer.arm([Entry(id, 0, due, **fields) for id in ids])

    def here(self) -> int:
        """Return how many entries this worker has received and not passed on."""
        return self.dispatcher.waiting + sum(self.sizes())

    def wait_for_the_first(self) -> None:
        wait_until(lambda: self.here() >= 40 and len(self.requests) == 2, 5, "the first ones")

    def left(self) -> tuple[int, int]:
        """Return how many entries wait in Redis, and how many are in transit."""
        counts = self.timer.counts(["default"])
        assert counts is not None
        return counts["default"]

    def end_chunk(self, row_s: float) -> list[int]:
        wait_until(lambda: self.requests, 5, "a chunk")
        return [entry.id for entry in self.end(self.sizes()[0], row_s).entries]

    def end_all(self, count: int) -> list[int]:
        """End one chunk after another until `count` rows have run."""
        ran: list[int] = []

        def all_ran() -> bool:
            if self.pool.requests:
                ran.extend(self.end_chunk(0.001))
            return len(ran) == count

        wait_until(all_ran, 10, "all of them to come")
        return ran

    def close(self) -> None:
        self.runtime.stop()
        super().close()
        client = self.timer.link.connect()
        for key in client.scan_iter(f"*{self.world.delays.settings.namespace}*", count=1000):
            client.delete(key)
        self.timer.link.close()


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_size, "FIRST_PREFETCH", 10)


class SetBack(Clock):
    back_us = 0

    def now_us(self) -> int:
        return super().now_us() - self.back_us


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with closing(proxy_to(redis_url)) as proxy:
        yield proxy


@pytest.fixture
def post(make_world: MakeWorld, redis_url: str, proxy: Proxy) -> Iterator[Post]:
    with closing(Post(make_world, redis_url, proxy)) as post:
        yield post
        proxy.heal()


@pytest.mark.slow
def test_entries_taken_ahead_start_on_time(post: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead_ms = 1000  # busy machines need this much time
    for module in (redis_poller, redis):
        monkeypatch.setattr(module, "AHEAD_MS", ahead_ms)
    brought: list[tuple[int, int]] = []
    began: list[int] = []
    hold, take = post.dispatcher.receive, post.dispatcher.take

    def note_hold(entries: Sequence[Entry]) -> None:
        brought.append((post.clock.now_us(), len(entries)))
        hold(entries)

    def note_take(entries: Sequence[Entry]) -> None:
        began.append(post.clock.now_us())
        take(entries)

    post.dispatcher.receive = note_hold  # type: ignore[method-assign]
    post.runtime.wheel_thread._on_due = note_take
    post.start()
    due = post.clock.now_us() + 1_500_000
    post.arm(range(1, 201), in_s=1.5)
    wait_until(lambda: post.here() >= 40, 5, "the first ones")
    ahead = [(at, count) for at, count in brought if count and at < due]
    assert 40 <= sum(count for _, count in ahead) < 50, "one more of each slot at most"
    # The others may still be moved or cancelled.
    assert all(at > due - ahead_ms * 1000 - 1000 for at, _ in ahead)
    assert min(began) >= due - 1000


@pytest.mark.slow
def test_entries_are_taken_up_to_the_capacity_and_more_when_chunks_end(post: Post) -> None:
    post.arm(range(1, 201))
    post.start()
    wait_until(lambda: post.here() >= 40 and post.left()[1] == 0, 5, "the first ones")
    assert post.here() < 50, "one more of each slot at most"
    assert post.left() == (200 - post.here(), 0)
    assert sorted(post.end_all(200)) == list(range(1, 201))
    wait_until(lambda: post.left() == (0, 0), 5, "the last ones to be deleted")


def test_entries_that_wait_longer_since_the_clock_was_set_back_use_no_capacity(
    make_world: MakeWorld, redis_url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (redis_poller, redis):
        monkeypatch.setattr(module, "AHEAD_MS", 5000)
    clock = SetBack()
    with closing(Post(make_world, redis_url, proxy, clock)) as post:
        post.start()
        post.arm(range(1, 201), in_s=4)
        wheel = post.runtime.near_entries.wheel
        wait_until(lambda: len(wheel) >= 40, 5, "what is taken ahead of its time")
        clock.back_us = 3_600_000_000
        post.arm(range(201, 211))
        wait_until(lambda: post.here() == 10, 5, "what is due now")


def test_invalid_messages_of_other_programs_are_ignored_and_counted(post: Post) -> None:
    post.arm(range(1, 101), 100)
    post.start()
    client, channel = post.timer.link.connect(), post.timer.channel("default")
    slot = post.timer.slots("default")[0].name
    garbage: list[Any] = [b"", b"x", b"nobody 5", b"\xff\xff", b"a b c"]
    garbage += [f"{slot} {time}" for time in ("soon", "nan", "-inf")]
    wait_until(lambda: client.publish(channel, garbage[0]), 5, "the listener to subscribe")
    for other in garbage[1:]:
        assert client.publish(channel, other) == 1
    counts = post.world.delays.events.counts
    wait_until(lambda: counts["message.refused"] == len(garbage), 5, "all of it to be refused")
    post.arm(range(101, 102))
    wait_until(lambda: post.here() == 1, 5, "the entry, long before the next look at everything")
    assert counts["loop.failed"] == 0


@pytest.mark.slow
def test_a_queue_that_is_added_is_served(post: Post) -> None:
    post.start()
    post.arm(range(1, 11), queue="mail")
    post.processes.queues = ["default", "mail"]
    wait_until(lambda: len(post.pool.requests) == 2, 5, "what waits in it")
    left = 10 - len(post.end_chunk(0.001))
    post.arm(range(11, 12), queue="mail")
    wait_until(lambda: post.here() == left + 1, 5, "what comes later")


def test_entries_that_a_stopping_worker_has_just_passed_on_are_deleted(post: Post) -> None:
    post.start()
    post.poller._poll_loop.stop()
    post.arm(range(1, 11))
    taken = post.timer.take(dict.fromkeys(post.timer.slots("default"), 10))
    assert post.left() == (0, 10)
    post.poller._passed_on = taken or []
    post.runtime.stop()
    assert post.left() == (0, 0)


def test_a_redis_poller_is_not_woken_without_capacity(post: Post) -> None:
    post.start()
    post.arm(range(1, 101))
    post.wait_for_the_first()
    post.poller.stop()
    request = post.poller._capacity_request
    request.granted.clear()
    request.open()
    post.dispatcher.pump()
    assert not request.granted.is_set()
    while post.pool.requests:
        post.end_chunk(0.001)
    wait_until(request.granted.is_set, 5, "the poller to be woken")


def test_near_rows_are_armed_again_when_redis_lost_a_slot(post: Post) -> None:
    post.arm(range(2, 3), 50)
    post.start()
    post.forget.reset_mock()
    for slot in post.timer.slots("default"):
        post.timer.link.connect().delete(*post.timer.keys(slot))
    post.arm(range(1, 2), 100)
    wait_until(lambda: post.forget.called, 5, "the loss to be noticed by the next entry")


@pytest.mark.slow
def test_without_redis_the_poller_waits_between_two_attempts(post: Post, proxy: Proxy) -> None:
    tries: list[float] = []
    timer, take = post.world.runtime.redis_timer, post.world.runtime.redis_timer.take
    post.start()
    proxy.refuse()
    post.poller._read_all_soon()
    post.poller._poll_loop.wake()
    wait_until(lambda: not timer.is_up, 5, "the flag to go down")
    timer.take = lambda *args: tries.append(monotonic()) or take(*args)
    wait_until(lambda: len(tries) >= 3, 10, "three tries")
    assert tries[2] - tries[0] > SERVICE_REST_S


def test_redis_is_not_read_repeatedly_while_nothing_is_due(post: Post) -> None:
    turns: list[int] = []
    timer, take = post.world.runtime.redis_timer, post.world.runtime.redis_timer.take
    timer.take = lambda *args: turns.append(1) or take(*args)
    post.start()
    loops = post.runtime.watchdog.info
    wait_until(lambda: loops()["redis_listener"]["is_alive"] and turns, 5, "the first looks")
    post.arm(range(1, 2), 0.5)
    wait_until(lambda: post.here() == 1, 5, "the entry")
    assert len(turns) < 10, "at the start, when it listens, after the loss, and when one is due"


@pytest.mark.slow
def test_the_listener_subscribes_again_after_a_failed_call(post: Post) -> None:
    post.start()
    timer = post.world.runtime.redis_timer
    assert timer is not None
    heard, listen = [], timer.listen
    timer.listen = lambda queues: heard.append(queues) or listen(queues)

    def fail(client: Any) -> None:
        raise TimeoutError("as asked")

    assert timer.link.attempt(fail) is None
    wait_until(lambda: heard, 5, "a new subscription")


@pytest.mark.slow
def test_a_poller_that_was_stuck_passes_on_none_of_its_entries(
    post: Post, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, came, stuck = post.world.runtime.redis_timer, list[Entry](), list[threading.Thread]()
    take = timer.take

    def take_once_and_hang(*arguments: Any) -> Any:
        taken = take(*arguments)
        if not stuck and any(some.entries for some in taken or ()):
            stuck.append(threading.current_thread())
            assert gate.is_open.wait(60)
        return taken

    timer.take = take_once_and_hang
    post.dispatcher.receive = came.extend  # type: ignore[assignment, method-assign]
    post.start()
    post.arm(range(1, 2))
    wait_until(lambda: stuck, 10, "the poller to take the entry")
    monkeypatch.setattr(loops, "monotonic", lambda: monotonic() + 5)
    wait_until(lambda: came, 15, "another thread to bring it")
    gate.is_open.set()
    stuck[0].join(10)
    assert not stuck[0].is_alive()
    assert [entry.id for entry in came] == [1]
