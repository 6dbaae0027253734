"""A database that has become slow is told of once, and when it is quick again."""

from __future__ import annotations

from delaytasks.core.events import Events
from delaytasks.worker.database_pace import SLOW_S, DatabasePace


def told(*seconds: float) -> list[str]:
    events, names = Events(), list[str]()
    events.subscribe(lambda name, fields: names.append(f"{name} {fields['shard']}"))
    pace = DatabasePace(events, 2)
    for took in seconds:
        pace.took(took)
    return names


def test_one_slow_answer_says_nothing() -> None:
    assert told(SLOW_S * 10, 0, SLOW_S * 10, 0) == []


def test_each_change_is_told_once() -> None:
    slow, quick = SLOW_S * 2, SLOW_S / 2
    assert told(slow, slow, slow, slow) == ["store.slow 2"]
    assert told(slow, slow, quick, quick, slow, slow) == [
        "store.slow 2",
        "store.quick 2",
        "store.slow 2",
    ]
