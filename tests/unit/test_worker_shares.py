"""Workers that poll share near tasks: each task has one worker, in proportion to pool size."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import Entry
from delaytasks.worker.lease_keeper import WorkerShares

NOW = datetime(2030, 1, 1, tzinfo=timezone.utc)


def worker(
    name: str, size: int = 2, queues: list[str] | None = None, **changes: Any
) -> dict[str, Any]:
    row = {
        "name": name,
        "concurrency": size,
        "queues": queues or ["*"],
        "pool": "direct/prefork",
        "seen_at": NOW,
    }
    return {**row, **changes}


def entries(count: int = 4000, queue: str = "default") -> list[Entry]:
    make_id = IdMaker(lambda: 1_900_000_000_000, 0)
    return [Entry(make_id(), 0, 0, queue) for _ in range(count)]


def shares(rows: list[dict[str, Any]], names: str, queue: str = "default") -> Counter[str]:
    found: Counter[str] = Counter()
    for name in names:
        members = WorkerShares(name)
        members.learn(rows, NOW, 5)
        found[name] = sum(members.is_mine(entry) for entry in entries(queue=queue))
    return found


def test_each_task_belongs_to_one_worker_and_shares_are_proportional_to_pool_sizes() -> None:
    rows = [worker("a", 1), worker("b", 3)]
    lists = []
    some = entries()
    for name in "ab":
        members = WorkerShares(name)
        members.learn(rows, NOW, 5)
        lists.append({entry.id for entry in some if members.is_mine(entry)})
    assert lists[0] | lists[1] == {entry.id for entry in some}
    assert not lists[0] & lists[1]
    assert 0.2 < len(lists[0]) / len(some) < 0.3


def test_a_worker_has_no_share_of_a_queue_that_it_does_not_serve() -> None:
    rows = [worker("a", queues=["mail"]), worker("b"), worker("c", queues=["default"])]
    assert shares(rows, "bc")["b"] < 4000
    assert shares(rows, "ab", "mail")["a"] > 0
    alone = [worker("a", queues=["mail"]), worker("c", queues=["default"])]
    assert shares(alone, "c") == {"c": 4000}


def test_a_silent_worker_or_one_without_the_direct_timer_has_no_share() -> None:
    silent = worker("b", seen_at=NOW - timedelta(seconds=16))
    celery = worker("c", pool="prefork")
    assert shares([worker("a"), silent, celery], "a") == {"a": 4000}


def test_a_worker_that_is_not_registered_yet_takes_all_tasks() -> None:
    assert shares([worker("b")], "a") == {"a": 4000}
