"""After a primary becomes a replica, the pools drop their connections to it and open new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event

from delaytasks import DelayTasks
from delaytasks.core.task import DelayTask
from delaytasks.runtime import runtime_of
from tests.conftest import open_store
from tests.recording import delays_on, record

pytestmark = pytest.mark.slow

#: These statements make a session refuse writes, like the server of a former primary.
READ_ONLY = {
    "postgresql": "SET default_transaction_read_only = on",
    "mysql": "SET SESSION TRANSACTION READ ONLY",
}


class Cluster:
    """A cluster whose new connections lead to the former primary until `is_promoted` is set."""

    def __init__(self, delays: DelayTasks) -> None:
        self._database = runtime_of(delays).store.database
        self.is_promoted = True
        for engine in (self._database.auto, self._database.tx):
            event.listen(engine, "connect", self._connected)
        self._database.dispose()

    def _connected(self, connection: Any, _record: Any) -> None:
        if not self.is_promoted:
            with connection.cursor() as cursor:
                cursor.execute(READ_ONLY[self._database.url.get_backend_name()])
            connection.commit()

    def demote(self) -> None:
        """Fill both pools with connections to the server that becomes the former primary."""
        self._database.dispose()
        self.is_promoted = False
        for engine in (self._database.auto, self._database.tx):
            connections = [engine.connect() for _ in range(3)]
            for connection in connections:
                connection.close()
        self.is_promoted = True


@pytest.fixture(params=["postgresql_url", "mysql_url"])
def delays(request: pytest.FixtureRequest) -> Iterator[DelayTasks]:
    url: str = request.getfixturevalue(request.param)
    open_store(url, table_prefix="demoted_").close()
    made = delays_on(url, table_prefix="demoted_")
    record(made)
    yield made
    made.close()


CALLS: dict[str, Callable[[DelayTasks, DelayTask], Any]] = {
    "schedule": lambda d, task: d.schedule_delay("mail", {}, 5),
    "schedule with a key": lambda d, task: d.schedule_delay("mail", {}, 5, key="new"),
    "schedule_many": lambda d, task: d.schedule_many([("mail", {}, 5)] * 3),
    "cancel": lambda d, task: d.cancel(task),
    "reschedule": lambda d, task: d.reschedule(task, 5),
    "touch": lambda d, task: d.touch(task, 500),
    "claim": lambda d, task: runtime_of(d).store.claims("w", None).claim_due("default", [0], 1),
    "sweep": lambda d, task: runtime_of(d).sweeper.sweep(),
}


@pytest.mark.parametrize("name", CALLS)
def test_after_a_demotion_the_next_call_reaches_the_new_primary(
    delays: DelayTasks, name: str
) -> None:
    task = delays.schedule_delay("mail", {}, 0, key="k")
    cluster = Cluster(delays)
    cluster.demote()
    assert CALLS[name](delays, task) or name == "sweep"
