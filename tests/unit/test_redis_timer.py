"""The `redis` timer hands out each entry once and in time, and again if its poller died."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from delaytasks.core.errors import ConfigError
from delaytasks.core.settings import load_settings
from delaytasks.timers.redis_timer import redis_location
from tests.recording import RedisTimerHarness


@pytest.fixture
def bench(redis_url: str) -> Iterator[RedisTimerHarness]:
    bench = RedisTimerHarness(redis_url)
    yield bench
    bench.close()


def test_an_entry_is_taken_as_it_was_armed(bench: RedisTimerHarness) -> None:
    armed = bench.entry(2**63 - 1, version=7, queue="mail", priority=9)
    bench.timer.arm([armed])
    assert [entry for some in bench.take(queue="mail") for entry in some.entries] == [armed]


def test_a_higher_priority_has_a_slot_of_its_own(bench: RedisTimerHarness) -> None:
    entries = [
        bench.entry(id, priority=priority)
        for id, priority in ((1, -7), (1, 0), (1, 1), (2, 1), (3, 9), (4, 99))
    ]
    slots = [bench.timer.slot(entry) for entry in entries]
    assert [slot.priority for slot in slots] == [0, 0, 1, 1, 9, 9]
    assert slots[0] == slots[1]
    assert slots[2] == slots[3]
    bench.timer.arm(entries)
    found = {(some.slot.priority, entry) for some in bench.take() for entry in some.entries}
    assert found == {(slot.priority, entry) for slot, entry in zip(slots, entries, strict=True)}


def test_an_invalid_priority_is_not_requested_from_the_table(bench: RedisTimerHarness) -> None:
    slot = bench.timer.slots("default")[0]
    late = bench.clock.now_us() // 1000 - 100_000
    members = ["1:0:3", "2:0:99999999999999999999"]
    bench.timer.link.connect().zadd(bench.timer.keys(slot)[0], dict.fromkeys(members, late))
    [taken] = bench.timer.take({slot: 10}) or []
    assert taken.dropped == 2
    assert sorted(taken.priorities) == [0, 3]


def test_a_slot_that_redis_lost_is_noticed_once(bench: RedisTimerHarness) -> None:
    assert all(some.was_lost for some in bench.take()), "new ones are as good as lost"
    assert not any(some.was_lost for some in bench.take())
    lost = bench.timer.slots("default")[3]
    bench.timer.link.connect().delete(*bench.timer.keys(lost))
    bench.timer.arm([bench.entry(id, 1000) for id in range(1, 100)])
    assert [some.slot for some in bench.take() if some.was_lost] == [lost]
    assert not any(some.was_lost for some in bench.take())


def test_only_an_entry_that_is_first_in_its_slot_is_published(redis_url: str) -> None:
    bench = RedisTimerHarness(redis_url, redis_slots=1)
    try:
        listener = bench.timer.listen(["default"])
        bench.timer.arm([bench.entry(7, 7000)])
        bench.take()
        for in_ms in (5000, 6000, 5000, 4000):
            bench.timer.arm([bench.entry(in_ms, in_ms)])
        bench.timer.arm([bench.entry(9, 9000), bench.entry(1, 1000), bench.entry(2, 2000)])
        bench.timer.link.connect().publish(bench.timer.channel("default"), "end")
        heard: list[bytes] = []
        while b"end" not in heard:
            message = listener.get_message(timeout=5)
            heard += [message["data"]] if message else []
        now = bench.clock.now_us() // 1000
        told = [b"0 %.1f" % (now + in_ms) for in_ms in (5000, 4000, 1000)]
        assert heard == [b"0 0", *told, b"end"], "and of a slot that Redis lost, or that is new"
        listener.close()
    finally:
        bench.close()


def test_invalid_members_of_other_programs_are_counted_and_ignored(
    bench: RedisTimerHarness,
) -> None:
    bench.timer.arm([bench.entry(1)])
    wrong = ["0 0", "x", "1", "1:2:3:4", "0:0", f"{2**63}:0", "1:-1", "5:0:99999", "a:b"]
    for slot in bench.timer.slots("default"):
        bench.timer.link.connect().zadd(
            bench.timer.keys(slot)[0], dict.fromkeys(wrong, bench.clock.now_us() // 1000)
        )
    taken = bench.take()
    assert {some.refused for some in taken} == {len(wrong)}
    assert [entry.id for some in taken for entry in some.entries] == [1]
    bench.timer.take({}, taken)
    assert bench.members("prepare") == []


def test_entries_that_no_worker_would_take_are_not_armed(bench: RedisTimerHarness) -> None:
    assert bench.timer.arm(
        [bench.entry(-1), bench.entry(2, queue="a queue"), bench.entry(3, version=-1)]
    )
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
    assert load_settings({"delaytasks_redis_url": urls}, {}).redis_url == "redis://a/0;redis://b/0"


@pytest.mark.parametrize(
    ("given", "broker"), [("", "amqp://u:secret@b"), ("", None), ("http://u:secret@a", "redis://b")]
)
def test_no_redis_is_an_error_that_names_the_setting_and_no_password(
    given: str, broker: Any
) -> None:
    with pytest.raises(ConfigError, match=r"delaytasks_redis_url") as caught:
        redis_location(given, broker)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:se/cret@a",
        "redis://a:port/0",
        "redis://[::1",
        "redis://a/0?nonsense=1",
        "rediss://a?ssl_cert_reqs=x",
    ],
)
def test_an_invalid_url_is_an_error_that_does_not_quote_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"delaytasks_redis_url") as caught:
        redis_location(url, None)
    assert "cret" not in str(caught.value)


@pytest.mark.parametrize("part", [0, 1], ids=["store", "prepare"])
def test_a_key_of_another_type_blocks_only_its_slot_and_is_reported(
    bench: RedisTimerHarness, part: int
) -> None:
    timer, told = bench.timer, []
    bench.events.subscribe(
        lambda name, fields: told.append(fields["key"]) if name == "timer.blocked" else None
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
