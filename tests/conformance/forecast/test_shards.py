"""A forecast of several databases adds them up, and names those that cannot be reached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from delaytasks import DelayTasks, StoreUnavailableError
from delaytasks.wiring import wiring_of
from tests.recording import delays_on
from tests.services import free_port
from tests.several import TAG, Several


@pytest.fixture(scope="module")
def module_shards(shard_urls: list[str]) -> Iterator[Several]:
    made = Several(shard_urls)
    yield made
    made.close()


@pytest.fixture
def shards(module_shards: Several) -> Several:
    module_shards.empty()
    return module_shards


def put(delays: DelayTasks) -> None:
    for shard in wiring_of(delays).shards:
        for _ in range(shard.number + 1):
            delays.schedule_delay(TAG, {}, 3600, id=shard.new_id())
        shard.store.workers.report("w", ["default"], "prefork", 2, 0)


def test_all_databases_are_counted_and_a_worker_counts_once(shards: Several) -> None:
    delays = shards.delays()
    put(delays)
    forecast = delays.forecast()
    assert forecast.due == 1 + 2 + 3
    assert [(pool.workers, pool.processes) for pool in forecast.pools] == [(1, 2)]
    assert forecast.missing == ()


@pytest.mark.slow
def test_a_database_that_is_down_is_missing(shards: Several) -> None:
    delays = shards.delays()
    put(delays)
    down = f"postgresql+psycopg2://postgres@127.0.0.1:{free_port()}/none"
    for position, due in ((2, 1 + 2), (0, 2 + 3)):
        urls = [shard.url for shard in wiring_of(delays).shards]
        urls[position] = down
        partial = delays_on(urls, table_prefix=shards.prefix)
        forecast = partial.forecast()
        assert (forecast.due, forecast.missing) == (due, (position,))
        partial.close()
    alone = delays_on(down, table_prefix=shards.prefix)
    with pytest.raises(StoreUnavailableError):
        alone.forecast()
    alone.close()
