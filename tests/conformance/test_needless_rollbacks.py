"""MariaDB gets no ROLLBACK after a commit or an autocommitted statement."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from sqlalchemy import select

from delaytasks.core.interfaces import Settlement
from delaytasks.storage import engines as needless_rollbacks
from delaytasks.storage.store import Store
from tests.conformance.store_rows import task
from tests.conftest import open_store
from tests.proxy import Proxy, proxy_to

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not needless_rollbacks.rollback_options(autocommit=True),
        reason="SQLAlchemy has no skip_autocommit_rollback before 2.0.43",
    ),
]


@pytest.fixture
def proxy(mysql_url: str) -> Iterator[Proxy]:
    with closing(proxy_to(mysql_url)) as made:
        yield made


@pytest.fixture
def store(mysql_url: str, proxy: Proxy) -> Iterator[Store]:
    made = open_store(proxy.url(mysql_url), table_prefix="trips_")
    yield made
    with made.database.begin() as connection:
        made.schema.metadata.drop_all(connection)
    made.close()


def test_a_call_and_a_chunk_make_these_round_trips(store: Store, proxy: Proxy) -> None:
    def trips(work: Callable[[], object]) -> int:
        before = proxy.round_trips
        work()
        return proxy.round_trips - before

    claims = store.claims("w", None)

    def settle() -> object:
        return claims.settle([Settlement(claimed, "succeed") for claimed in running])

    for _ in range(2):  # the first ones open the connections
        tasks = [task(store) for _ in range(10)]
        inserted = trips(lambda: store.tasks.insert(tasks[0]))  # noqa: B023
        store.tasks.insert_many(tasks[1:])
        running = claims.claim_due("default", [0], 10)
        settled = trips(settle)
        store.tasks.insert_many([task(store) for _ in range(10)])
        claimed = trips(lambda: claims.claim_due("default", [0], 10))
    assert (inserted, settled) == (1, 1)
    assert claimed == 3, "SELECT FOR UPDATE, UPDATE and COMMIT"


def test_an_abandoned_transaction_is_rolled_back(store: Store) -> None:
    row = task(store)
    store.tasks.insert(row)
    t = store.schema.tasks
    left_open = store.database.tx.connect()
    left_open.execute(select(t.c.id).where(t.c.id == row.id).with_for_update())
    claims = store.claims("w", None)
    assert not claims.claim_due("default", [0], 1)
    del left_open
    gc.collect()
    assert [claimed.id for claimed in claims.claim_due("default", [0], 1)] == [row.id]
