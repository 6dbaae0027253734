"""The simulated Redis answers the timer's commands like a real Redis server."""

from __future__ import annotations

import random
from typing import Any
from uuid import uuid4

import redis

from chaos.simulation.redis import Redis
from delaytasks.broker.redis_timer import _NAMES, ARM, TAKE
from tests.waiting import wait_until

STEPS = 3000


def test_the_simulated_redis_answers_as_a_real_one(redis_url: str) -> None:
    real, chance = redis.Redis.from_url(redis_url), random.Random(1)
    tag = f"test.{uuid4().hex}"
    store, prepare, channel = f"{{{tag}}}.store", f"{{{tag}}}.prepare", f"{tag}.earlier"
    published: list[bytes] = []
    simulated = Redis(lambda _channel, data: published.append(data))
    for script in (ARM, TAKE):
        real.script_load(script)
        simulated.load(script)
    listener = real.pubsub(ignore_subscribe_messages=True)
    listener.subscribe(channel)
    wait_until(lambda: real.pubsub_numsub(channel)[0][1], 5, "the subscription")
    heard: list[bytes] = []
    try:
        for step in range(STEPS):
            words = some_command(chance, step, store, prepare, channel)
            if words is None:
                real.delete(store, prepare)
                simulated.sets.clear()
                continue
            assert plain(real.execute_command(*words)) == plain(simulated.call(*words)), words
            for key in (store, prepare):
                scores: Any = real.zrange(key, 0, -1, withscores=True)
                there = {member.decode(): score for member, score in scores}
                assert there == simulated.sets.get(key, {}), words

        def all_received() -> bool:
            while (message := listener.get_message()) is not None:
                heard.append(message["data"])
            return len(heard) >= len(published)

        wait_until(all_received, 5, "all notices")
        assert len(heard) > STEPS / 50
        assert [said.split()[0] for said in heard] == [said.split()[0] for said in published]
        assert [float(it.split()[1]) for it in heard] == [float(it.split()[1]) for it in published]
    finally:
        listener.close()
        real.delete(store, prepare)
        real.close()


def some_command(
    chance: random.Random, step: int, store: str, prepare: str, channel: str
) -> tuple[Any, ...] | None:
    """Return a random command at a time that grows with `step`, or None to delete all keys."""
    now = 1_900_000_000_000 + step * 20
    members = [f"{chance.randint(1, 40)}:{chance.randint(0, 2)}" for _ in range(3)]
    drawn = chance.random()
    if drawn < 0.01:
        return None
    if drawn < 0.4:
        dues = sorted(now + chance.randint(-900_000, 900_000) / 1000 for _ in members)
        entries = [word for both in zip(dues, members, strict=True) for word in both]
        return "EVALSHA", _NAMES[ARM], 1, store, channel, "1", *entries
    if drawn < 0.5:
        ticket = now + chance.randint(0, 10) * 20
        return "ZREMRANGEBYSCORE", prepare, ticket, ticket
    soon, far = now - chance.choice([300, 600]), now + 200
    times = (now, soon, now + 100.5, far + chance.choice([0, 0.001, 0.123, 0.999]))
    return "EVALSHA", _NAMES[TAKE], 2, store, prepare, *times, chance.randint(0, 4)


def plain(answer: Any) -> Any:
    """Return the answer with parsed numbers: a number has several notations."""
    if not isinstance(answer, list):
        return answer
    *numbers, text, waiting, in_hand = answer
    words = text.split()
    entries = [(member, float(due)) for member, due in zip(words[::2], words[1::2], strict=True)]
    counts = [float(waiting), float(in_hand)]
    return [*numbers, entries, *counts]
