"""Three databases used as one by `Shards`, with a worker each: two of PostgreSQL, one of MariaDB.

The workers learn their database from environment variables.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator

import pytest

from delaytasks import DelayedTask, NewTask, Shards, Status
from delaytasks.model.clock import shard_of
from tests.integration.conftest import Deploy
from tests.services import own_database
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TASKS = 300


@pytest.fixture
def second_url(postgresql_url: str) -> Iterator[str]:
    url, drop = own_database(postgresql_url, "_second")
    yield url
    drop()


def test_each_worker_runs_the_tasks_of_its_database(second_url: str, deploy: Deploy) -> None:
    name = "s" + secrets.token_hex(4)
    members = [
        deploy(url, folder=str(n), shard=n, namespace=f"{name}-{n}", table_prefix=f"{name}_")
        for n, url in enumerate(("postgresql", second_url, "mysql"))
    ]
    first, shards = members[0], Shards(member.delays for member in members)
    for number, member in enumerate(members):
        own = {"SHARD": str(number), "NAMESPACE": member.settings["namespace"]}
        own["DATABASE_URL"] = shards.members[number].settings.database_url
        # The configuration of all workers is that of the first one.
        first.worker(**{f"DELAYTASKS_{name}": value for name, value in own.items()})

    # The clock of a pool process is exact to half a round trip only.
    body = {"file": str(first.file), "asks_database": True}
    keys = [f"k{number}" if number % 3 == 0 else None for number in range(TASKS)]
    new = [NewTask("test.note", body, 3 * n / TASKS, key=key) for n, key in enumerate(keys)]
    made: list[DelayedTask] = []
    assert shards.schedule_many(new, on_batch=made.extend) == TASKS
    places = Counter(shard_of(task.id) for task in made)
    assert min(places[number] for number in range(3)) > TASKS / 10, places

    def are_done() -> bool:
        return {shards.get(task.id).status for task in made} == {Status.DONE}

    wait_until(are_done, 60, first.logs, every_s=0.5)
    runs = {int(id): int(late_us) for id, late_us, _ in first.runs()}
    assert runs.keys() == {task.id for task in made}
    assert min(runs.values()) >= 0
    assert [member.early() for member in members] == [[], [], []]
