"""Forecasts count what is due, and say how late it starts, on every database."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks import (
    DelayTasks,
    InvalidDelayError,
    InvalidQueryError,
    InvalidTagError,
    NewTask,
    Status,
)
from delaytasks.core.policies import Policy
from delaytasks.forecast.result import Forecast, TagForecast
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import put

HOUR_S, DAY_S = 3600.0, 86_400.0


def of_tag(forecast: Forecast, tag: str) -> TagForecast:
    [found] = [each for each in forecast.tags if each.tag == tag]
    return found


def dues(forecast: Forecast) -> dict[str, int]:
    return {tag.tag: tag.due for tag in forecast.tags}


def report_worker(
    delays: DelayTasks, name: str, queues: Sequence[str], concurrency: int = 2
) -> None:
    runtime_of(delays).store.workers.report(name, queues, "prefork", concurrency, 0)


def put_peak(delays: DelayTasks, tag: str, tasks: int, **options: Any) -> None:
    """Schedule tasks that are due together, at a full minute in about two hours."""
    at = runtime_of(delays).clock.certain_now().replace(second=0, microsecond=0)
    at += timedelta(hours=2, minutes=1)
    delays.schedule_many(NewTask(tag, n, at=at, **options) for n in range(tasks))


# -- what is due ----------------------------------------------------------------------------------


def test_an_empty_forecast_is_on_time(delays: DelayTasks, store: Store) -> None:
    forecast = delays.forecast()
    assert (forecast.due, forecast.late_s, forecast.needed_workers) == (0, 0, 0)
    assert (forecast.steps, forecast.tags, forecast.pools, forecast.worst) == ((), (), (), None)
    assert not forecast.is_estimate


def test_tasks_are_counted_by_step_and_tag(delays: DelayTasks, store: Store) -> None:
    delays.schedule_many(NewTask("mail", n, 2 * HOUR_S) for n in range(30))
    delays.schedule_many(NewTask("report", n, 2 * HOUR_S) for n in range(5))
    delays.schedule_delay("report", {}, 3 * DAY_S)
    delays.schedule_delay("report", {}, 8 * DAY_S)
    forecast = delays.forecast()
    assert not forecast.is_estimate
    assert dues(forecast) == {"mail": 30, "report": 6}
    first, second = forecast.steps
    assert (first.due, first.due_by_tag) == (35, {"mail": 30, "report": 5})
    assert (second.due, second.due_by_tag) == (1, {"report": 1})
    assert first.start.minute == first.start.second == 0
    assert first.start <= forecast.made_at + timedelta(hours=2) < first.start + timedelta(hours=1)
    assert dues(delays.forecast(days=1)) == {"mail": 30, "report": 5}
    json.dumps(forecast.as_json())


def test_a_forecast_of_one_tag_has_its_numbers_only(delays: DelayTasks, store: Store) -> None:
    at = runtime_of(delays).clock.certain_now() + timedelta(hours=2)
    tags = ["mail"] * 40 + ["report"] * 3
    delays.schedule_many(NewTask(tag, n, at=at) for n, tag in enumerate(tags))
    alone = delays.forecast(tag="report", workers=1, processes=1, rate=1)
    assert dues(alone) == {"report": 3}
    assert [step.due_by_tag for step in alone.steps] == [{"report": 3}]
    assert alone.steps[0].late_s == 42, "the other tag shares the process"


def test_overdue_and_retried_tasks_are_due_now_and_others_are_left_out(
    delays: DelayTasks, store: Store
) -> None:
    put(store, delays.get(delays.schedule_delay("overdue", {}, 60)), expected_time=_old(store))
    for status in (Status.DONE, Status.FAILED, Status.CANCELLED, Status.RUNNING):
        task = delays.get(delays.schedule_delay("other", {}, 60))
        put(store, task, status=int(status), lease_until=store.tasks.now() + timedelta(hours=1))
    forecast = delays.forecast()
    assert dues(forecast) == {"overdue": 1}
    assert forecast.steps[0].start <= forecast.made_at
    assert forecast.late_s == 0, "lateness counts from now on"


def _old(store: Store) -> Any:
    return store.tasks.now() - timedelta(days=30)


def test_all_queues_and_priorities_are_counted(delays: DelayTasks, store: Store) -> None:
    for queue in ("default", "mail", "slow"):
        for priority in (0, 5, 9):
            delays.schedule_delay("tag", {}, HOUR_S, queue=queue, priority=priority)
    assert delays.forecast().due == 9


# -- policies -------------------------------------------------------------------------------------


def test_paused_tasks_are_counted_and_never_start(delays: DelayTasks, store: Store) -> None:
    put_peak(delays, "mail", 10)
    put_peak(delays, "report", 10, queue="slow")
    put_peak(delays, "other", 10)
    held = delays.find(tag="mail").tasks[0]
    put(store, held, status=int(Status.HELD))
    delays.pause(tag="mail")
    delays.pause(queue="slow")
    forecast = delays.forecast()
    assert (forecast.due, forecast.paused) == (30, 20)
    for tag in ("mail", "report"):
        assert (of_tag(forecast, tag).is_paused, of_tag(forecast, tag).late_s) == (True, None)
    assert of_tag(forecast, "other").late_s is not None
    assert [pool.queues for pool in forecast.pools] == [("default",)]


@pytest.mark.parametrize(
    ("limits", "late_s"),
    [({"rate": "10/s"}, 9.9), ({"concurrency": 2}, 4.95), ({"rate": "600/m"}, 9.9)],
)
def test_limits_of_tags_are_simulated(
    delays: DelayTasks, store: Store, limits: dict[str, Any], late_s: float
) -> None:
    put_peak(delays, "limited", 100)
    delays.set_policy(tag="limited", **limits)
    forecast = delays.forecast(workers=10, processes=10, rate=10)
    limited = of_tag(forecast, "limited")
    assert limited.most_per_s == (20 if "concurrency" in limits else 10)
    assert limited.late_s == pytest.approx(late_s, abs=0.01)
    assert forecast.pools[0].needed_workers == 1
    [pool] = delays.forecast(workers=10, processes=10, rate=10, target=1).pools
    assert pool.needed_workers is None, "more workers do not help against a limit"


def test_a_held_task_of_a_limited_tag_is_due_now(delays: DelayTasks, store: Store) -> None:
    task = delays.get(delays.schedule_delay("limited", {}, 60))
    delays.set_policy(tag="limited", rate="10/s")
    put(store, task, status=int(Status.HELD), expected_time=_old(store))
    forecast = delays.forecast()
    assert (forecast.due, forecast.paused, forecast.late_s) == (1, 0, 0)


def test_limits_for_each_key_are_named_as_left_out(delays: DelayTasks, store: Store) -> None:
    put_peak(delays, "limited", 1)
    delays.set_policy(tag="limited", key_concurrency=1)
    assert any("'limited'" in note and "key" in note for note in delays.forecast().notes)


def test_a_limit_that_another_program_wrote_counts_as_none(
    delays: DelayTasks, store: Store
) -> None:
    policy = Policy("tag", "mail", rate=10, rate_period_s=-1.0)
    assert policy.unusable
    put_peak(delays, "mail", 10)
    delays.set_policy(tag="mail", rate="10/s")
    p = store.schema.policies
    with store.database.begin() as connection:
        connection.execute(update(p).values(rate_period_s=-1.0))
    assert of_tag(delays.forecast(), "mail").most_per_s is None


# -- workers --------------------------------------------------------------------------------------


def test_a_peak_is_late_and_more_workers_are_needed(delays: DelayTasks, store: Store) -> None:
    put_peak(delays, "mail", 4000)
    report_worker(delays, "a", ["default"], 2)
    report_worker(delays, "b", ["default"], 2)
    forecast = delays.forecast(rate=10)
    [pool] = forecast.pools
    assert (pool.workers, pool.processes) == (2, 4)
    assert pool.late_s == pytest.approx(100, abs=0.1)
    [step] = [step for step in forecast.steps if step.due]
    assert (step.due, step.late_s) == (4000, pool.late_s)
    assert step.late_s_doubled == pytest.approx(50, abs=0.1)
    assert pool.needed_workers == 4, "4 workers take 50 s, 3 take 67 s"
    assert delays.forecast(rate=10, workers=4).late_s == pytest.approx(50, abs=0.1)
    assert delays.forecast(rate=10, workers=4, processes=20).late_s == pytest.approx(5, abs=0.1)
    assert forecast.worst == step


def test_a_backlog_is_reported_at_the_end_of_each_step(delays: DelayTasks, store: Store) -> None:
    put_peak(delays, "mail", 1000)
    forecast = delays.forecast(workers=1, processes=1, rate=1, step=60)
    backlogs = [step.backlog for step in forecast.steps]
    assert backlogs[0] >= 940
    assert len(backlogs) in (16, 17), "1,000 tasks at one a second take 17 minutes"
    differences = [before - after for before, after in itertools.pairwise(backlogs)]
    assert differences == pytest.approx([60] * len(differences), abs=2)


def test_workers_of_other_queues_do_not_help(delays: DelayTasks, store: Store) -> None:
    put_peak(delays, "mail", 100, queue="mail")
    put_peak(delays, "report", 100, queue="slow")
    put_peak(delays, "lost", 5, queue="lost")
    report_worker(delays, "a", ["mail"], 2)
    report_worker(delays, "b", ["slow"], 1)
    forecast = delays.forecast(rate=1)
    assert [(pool.queues, pool.workers, pool.late_s) for pool in forecast.pools] == [
        (("lost",), 0, None),
        (("mail",), 1, pytest.approx(49.5)),
        (("slow",), 1, 99),
    ]
    assert forecast.late_s is None
    assert of_tag(forecast, "lost").late_s is None
    assert any("'lost'" in note for note in forecast.notes)
    report_worker(delays, "c", ["mail", "slow"], 1)
    shared = delays.forecast(rate=1).pools
    assert [(pool.queues, pool.workers, pool.processes) for pool in shared] == [
        (("lost",), 0, 0),
        (("mail", "slow"), 3, 4),
    ]
    report_worker(delays, "d", ["*"], 1)
    assert [pool.workers for pool in delays.forecast(rate=1).pools] == [4]


def test_a_silent_worker_does_not_count(delays: DelayTasks, store: Store) -> None:
    put_peak(delays, "mail", 10)
    report_worker(delays, "a", ["default"], 2)
    report_worker(delays, "b", ["default"], 2)
    w = store.schema.workers
    with store.database.begin() as connection:
        connection.execute(update(w).where(w.c.name == "b").values(seen_at=_old(store)))
    assert [pool.workers for pool in delays.forecast().pools] == [1]


def test_without_workers_the_forecast_is_for_one_and_says_so(
    delays: DelayTasks, store: Store
) -> None:
    put_peak(delays, "mail", 10)
    forecast = delays.forecast(processes=3)
    assert [(pool.workers, pool.processes) for pool in forecast.pools] == [(1, 3)]
    assert any("No worker is alive" in note for note in forecast.notes)


def test_the_speed_of_a_tag_is_given_or_assumed(delays: DelayTasks, store: Store) -> None:
    put_peak(delays, "mail", 10)
    assumed = of_tag(delays.forecast(), "mail")
    assert assumed.rate_source == "assumed"
    assert 10 < assumed.rate < 20
    given = of_tag(delays.forecast(rate=7), "mail")
    assert given.rate_source == "given"
    assert given.rate == pytest.approx(7)


# -- calls ----------------------------------------------------------------------------------------


def test_a_recent_result_of_the_same_question_is_returned_again(
    delays: DelayTasks, store: Store
) -> None:
    first = delays.forecast()
    put_peak(delays, "mail", 1)
    assert delays.forecast(max_age="1h") is first
    assert delays.forecast(days=6, max_age="1h").due == 1, "another question"
    assert delays.forecast().due == 1
    assert delays.forecast(max_age="1h").due == 1, "the newer result is kept"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"days": 0}, InvalidQueryError),
        ({"days": "7"}, InvalidQueryError),
        ({"days": float("nan")}, InvalidQueryError),
        ({"days": 10_000}, InvalidQueryError),
        ({"workers": 0}, InvalidQueryError),
        ({"workers": True}, InvalidQueryError),
        ({"processes": 2.5}, InvalidQueryError),
        ({"rate": 0}, InvalidQueryError),
        ({"rate": float("inf")}, InvalidQueryError),
        ({"rate": "fast"}, InvalidQueryError),
        ({"step": 0}, InvalidDelayError),
        ({"step": 1}, InvalidQueryError),
        ({"target": -1}, InvalidDelayError),
        ({"max_age": "soon"}, InvalidDelayError),
        ({"tag": ""}, InvalidTagError),
    ],
)
def test_wrong_arguments_are_refused(
    delays: DelayTasks, store: Store, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        delays.forecast(**options)
