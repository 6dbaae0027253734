"""With very many waiting tasks, a forecast estimates instead of counting."""

from __future__ import annotations

from datetime import timedelta

import pytest

from delaytasks import DelayTasks, NewTask
from delaytasks.forecast import queries
from delaytasks.forecast.due_counts import DueCount, parts_of, scaled, tagged
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store

EVEN, PEAK = 6000, 3000


@pytest.fixture
def many(delays: DelayTasks, store: Store, monkeypatch: pytest.MonkeyPatch) -> DelayTasks:
    """Tasks that are due at any time of three days, and a peak, on a database with estimates."""
    if not store.database.can.estimates:
        pytest.skip("this database counts all rows")
    monkeypatch.setattr(queries, "MAX_EXACT", 100)
    monkeypatch.setattr(queries, "SAMPLED", 4000)
    delays.schedule_many(NewTask("even", n, 3600 + n * 43.2) for n in range(EVEN))
    at = runtime_of(delays).clock.certain_now().replace(microsecond=0) + timedelta(hours=30)
    delays.schedule_many(NewTask("peak", n, at=at) for n in range(PEAK))
    with store.database.auto.connect() as connection:
        word = "ANALYZE" if store.database.can.block_samples else "ANALYZE TABLE"
        connection.exec_driver_sql(f"{word} {store.schema.tasks.name}").close()
    return delays


def test_a_sample_estimates_the_numbers_of_all_tags_and_steps(many: DelayTasks) -> None:
    forecast = many.forecast()
    assert forecast.is_estimate
    found = {tag.tag: tag.due for tag in forecast.tags}
    assert found["even"] == pytest.approx(EVEN, rel=0.35)
    assert found["peak"] == PEAK, "the peaks of a sample are counted"
    assert forecast.worst is not None
    peaks = [step for step in forecast.steps if "peak" in step.due_by_tag]
    assert len(peaks) == 1


def test_even_tasks_of_a_sample_are_not_late(many: DelayTasks) -> None:
    late = {tag.tag: tag.late_s for tag in many.forecast(rate=5, workers=1, processes=1).tags}
    assert late["peak"] == pytest.approx(600, rel=0.05)
    many.cancel_many(tag="peak")
    assert many.forecast(rate=5, workers=1, processes=1).late_s == 0


def test_an_old_estimate_of_the_planner_does_not_lead_to_counting_all(
    many: DelayTasks, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner believes that few rows wait, and counting gives up after `MAX_EXACT`."""
    monkeypatch.setattr(queries, "estimate", lambda *_: 150)
    forecast = many.forecast()
    assert forecast.is_estimate
    assert forecast.due == pytest.approx(EVEN + PEAK, rel=0.01), "150 rows need the whole table"


def test_parts_have_as_many_tasks_and_a_peak_is_a_part_of_its_own() -> None:
    seconds = dict.fromkeys(range(1000), 1) | {500: 2000}
    parts = list(parts_of(seconds))
    assert {500: 2000} in parts
    assert sum(map(len, parts)) == 1000
    assert max(sum(part.values()) for part in parts if 500 not in part) <= 2999 / 100
    [peak] = tagged("q", {500: 2000}, ["a"])
    assert peak == DueCount("q", "a", 500, 2000)
    assert sum(each.tasks for each in tagged("q", parts[0], ["a", "b"])) == pytest.approx(29)


def test_a_sample_is_spread_over_its_minute_and_peaks_are_kept() -> None:
    sample = [
        DueCount("q", "even", 605, 1),
        DueCount("q", "even", 642, 1),
        DueCount("q", "peak", 660, 40),
        DueCount("q", "peak", 671, 1),
    ]
    found = scaled(sample, 100)
    assert sum(each.tasks for each in found) == pytest.approx(4300)
    even = [each for each in found if each.tag == "even"]
    assert [(each.second, each.length_s) for each in even] == [(600, 20), (620, 20), (640, 20)]
    assert DueCount("q", "peak", 660, 4000) in found
