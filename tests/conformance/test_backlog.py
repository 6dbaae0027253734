"""Workers process a backlog chunk by chunk.

Each chunk starts where the last one ended, and no row is left behind.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaytasks.core.task import DelayTask
from delaytasks.storage import claims as backlog
from delaytasks.storage.claims import RESTART_S, Claims
from delaytasks.storage.store import Store


def make(store: Store, *ids: int, priority: int = 0) -> None:
    """Insert tasks that became due long ago, in the order of their ids."""
    now = store.tasks.now()
    for id in ids:
        due = now - timedelta(hours=1) + timedelta(seconds=id)
        store.tasks.insert(DelayTask(id, "mail", "{}", due, priority=priority, create_time=now))


def ids(claims: Claims, limit: int, *priorities: int) -> list[int]:
    return [task.id for task in claims.claim_due("default", priorities or [0], limit)]


def test_a_chunk_continues_where_the_last_one_ended(store: Store, claims: Claims) -> None:
    make(store, *range(10, 30))
    assert ids(claims, 5) == [10, 11, 12, 13, 14]
    make(store, 1, 2)
    assert ids(claims, 5) == [15, 16, 17, 18, 19]
    assert ids(store.claims("other", None), 3) == [1, 2, 20], "who begins begins at the beginning"


def test_older_rows_are_claimed_before_a_level_is_empty(store: Store, claims: Claims) -> None:
    make(store, *range(10, 20))
    assert ids(claims, 8) == list(range(10, 18))
    make(store, 1, 2, 3)
    assert ids(claims, 4) == [1, 2, 18, 19]
    assert ids(claims, 4) == [3]
    assert ids(claims, 4) == []


def test_older_rows_wait_for_a_few_seconds_at_most(
    store: Store, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(backlog, "monotonic", lambda: now)
    make(store, *range(10, 40))
    ids(claims, 5)
    make(store, 1)
    now += RESTART_S / 2
    assert ids(claims, 5) == [15, 16, 17, 18, 19]
    now += RESTART_S / 2
    assert ids(claims, 5) == [1, 20, 21, 22, 23], "however many chunks came between"


def test_rows_with_the_same_due_time_are_not_skipped(store: Store, claims: Claims) -> None:
    now = store.tasks.now() - timedelta(seconds=1)
    for id in range(1, 11):
        store.tasks.insert(DelayTask(id, "mail", "{}", now, create_time=now))
    assert sorted(ids(claims, 4) + ids(claims, 4) + ids(claims, 4)) == list(range(1, 11))


def test_each_level_has_its_own_position(store: Store, claims: Claims) -> None:
    make(store, *range(10, 14))
    make(store, *range(20, 24), priority=5)
    assert ids(claims, 6, 0, 5) == [20, 21, 22, 23, 10, 11]
    make(store, 1, priority=5)
    assert ids(claims, 3, 0, 5) == [1, 12, 13]
