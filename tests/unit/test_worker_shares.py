"""Workers that poll share near tasks: each task has one worker, in proportion to pool size."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import Any

from delaytasks.core.ids import IdMaker
from delaytasks.core.interfaces import Entry
from delaytasks.worker.worker_shares import WorkerShares

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


def test_each_task_is_one_members_and_parts_are_as_large_as_pools() -> None:
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


def test_who_does_not_serve_a_queue_has_no_part_in_it() -> None:
    rows = [worker("a", queues=["mail"]), worker("b"), worker("c", queues=["default"])]
    assert shares(rows, "bc")["b"] < 4000
    assert shares(rows, "ab", "mail")["a"] > 0
    alone = [worker("a", queues=["mail"]), worker("c", queues=["default"])]
    assert shares(alone, "c") == {"c": 4000}


def test_who_is_silent_or_looks_for_nothing_has_no_part() -> None:
    silent = worker("b", seen_at=NOW - timedelta(seconds=16))
    celery = worker("c", pool="prefork")
    assert shares([worker("a"), silent, celery], "a") == {"a": 4000}


def test_who_is_not_known_yet_takes_all() -> None:
    assert shares([worker("b")], "a") == {"a": 4000}
