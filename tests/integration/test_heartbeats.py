"""Test hundreds of connections whose heartbeats postpone their timeouts on a real worker.

Later some of the connections become silent.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from delaytasks import NewTask
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment, combinations
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TIMEOUT_S, EVERY_S = 4.0, 1.0
ALIVE = [f"connection {number}" for number in range(300)]
SILENT = set(ALIVE[::8])
#: A busy machine adds up to this many seconds to RELIABILITY's bound of grace period, sweep
#: interval and dispatch.
SLACK_S = 10


class Connections(Deployment):
    """Run a server that regularly reports the connections from which it received a heartbeat."""

    def heartbeat(self, alive: list[str]) -> list[str]:
        gone = self.delays.touch(tag="test.note", key=alive, delay=TIMEOUT_S).gone
        body = {"file": str(self.file)}
        self.delays.schedule_many(
            (NewTask("test.note", body, TIMEOUT_S, key=key) for key in gone), on_conflict="replace"
        )
        return gone

    def live(self, alive: list[str], is_over: Callable[[], bool], most_s: float) -> None:
        """Send heartbeats for `alive` until `is_over()`, for at most `most_s` seconds."""
        clock = runtime_of(self.delays).clock
        until = clock.now() + timedelta(seconds=most_s)
        while clock.now() < until and not is_over():
            next_at = clock.now() + timedelta(seconds=EVERY_S)
            assert self.heartbeat(alive) == [], "who is heard from does not time out"
            wait_until(lambda next_at=next_at: clock.now() >= next_at, 5, "the next heartbeat")  # type: ignore[misc]

    def count_messages(self) -> list[int]:
        """Return a list to which each later send in this process appends its number of messages."""
        sent: list[int] = []
        send = runtime_of(self.delays).publisher.send

        def counting(name: str, queue: str, messages: list[Any]) -> bool:
            sent.append(len(messages))
            return send(name, queue, messages)

        runtime_of(self.delays).publisher.send = counting  # type: ignore[method-assign]
        return sent


@pytest.fixture
def connections(deploy: Deploy, database: str, broker: str, timer: str) -> Deployment:
    return deploy(database, broker, kind=Connections, timer=timer)


@pytest.mark.parametrize(
    ("database", "broker", "pool", "timer"),
    combinations("postgresql-redis-threads-redis", is_quick=True)
    + combinations("postgresql-redis-prefork-eta mysql-rabbitmq-prefork-eta"),
)
def test_only_connections_without_heartbeats_time_out(connections: Connections, pool: str) -> None:
    d = connections
    d.worker(pool=pool)
    assert d.heartbeat(ALIVE) == ALIVE, "the first time all are new"
    sent = d.count_messages()
    d.live(ALIVE, lambda: False, TIMEOUT_S)
    # The worker's first sweep arms these rows if it starts after the tasks were scheduled.
    armed = d.events().get("sweep.armed")
    d.live(ALIVE, lambda: False, 1.5 * TIMEOUT_S)
    assert (d.runs(), sent) == ([], []), "nothing fires, and nothing is sent"
    assert d.events().get("sweep.armed") == armed, "by the sweep neither"

    tasks = {str(task.id): task.key for task in d.delays.find(tag="test.note", limit=len(ALIVE))}
    assert sorted(tasks.values()) == sorted(ALIVE)
    loud = [key for key in ALIVE if key not in SILENT]
    d.live(loud, lambda: len(d.runs()) >= len(SILENT), TIMEOUT_S + SLACK_S)
    fired = [tasks[id] for id, _, _ in d.runs()]
    assert (len(fired), set(fired)) == (len(SILENT), SILENT), "each of them once"
    assert d.early() == []
    assert set(d.heartbeat(ALIVE)) == SILENT
    assert d.heartbeat(ALIVE) == [], "who speaks again is waited for again"
