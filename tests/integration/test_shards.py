"""Test real workers on several databases: two on PostgreSQL, and one on MariaDB.

One of the databases becomes unreachable.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, insert, update

from delaytasks import DelayTask, Status
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.ids import home_of
from delaytasks.wiring import wiring_of
from tests.proxy import Proxy, proxy_to
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TAG = "test.note"
#: The number of the shard that becomes unreachable.
DOWN = 1


class ShardedSite(Deployment):
    """Run a deployment that reaches its second database through a proxy."""

    def __init__(self, folder: Path, urls: list[str], broker_url: str, **settings: Any) -> None:
        self.proxy: Proxy = proxy_to(urls[DOWN])
        urls = [self.proxy.url(url) if number == DOWN else url for number, url in enumerate(urls)]
        super().__init__(folder, urls, broker_url, grace_s=1, **settings)

    def at(self, shard: int, count: int, delay: float) -> list[DelayTask]:
        """Schedule and return `count` tasks of one shard."""
        made: list[DelayTask] = []
        number = 0
        while len(made) < count:
            key = f"{len(self.runs())}-{shard}-{delay}-{number}"
            if home_of(TAG, key, 3) == shard:
                made.append(self.schedule(delay=delay, key=key))
            number += 1
        return made

    def ran(self) -> list[int]:
        return [int(run[0]) for run in self.runs()]

    def close(self) -> None:
        self.proxy.heal()
        super().close()
        self.proxy.close()


@pytest.fixture
def site(shard_urls: list[str], redis_url: str, tmp_path: Path) -> Iterator[ShardedSite]:
    made = ShardedSite(tmp_path, shard_urls, redis_url)
    yield made
    made.close()


@pytest.mark.parametrize("timer", [pytest.param("eta", marks=pytest.mark.quick), "redis"])
def test_tasks_of_every_shard_run_once_and_never_early(
    shard_urls: list[str], redis_url: str, tmp_path: Path, timer: str
) -> None:
    with closing(ShardedSite(tmp_path, shard_urls, redis_url, timer=timer)) as site:
        run_on_every_shard(site)


def run_on_every_shard(site: ShardedSite) -> None:
    site.worker(concurrency=3)
    made = [site.schedule(delay=0.5 + n / 50) for n in range(60)]
    made += [task for shard in range(3) for task in site.at(shard, 5, 1)]
    assert site.delays.schedule_many((TAG, {"file": str(site.file)}, 1) for _ in range(300)) == 300
    site.wait_for(made, deadline_s=30)
    wait_until(lambda: len(site.runs()) >= 375, 30, "all to run")
    assert len(set(site.ran())) == len(site.ran()) == 375
    assert min(int(run[1]) for run in site.runs()) >= 0
    assert {task.shard for task in made} == {0, 1, 2}


def test_rows_of_other_programs_run_in_every_shard(site: ShardedSite) -> None:
    site.worker()
    for store in wiring_of(site.delays).router.stores:
        with store.database.begin() as connection:
            body = f'{{"file": "{site.file}"}}'
            connection.execute(insert(store.schema.tasks).values(id=7, tag=TAG, message_body=body))
    wait_until(lambda: site.ran() == [7, 7, 7], 30, "all three to run")


@pytest.mark.parametrize("fault", ["refused", "black hole"])
def test_while_a_shard_is_down_the_others_work_and_later_it_is_used_again(
    site: ShardedSite, fault: str
) -> None:
    worker = site.worker(concurrency=3)
    site.wait_for(site.at(DOWN, 1, 0))
    stranded = site.at(DOWN, 30, 3)
    later = [task for shard in (0, 2) for task in site.at(shard, 10, 4)]
    if fault == "refused":
        site.proxy.refuse()
    else:
        site.proxy.swallow()
    site.wait_for(later, deadline_s=30)
    for _ in range(3):
        site.wait_for([task for shard in (0, 2) for task in site.at(shard, 5, 0.5)], deadline_s=30)
    wait_until(
        lambda: "store.down" in worker.log() and f"shard={DOWN}" in worker.log(), 30, "its report"
    )
    assert not set(site.ran()) & {task.id for task in stranded}

    with ThreadPoolExecutor(20) as threads:
        calls = [threads.submit(site.schedule, delay=0.5) for _ in range(20)]
        wait_until(
            lambda: sum(call.done() for call in calls) >= 10,
            30,
            "tasks without a key to find other shards",
        )
        anywhere = [site.schedule(delay=0.5) for _ in range(10)]
        assert DOWN not in {task.shard for task in anywhere}, "by now it is left out"
        if fault == "refused":
            with pytest.raises(StoreUnavailableError, match=f"shard {DOWN} "):
                site.at(DOWN, 1, 1)
        site.wait_for(anywhere, deadline_s=30)
        site.proxy.heal()
        wait(calls, 60)
    assert not worker.ended()
    made = stranded + anywhere + [call.result() for call in calls]
    site.wait_for([*made, *site.at(DOWN, 5, 0.5)], deadline_s=60)
    wait_until(lambda: "store.up" in worker.log(), 30, "the good news")
    assert {site.status(task) for task in made} == {Status.DONE}
    assert site.delays.find(status=Status.RUNNING).tasks == []


@pytest.mark.parametrize("fault", ["refused", "black hole"])
def test_a_worker_starts_and_stops_while_a_shard_is_down(site: ShardedSite, fault: str) -> None:
    stranded = site.at(DOWN, 5, 0)
    if fault == "refused":
        site.proxy.refuse()
    else:
        site.proxy.swallow()
    first = site.worker(concurrency=3)
    site.wait_for([task for shard in (0, 2) for task in site.at(shard, 5, 0.5)], deadline_s=30)
    first.terminate(60)
    second = site.worker(concurrency=3)
    site.wait_for(site.at(0, 5, 0.5), deadline_s=30)
    site.proxy.heal()
    site.wait_for(stranded, deadline_s=60)
    assert not second.ended()


def test_a_worker_does_nothing_on_a_database_that_is_another_shard(
    site: ShardedSite, shard_urls: list[str]
) -> None:
    """The database was unreachable when the worker started.

    With a reachable database, the worker would have rejected the list of databases at its start.
    """
    [task] = site.at(DOWN, 1, 0)
    numbers = wiring_of(site.delays).shards[DOWN].store.schema.shards
    engine = create_engine(shard_urls[DOWN])
    site.proxy.refuse()
    worker = site.worker()
    with engine.begin() as connection:
        connection.execute(update(numbers).values(number=7))
    site.proxy.heal()
    wait_until(lambda: f"is shard 7, but has position {DOWN}" in worker.log(), 30, "its refusal")
    site.wait_for(site.at(0, 3, 0.5), deadline_s=30)
    assert site.status(task) is Status.NOT_COMPLETE
    with engine.begin() as connection:
        connection.execute(update(numbers).values(number=DOWN))
    engine.dispose()
    site.wait_for([task], deadline_s=60)
