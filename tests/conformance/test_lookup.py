"""Look up and count rows, and read the clock, on every database."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from delaytasks.core.errors import (
    InvalidQueryError,
)
from delaytasks.core.filters import Filter, filter_of
from delaytasks.core.states import Status
from delaytasks.storage.claims import Claims
from delaytasks.storage.state_queries import Stats
from delaytasks.storage.store import Store
from tests.conformance.store_rows import (
    add,
    keyed,
    put,
    seconds,
)
from tests.recording import counted


def test_looking_up_a_missing_task_or_key_returns_none(store: Store) -> None:
    assert store.tasks.get(5) is None
    assert store.tasks.id_of_key("mail", "order-1") is None


def test_pages_of_a_status_are_in_due_order_over_all_queues_and_priorities(store: Store) -> None:
    added = [add(store, n - 100.0, queue=f"q{n % 3}", priority=n % 2) for n in range(13)]
    found: list[int] = []
    cursor = None
    while True:
        page = store.tasks.find(filter_of({"status": Status.NOT_COMPLETE}), 5, cursor)
        found += [one.id for one in page.tasks]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == [one.id for one in added]


def test_find_applies_each_of_its_filters(store: Store, claims: Claims) -> None:
    now = store.tasks.now()
    mail = add(store, 10.0, tag="mail")
    sms = add(store, 20.0, tag="sms")
    order = keyed(store, 30.0, tag="order")

    def found(**question: Any) -> list[int]:
        page = store.tasks.find(filter_of(question), 10)
        assert page.cursor is None
        return [one.id for one in page]

    assert found() == [mail.id, sms.id, order.id]
    assert found(tag="sms") == [sms.id]
    assert found(key="order-1") == [order.id]
    assert found(since=seconds(now, 15), until=seconds(now, 25)) == [sms.id]
    assert found(since=sms.expected_time, until=order.expected_time) == [sms.id]
    store.tasks.cancel(sms.id)
    assert found(status=Status.CANCELLED) == [sms.id]
    assert found(status=Status.NOT_COMPLETE) == [mail.id, order.id]


def test_pages_show_each_resting_row_once_while_others_move(store: Store) -> None:
    now = seconds(store.tasks.now(), 1000)
    # Many rows have the same due time, so the cursor must compare ids and times.
    resting = [add(store, expected_time=seconds(now, n // 4)) for n in range(20)]
    moving = [add(store, expected_time=seconds(now, n)) for n in range(5)]
    seen: list[int] = []
    cursor = None
    for step in range(25):
        page = store.tasks.find(Filter(), 3, cursor)
        seen += [one.id for one in page]
        cursor = page.cursor
        if cursor is None:
            break
        if step < 5:
            store.tasks.reschedule(moving[step].id, seconds(now, -1 if step % 2 else 500))
    assert cursor is None
    assert Counter(one for one in seen if one in {r.id for r in resting}) == {
        one.id: 1 for one in resting
    }


@pytest.mark.parametrize("cursor", ["nonsense", "", "AAAA", "MTIz", "ОК"])
def test_a_cursor_that_find_never_gave_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(InvalidQueryError, match="cursor"):
        store.tasks.find(Filter(), 10, cursor)


def test_counts_name_every_status(store: Store) -> None:
    for status, many in ((Status.NOT_COMPLETE, 3), (Status.FAILED, 2)):
        for _ in range(many):
            put(store, status)
    counts = Stats(store.database, store.schema).counts()
    assert {status: rows for status, (rows, _) in counts.items()} == counted(store)
    assert counted(store) == {**dict.fromkeys(Status, 0), Status.NOT_COMPLETE: 3, Status.FAILED: 2}


def test_the_databases_clock_moves_within_a_transaction(store: Store) -> None:
    with store.database.begin() as connection:
        first = connection.execute(store.tasks._get, {"task_id": 1}).first()
        assert first is None
        before = store.tasks.now()
        if store.database.can.server_side_cursors:
            added = add(store, 0.0)
            assert added.create_time is not None
            assert added.create_time >= before
    assert store.tasks.now() >= before
