"""The filter `error=`, with which the tasks of a failure group are found and moved."""

from __future__ import annotations

from typing import Any

import pytest

from delaytasks import DelayTask, DelayTasks, InvalidQueryError, Status
from delaytasks.core.text import error_pattern
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import put
from tests.recording import RunnerHarness


def failed(store: Store, delays: DelayTasks, error: str, tag: str = "a") -> DelayTask:
    task = delays.schedule_delay(tag, None, "1h")
    put(store, task, status=int(Status.FAILED), error_stack=error)
    return task


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*timeout*", ["a timeout of 5 s", "timeout"]),
        ("*Timeout", ["Timeout", "read Timeout"]),
        ("100%*", ["100% full"]),
        ("a_b*", ["a_b"]),
        ("wow! *", ["wow! such error"]),
        ("back\\slash*", ["back\\slash"]),
        ("first*second", ["first\nline\nsecond"]),
    ],
)
def test_a_pattern_matches_the_whole_text_and_only_its_star_is_special(
    store: Store, delays: DelayTasks, pattern: str, matches: list[str]
) -> None:
    texts = (
        "a timeout of 5 s|timeout|Timeout|read Timeout|100% full|100 full|a_b|axb|wow! such error|"
        "wow% such error|back\\slash|backslash|first\nline\nsecond|first only"
    ).split("|")
    by_id = {failed(store, delays, text).id: text for text in texts}
    found = delays.find(tag="a", status="FAILED", error=pattern, limit=100)
    ours = sorted(by_id[task.id] for task in found)
    if store.database.url.get_backend_name() == "sqlite":  # its LIKE ignores case
        assert set(matches) <= set(ours)
        assert {text.lower() for text in ours} - {"timeout", "read timeout"} <= {*matches}
    else:
        assert ours == sorted(matches)


def test_bulk_functions_move_the_tasks_of_a_group(store: Store, delays: DelayTasks) -> None:
    mine = [failed(store, delays, f"card {number} refused") for number in range(3)]
    others = [
        failed(store, delays, "no connection"),
        failed(store, delays, "card 1 refused", "b"),
    ]
    pattern = error_pattern("card 4711 refused")
    assert delays.rerun_many(tag="a", error=pattern).changed == 3
    assert {delays.get(task.id).status for task in mine} == {Status.NOT_COMPLETE}
    assert {delays.get(task.id).status for task in others} == {Status.FAILED}


def test_the_pattern_of_a_real_failure_finds_its_task(store: Store, delays: DelayTasks) -> None:
    harness = RunnerHarness(store)

    def charge(body: Any) -> None:
        raise ValueError(f"order {body} of 'customer_{body}' costs 100% {body}")

    harness.registry.processor("charge", retries="1h")(charge)
    harness.registry.processor("charge.once")(charge)
    waits, fails = harness.schedule("charge", 1), harness.schedule("charge.once", 2)
    other = harness.schedule("charge.once", 3)
    report = harness.run(waits, fails)
    patterns = {one.tag: one.pattern for one in report.statistics.failures}
    assert patterns["charge"] == patterns["charge.once"]
    assert [one.id for one in delays.find(tag="charge", error=patterns["charge"])] == [waits.id]
    found = delays.find(tag="charge.once", error=patterns["charge"])
    assert [one.id for one in found] == [fails.id]
    assert delays.cancel_many(tag="charge", error=patterns["charge"]).changed == 1
    assert harness.now(other).status is Status.NOT_COMPLETE


@pytest.mark.parametrize("pattern", ["", "*", "**", 5, "x" * 1001, "a\0b"])
def test_a_pattern_that_selects_nothing_in_particular_is_refused(
    delays: DelayTasks, pattern: Any
) -> None:
    with pytest.raises(InvalidQueryError, match="error"):
        delays.find(error=pattern)
