"""A Celery app with an in-memory broker whose delayed tasks are rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from delaytasks import DelayTask, DelayTasks
from delaytasks.durable_eta.stored_message import StoredMessage
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.recording import RecordingTimer, record, run_now


def _remind(*args: Any, **kwargs: Any) -> None: ...


class Office:
    """The app and the timer of one test, and the queue of its messages."""

    def __init__(self, url: str, broker: str, **settings: Any) -> None:
        self.queue = "office" + secrets.token_hex(4)
        self.app = Celery(
            self.queue, broker=broker, backend="cache+memory://", set_as_current=False
        )
        self.app.conf.task_default_queue = self.queue
        settings = {"durable_eta": True, "table_prefix": "s_", **settings}
        self.delays = DelayTasks(self.app, url, **settings)
        self.timer: RecordingTimer = record(self.delays)
        self.remind = self.app.task(_remind, name="durable.remind")

    def rows(self) -> list[DelayTask]:
        return list(self.delays.find(tag="celery:durable.remind"))

    def message(self) -> StoredMessage:
        """Return the message of the only row."""
        (row,) = self.rows()
        return StoredMessage.of_body(row.body)

    def publish(self) -> DelayTask:
        """Run the only row, and return it as it is then."""
        (row,) = self.rows()
        return run_now(self.delays, row)

    def published(self) -> list[Any]:
        """Return the messages in the queue of the broker, which removes them."""
        found = []
        with self.app.connection_for_read() as connection:
            queue = self.app.amqp.queues[self.queue](connection.default_channel)
            queue.declare()
            while (message := queue.get(no_ack=True)) is not None:
                found.append(message)
        return found


@pytest.fixture
def make_office(store: Store) -> Iterator[Callable[..., Office]]:
    made: list[Office] = []
    url = store.database.url.render_as_string(hide_password=False)

    def make(broker: str = "memory://", **settings: Any) -> Office:
        made.append(Office(url, broker, **settings))
        return made[-1]

    yield make
    for office in made:
        runtime_of(office.delays).close()
        office.app.close()


@pytest.fixture
def office(make_office: Callable[..., Office]) -> Office:
    return make_office()
