"""A task that runs alone costs a limited number of function calls, so that no feature adds to the
work of each task unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import pytest

from benchmarks.call_counts import count_calls
from delaytasks import DelayTasks
from delaytasks.core.interfaces import Entry
from tests.conftest import open_store
from tests.recording import delays_on, record

#: `./dev bench lone` counts the same. If a change needs more, weigh its use against its costs.
MOST_CALLS = 670


@pytest.fixture
def delays(postgresql_url: str) -> Iterator[DelayTasks]:
    store = open_store(postgresql_url, table_prefix="lone_")
    made = delays_on(postgresql_url, table_prefix="lone_")
    yield made
    made.close()
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    store.close()


def test_the_function_calls_of_a_lone_task_are_limited(delays: DelayTasks) -> None:
    record(delays)
    delays.processor("lone")(lambda body: None)
    entries = [Entry.of(delays.schedule_delay("lone", None, 0)) for _ in range(30)]
    runner = delays.runner()
    counts = [count_calls(lambda entry=entry: runner.run([entry])) for entry in entries]  # type: ignore[misc]
    # The first runs open connections, and policies are read once a second.
    assert median(counts) <= MOST_CALLS
