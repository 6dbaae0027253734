"""Shards whose URLs name several hosts and look the same: the database reports which shard a
session uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, delete, make_url, text
from sqlalchemy.orm import Session

from delaytasks.core.errors import ShardMismatchError
from tests.several import TAG, Several, keys_of

pytestmark = pytest.mark.slow

SCHEMAS = ("first_shard", "second_shard")


@pytest.fixture
def shards(postgresql_url: str) -> Iterator[Several]:
    """Yield two shards with equal hosts, ports and names.

    Each one has its own schema in one database.
    """
    place = make_url(postgresql_url)
    port = place.port or 5432
    engine = create_engine(postgresql_url)
    urls = []
    for schema in SCHEMAS:
        with engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA {schema}"))
        hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        url = place.set(
            host=None, port=None, query={"host": hosts, "options": f"-csearch_path={schema}"}
        )
        urls.append(url.render_as_string(hide_password=False))
    made = Several(urls)
    yield made
    made.close()
    for schema in SCHEMAS:
        with engine.begin() as connection:
            connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


@pytest.mark.parametrize("shard", [0, 1])
def test_a_session_writes_ids_of_the_shard_that_it_is_on(shards: Several, shard: int) -> None:
    delays = shards.delays()
    engine = create_engine(shards.urls[shard])
    with Session(engine) as session:
        task = delays.schedule_delay(TAG, None, 60, session=session)
        session.commit()
    assert task.shard == shard
    assert shards.shard_of_row(task.id) == [shard]
    engine.dispose()


def test_a_key_has_one_live_task_though_a_session_is_on_the_other_shard(shards: Several) -> None:
    delays = shards.delays()
    key = next(keys_of(0, 2))
    engine = create_engine(shards.urls[1])
    with Session(engine) as session:
        with pytest.raises(ShardMismatchError, match="on shard 1"):
            delays.schedule_delay(TAG, None, 60, key=key, session=session)
        session.rollback()
    delays.schedule_delay(TAG, None, 60, key=key)
    assert len(shards.live(key)) == 1
    engine.dispose()


def test_a_database_that_does_not_know_its_number_is_refused_with_the_remedy(
    shards: Several,
) -> None:
    delays = shards.delays()
    with shards.stores[1].database.begin() as connection:
        connection.execute(delete(shards.stores[1].schema.shards))
    engine = create_engine(shards.urls[1])
    with (
        Session(engine) as session,
        pytest.raises(ShardMismatchError, match=r"the number None.*db upgrade"),
    ):
        delays.schedule_delay(TAG, None, 60, session=session)
    engine.dispose()
