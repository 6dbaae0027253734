"""Failures of brokers, Redis and workers that every timer must survive: no task is lost, and no
task runs twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import update

from delaytasks.runtime import runtime_of
from delaytasks.storage.types import db_now_plus
from delaytasks.timers.redis_timer import RedisTimer
from tests.conformance.timers import ALONE, TIMERS, burst, ran_once
from tests.proxy import proxy_to
from tests.running import BROKERS, QUICK, Deployment
from tests.services import RedisServer

#: The slow path runs a task that the timer lost within the grace period, one sweep and the
#: delivery.
R1_S = QUICK["grace_s"] + QUICK["sweep_s"] + 2
#: Allowance for a busy machine.
SLACK_S = 5


class Rig:
    """A deployment whose broker and optional timer Redis can become unreachable or lose their
    data."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        broker: str,
        broker_url: str,
        redis: RedisServer,
        **settings: Any,
    ) -> None:
        self._redis = redis
        self._proxies = [proxy_to(url) for url in (broker_url, redis.url)]
        urls = [
            proxy.url(url)
            for proxy, url in zip(self._proxies, (broker_url, redis.url), strict=True)
        ]
        self.deployment = Deployment(
            folder, database_url, urls[0], BROKERS[broker][1], **{"redis_url": urls[1], **settings}
        )

    def away(self, how: str) -> None:
        for proxy in self._proxies:
            getattr(proxy, how)()

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.heal()

    def lose(self) -> None:
        """Delete all messages in the broker and all entries in the timer's Redis."""
        d = self.deployment
        with runtime_of(d.delays).celery.connection_for_write() as connection:
            queue = runtime_of(d.delays).publisher.queue("default")(connection)
            queue.declare()
            queue.purge()
        self._redis.client().flushall()

    def close(self) -> None:
        self.heal()
        self.deployment.close()
        for proxy in self._proxies:
            proxy.close()


Make = Callable[..., Rig]


class TimersUnderFaults:
    """Each test breaks a deployment of its own."""

    broker: ClassVar[str]

    @pytest.fixture(params=TIMERS)
    def make(
        self,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        postgresql_url: str,
        start_redis: Callable[[], RedisServer],
    ) -> Iterator[Make]:
        made: list[Rig] = []

        def new(**settings: Any) -> Rig:
            redis = start_redis()
            url = (
                redis.url
                if self.broker == "redis"
                else request.getfixturevalue(BROKERS[self.broker][0])
            )
            made.append(
                Rig(
                    tmp_path,
                    postgresql_url,
                    self.broker,
                    url,
                    redis,
                    timer=request.param,
                    **settings,
                )
            )
            return made[-1]

        yield new
        for rig in made:
            rig.close()

    def test_armed_tasks_wait_for_a_worker_and_survive_the_stop_of_a_worker(
        self, make: Make
    ) -> None:
        d = make(**ALONE).deployment
        runtime_of(d.delays).sweeper.sweep()  # the next sweep is a minute later
        early = [d.schedule() for _ in range(10)]
        first = d.worker()
        later = [d.schedule(delay=3) for _ in range(20)]
        ran_once(d, [*early, d.schedule()])  # sent after their messages
        first.terminate()
        d.worker()
        ran_once(d, later)

    def test_tasks_in_the_memory_of_a_killed_worker_run_after_the_next_sweep(
        self, make: Make
    ) -> None:
        d = make().deployment
        first = d.worker()
        held = [d.schedule(delay=3) for _ in range(20)]  # due only after the worker is killed
        ran_once(d, [d.schedule()])  # sent after their messages
        first.kill()
        assert messages(d) == [], (
            "acknowledged on receipt: no timeout of a broker's has anything to deliver again"
        )
        assert unacknowledged(d) == 0, "nor has Celery's of Redis"
        d.worker()
        ran_once(d, held, deadline_s=3 + R1_S + SLACK_S)

    def test_tasks_that_the_timer_lost_or_refused_run_after_the_next_sweep(
        self, make: Make
    ) -> None:
        rig = make()
        d = rig.deployment
        tasks = [d.schedule(delay=delay_s) for delay_s in (0, 0, 2, 2)]
        rig.lose()
        d.worker()
        ran_once(d, tasks, deadline_s=2 + R1_S + SLACK_S)
        tasks = [d.schedule(delay=0.3) for _ in range(5)]
        rig.lose()
        for how in ("swallow", "refuse"):
            rig.away(how)
            began = time.monotonic()
            tasks += [d.schedule(delay=0.2) for _ in range(5)]
            assert time.monotonic() - began < 2, "nobody waits for a broker that is away"
            rig.heal()
        ran_once(d, tasks, deadline_s=R1_S + SLACK_S)

    def test_far_tasks_are_only_rows_until_a_sweep_arms_them_in_batches(self, make: Make) -> None:
        d = make(**ALONE).deployment

        def waiting() -> list[list[int]]:
            timer = runtime_of(d.delays).timer
            return messages(d) + (slots(timer) if isinstance(timer, RedisTimer) else [])

        far = burst(d, "test.note", 250, due_s=3600, body={})
        assert waiting() == []
        t = d.store.schema.tasks
        # Simulate that an hour passed.
        with d.store.database.begin() as connection:
            connection.execute(update(t).values(expected_time=db_now_plus(60)))
        runtime_of(d.delays).sweeper.sweep()
        found = waiting()
        assert len(found) <= 8, "messages of 100, or slots"
        assert sorted(id for ids in found for id in ids) == sorted(task.id for task in far)


def messages(d: Deployment) -> list[list[int]]:
    """Take all waiting messages from the broker, and return the ids of each message."""
    found = []
    with runtime_of(d.delays).celery.connection_for_write() as connection:
        queue = runtime_of(d.delays).publisher.queue("default")(connection)
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            found.append([item[0] for item in message.payload[0][0]])
    return [ids for ids in found if ids]


def unacknowledged(d: Deployment) -> int:
    """Return how many messages Redis would redeliver after its visibility timeout.

    Brokers that detect a closed connection have already redelivered them.
    """
    with runtime_of(d.delays).celery.connection_for_write() as connection:
        channel = connection.default_channel
        return (
            int(channel.client.hlen(channel.unacked_key)) if hasattr(channel, "unacked_key") else 0
        )


def slots(timer: RedisTimer) -> list[list[int]]:
    """Return the ids that wait in each slot."""
    members = [
        timer.link.connect().zrange(timer.keys(slot)[0], 0, -1) for slot in timer.slots("default")
    ]
    found = [[int(member.split(b":")[0]) for member in some if member != b"."] for some in members]
    return [ids for ids in found if ids]
