"""A process that knows the URL of only one of several shards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import insert

from delaytasks import DelayTasks, NewTask
from delaytasks.core.errors import ConfigError
from delaytasks.core.filters import filter_of
from delaytasks.storage.store import Store

CALLS: dict[str, Callable[[DelayTasks], object]] = {
    "schedule_delay": lambda delays: delays.schedule_delay("mail", {}, 60, key="k"),
    "schedule_many": lambda delays: delays.schedule_many([NewTask("mail", {}, delay=60)]),
    "cancel": lambda delays: delays.cancel(tag="mail", key="k"),
    "touch": lambda delays: delays.touch(tag="mail", key="k", delay=60),
}


@pytest.fixture
def numbered(store: Store) -> Store:
    """Return the database of shard 1."""
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.shards).values(number=1))
    return store


@pytest.mark.parametrize("call", CALLS)
def test_a_process_with_the_url_of_one_shard_is_refused(
    numbered: Store, delays: DelayTasks, call: str
) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is shard 1.*give each process the whole list"):
            CALLS[call](delays)
    assert numbered.tasks.find(filter_of({"tag": "mail"}), 10).tasks == []


def test_the_number_is_asked_once(
    store: Store, delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("delaytasks.storage.store.number_of", lambda c, s: asked.append(c))
    for key in ("a", "b"):
        delays.schedule_delay("mail", {}, 60, key=key)
        delays.cancel(tag="mail", key=key)
    assert len(asked) == 1
