"""A project with processors, and its testers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from celery import Celery

from delaytasks import DelayTasks
from delaytasks.storage.store import Store
from delaytasks.testing import DelaysTester


class KitShop:
    """A project whose processors note what they did."""

    def __init__(self, url: str) -> None:
        #: Nothing listens at this address: a test that contacts the broker fails.
        app = Celery("shop", broker="amqp://localhost:1//", set_as_current=False)
        app.conf.update(broker_connection_retry=False, broker_connection_timeout=0.1)
        self.celery = app
        self.delays = DelayTasks(app, url, table_prefix="s_")
        self.noted: list[Any] = []
        #: The errors that the next runs of `order.pay` and `order.bill` raise.
        self.errors: list[Exception] = []
        self.delays.processor("order.close")(self.noted.append)
        self.delays.processor("order.pay", retries="1m 5m")(self._pay)
        self.delays.processor("order.bill")(self._pay)
        self.delays.processor("order.mail", in_flight=5)(self._mail)

    def _pay(self, body: Any) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.noted.append(body)

    async def _mail(self, body: Any) -> None:
        self.noted.append(("mail", body))


@pytest.fixture
def shop(store: Store, database_url: str) -> Iterator[KitShop]:
    made = KitShop(database_url)
    yield made
    made.delays.close()


@pytest.fixture
def start(shop: KitShop) -> Iterator[Callable[..., DelaysTester]]:
    """Start testers of the shop, which the test need not stop."""
    with ExitStack() as started:
        yield lambda **options: started.enter_context(DelaysTester(shop.delays, **options))


@pytest.fixture
def tester(start: Callable[..., DelaysTester]) -> DelaysTester:
    return start()
