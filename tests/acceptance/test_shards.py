"""Three databases used as one by `Shards`, with a worker each: two of PostgreSQL, one of MariaDB.

The workers learn their database from environment variables, and are killed at random.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delaytasks import DelayedTask, DelayTasks, NewTask, Shards, Status
from delaytasks.model.clock import monotonic, shard_of
from delaytasks.model.moves import LIVE
from tests.running import Deployment, Process
from tests.services import own_database
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TAG = "test.note"
TASKS = 2000
#: The tasks are due within this time, and so long workers are killed.
SPAN_S = 30.0
KILLS = 12


class Site:
    """A deployment for each database. The workers differ only in their environment."""

    def __init__(self, deployments: list[Deployment]) -> None:
        self.deployments = deployments
        self.shards = Shards(deployment.delays for deployment in deployments)
        self.file = deployments[0].file

    def begin_worker(self, number: int) -> Process:
        own = {"SHARD": str(number), "NAMESPACE": self.deployments[number].settings["namespace"]}
        own["DATABASE_URL"] = self.shards.members[number].settings.database_url
        environ = {f"DELAYTASKS_{name}": value for name, value in own.items()}
        return self.deployments[0].begin_worker(**environ)

    def new(self, number: int, **options: Any) -> NewTask:
        # The clock of a pool process is exact to half a round trip only.
        body = {"file": str(self.file), "seconds": 0.05, "asks_database": True}
        return NewTask(TAG, body, SPAN_S * number / TASKS, **options)


@pytest.fixture
def site(postgresql_url: str, mysql_url: str, redis_url: str, tmp_path: Path) -> Iterator[Site]:
    name = "s" + secrets.token_hex(4)
    with ExitStack() as stack:
        second, drop = own_database(postgresql_url, "_second")
        stack.callback(drop)
        deployments = []
        for number, url in enumerate((postgresql_url, second, mysql_url)):
            (folder := tmp_path / str(number)).mkdir()
            own: dict[str, Any] = {"namespace": f"{name}-{number}", "table_prefix": f"{name}_"}
            deployment = Deployment(folder, url, redis_url, shard=number, **own)
            deployments.append(stack.enter_context(closing(deployment)))
        yield Site(deployments)


def test_no_task_is_lost_or_early_while_workers_are_killed_at_random(site: Site) -> None:
    shards, random_ = site.shards, random.Random(7)
    workers = [site.begin_worker(number) for number in range(3)]
    for worker in workers:
        wait_until(lambda worker=worker: " ready." in worker.log(), 60, "a worker to be ready")  # type: ignore[misc]

    made: list[DelayedTask] = []
    for start in range(0, TASKS, 100):  # a third with keys, the rest in turn
        numbers = range(start, start + 100)
        new = (site.new(n, key=f"k{n}") if n % 3 == 0 else site.new(n) for n in numbers)
        assert shards.schedule_many(new, on_batch=made.extend) == 100
    assert len({task.id for task in made}) == TASKS
    places = Counter(shard_of(task.id) for task in made)
    assert all(TASKS / 6 < places[number] < TASKS / 2 for number in range(3)), places

    began_at = monotonic()
    for kill in range(KILLS):
        pause_s = SPAN_S / KILLS * random_.uniform(0.5, 1.5)
        at = began_at + kill * SPAN_S / KILLS + pause_s
        wait_until(lambda at=at: monotonic() > at, SPAN_S, "the next kill", 0.02)  # type: ignore[misc]
        number = random_.randrange(3)
        workers[number].kill()
        workers[number] = site.begin_worker(number)

    def are_over() -> bool:
        """A row that is recovered while the first look reads the statuses is in the second one."""
        find = partial(DelayTasks.find, status=list(LIVE), limit=1)
        return not any(page.tasks for _ in range(2) for page in shards.each(find).values())

    wait_until(are_over, 120, "all to end")
    runs = [(int(id), int(late_us)) for id, late_us, _ in site.deployments[0].runs()]
    lost = {task.id for task in made} - {id for id, _ in runs}
    assert not lost
    assert {task.status for task in map(shards.get, (task.id for task in made))} == {Status.DONE}
    assert min(late_us for _, late_us in runs) >= 0
    assert [deployment.early() for deployment in site.deployments] == [[], [], []]
    print(f"{TASKS} tasks on {dict(places)}, {KILLS} kills: {len(runs) - TASKS} ran again")
