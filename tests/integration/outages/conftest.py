"""A client whose connections to the database and the broker go through proxies."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from sqlalchemy import func, select

from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of
from tests.conftest import closing_all, open_store
from tests.proxy import proxy_to
from tests.running import delete_keys
from tests.waiting import wait_until

LIMIT_S = 0.5
#: A busy machine adds up to this many seconds to a call.
SLACK_S = 0.4


class ProxiedCaller:
    """Provide a `DelayTasks` whose connections go through proxies, and whose calls arm."""

    def __init__(self, database_url: str, broker_url: str, **settings: Any) -> None:
        self.database, self.broker = proxy_to(database_url), proxy_to(broker_url)
        self.namespace = "out" + secrets.token_hex(4)
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.delays = self.connect(database_url, broker_url, **settings)
        self.store = open_store(database_url, table_prefix=self.namespace + "_")
        self._broker_url = broker_url

    def connect(self, database_url: str, broker_url: str, **settings: Any) -> DelayTasks:
        app = Celery("producer", broker=self.broker.url(broker_url), set_as_current=False)
        names = {"namespace": self.namespace, "table_prefix": self.namespace + "_"}
        settings = {"arm": "inline", **names, **settings}
        delays = DelayTasks(app, self.database.url(database_url), **settings)
        delays.events.subscribe(lambda name, fields: self.seen.append((name, fields)))
        return delays

    def warm_up(self) -> None:
        """Open all connections before the test."""
        self.delays.schedule_delay("mail", {}, 5)
        self.delays.schedule_delay("mail", {}, 3600, key="warm")
        wait_until(lambda: self.arrived() == 1, 5, "the first message")

    def arms(self) -> bool:
        """Schedule a task, and return whether the timer is up."""
        self.delays.schedule_delay("mail", {}, 5)
        return runtime_of(self.delays).producer_timer.is_up

    def rows(self) -> int:
        with self.store.database.auto.connect() as connection:
            return connection.execute(
                select(func.count()).select_from(self.store.schema.tasks)
            ).scalar_one()

    def count(self, event: str) -> int:
        return self.delays.events.counts[event]

    def arrived(self) -> int:
        """Return the number of messages in the broker."""
        with Connection(self._broker_url) as connection:
            queue = runtime_of(self.delays).publisher.queue("default")(connection)
            return int(queue.queue_declare(passive=False).message_count)

    def close(self) -> None:
        self.database.heal()
        self.broker.heal()
        self.delays.close()
        self.store.schema.metadata.drop_all(self.store.database.tx)
        self.store.close()
        with Connection(self._broker_url) as connection:
            queue = runtime_of(self.delays).publisher.queue("default")(connection)
            queue.delete()
            queue.exchange.delete()
            delete_keys(connection, self.namespace)
        self.database.close()
        self.broker.close()


Connect = Callable[..., ProxiedCaller]


def seconds(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


BROKERS = pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
DATABASES = pytest.mark.parametrize("database", ["postgresql", "mysql"])


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    def new(database: str = "postgresql", broker: str = "redis", **settings: Any) -> ProxiedCaller:
        urls = [request.getfixturevalue(f"{name}_url") for name in (database, broker)]
        return ProxiedCaller(*urls, **settings)

    with closing_all(new) as connect:
        yield connect
