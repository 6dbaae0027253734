"""Recurring schedules in a deployment with several databases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy.orm import Session

from delaytasks import DelayTasks
from delaytasks.core.errors import ShardMismatchError
from delaytasks.core.ids import shard_of
from delaytasks.wiring import wiring_of
from tests.conformance.transactions.shop import own_engine
from tests.several import Several

pytestmark = pytest.mark.slow

NAMES = [f"r{number}" for number in range(12)]


@pytest.fixture(scope="module")
def module_shards(shard_urls: list[str]) -> Iterator[Several]:
    made = Several(shard_urls)
    yield made
    made.close()


@pytest.fixture
def shards(module_shards: Several) -> Several:
    module_shards.empty()
    return module_shards


def define(delays: DelayTasks) -> dict[str, int]:
    """Return the shard of each schedule."""
    return {name: delays.recurring.set(name, "report", every="20s").shard for name in NAMES}


def test_schedules_spread_and_their_tasks_are_where_they_are(shards: Several) -> None:
    delays = shards.delays()
    homes = define(delays)
    assert set(homes.values()) == {0, 1, 2}
    assert [schedule.name for schedule in delays.recurring.list()] == sorted(NAMES)
    for shard in wiring_of(delays).shards:
        shard.sweeper.sweep()
    tasks = delays.find(tag="report", limit=1000).tasks
    assert len(tasks) >= 3 * len(NAMES)
    for task in tasks:
        name = (task.key or "").partition("@")[0]
        assert (task.shard, shard_of(task.id)) == (homes[name], homes[name])


def test_a_schedule_stays_where_it_is_when_a_shard_is_added(shards: Several) -> None:
    before = define(shards.delays(2))
    after = define(shards.delays(3))
    assert after == before
    delays = shards.delays(3)
    assert len(delays.recurring.list()) == len(NAMES)
    for name in NAMES:
        assert delays.recurring.pause(name).is_paused
        delays.recurring.run(name)
        delays.recurring.remove(name)
    assert delays.recurring.list() == []


def test_a_session_must_be_on_the_shard_of_the_schedule(shards: Several) -> None:
    delays = shards.delays()
    homes = define(delays)
    [elsewhere] = [name for name in NAMES if homes[name] != 0][:1]
    here = next(name for name in NAMES if homes[name] == 0)
    engine = own_engine(shards.urls[0])
    with Session(engine) as session:
        delays.recurring.remove(here, session=session)
        with pytest.raises(ShardMismatchError, match=f"is in shard {homes[elsewhere]}"):
            delays.recurring.remove(elsewhere, session=session)
        session.commit()
    assert here not in [schedule.name for schedule in delays.recurring.list()]
    engine.dispose()
