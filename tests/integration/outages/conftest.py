"""A client whose connections to the database and the broker go through proxies."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.proxy import Proxy
from tests.running import Deployment
from tests.waiting import wait_until

LIMIT_S = 0.5
#: A busy machine adds up to this many seconds to a call.
SLACK_S = 0.4


class ProxiedCaller(Deployment):
    """A deployment whose producer reaches the database and the broker through proxies."""

    @property
    def database(self) -> Proxy:
        return self.proxies["database"]

    @property
    def broker(self) -> Proxy:
        return self.proxies["broker"]

    def warm_up(self) -> None:
        """Open all connections before the test."""
        self.delays.schedule_delay("mail", {}, 5)
        self.delays.schedule_delay("mail", {}, 3600, key="warm")
        wait_until(lambda: self.arrived() == 1, 5, "the first message")

    def arms(self) -> bool:
        """Schedule a task, and return whether the timer is up."""
        self.delays.schedule_delay("mail", {}, 5)
        return self.timer_is_up

    def rows(self) -> int:
        return sum(self.counted().values())

    def count(self, event: str) -> int:
        return self.delays.events.counts[event]

    def arrived(self) -> int:
        """Return the number of messages in the broker."""
        with self.broker_queue() as queue:
            return int(queue.queue_declare(passive=False).message_count)

    def close(self) -> None:
        runtime_of(self.delays).store.database.dispose()  # connections may be broken
        super().close()


Connect = Callable[..., ProxiedCaller]


def seconds(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


BROKERS = pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
DATABASES = pytest.mark.parametrize("database", ["postgresql", "mysql"])


@pytest.fixture
def connect(deploy: Deploy) -> Connect:
    """Make callers that arm in their own thread, unless a setting says something else."""
    places: Any = {"kind": ProxiedCaller, "proxied": ["database", "broker"], "arm": "inline"}

    def new(database: str = "postgresql", broker: str = "redis", **settings: Any) -> ProxiedCaller:
        made: ProxiedCaller = deploy(database, broker, **{**places, **settings})
        return made

    return new
