"""The metrics of a process that schedules tasks."""

from __future__ import annotations

from typing import Any

from delaytasks import DelayTasks, NewTask
from delaytasks.metrics.process import ProducerMetrics


def counts(metrics: ProducerMetrics) -> dict[str, Any]:
    [family] = metrics.families()
    return {sample.labels[0]: sample.value for sample in family.samples}


def test_each_tag_is_counted_however_its_tasks_are_scheduled(delays: DelayTasks) -> None:
    delays.schedule_delay("before", {}, "1h")
    metrics = ProducerMetrics.of(delays)
    delays.schedule_delay("mail", {}, "1h")
    delays.schedule_many([NewTask(tag, {}, "1h") for tag in ("mail", "mail", "invoice")])
    assert counts(metrics) == {"mail": 3, "invoice": 1}


def test_a_task_that_exists_is_not_counted_again(delays: DelayTasks) -> None:
    metrics = ProducerMetrics.of(delays)
    for _ in range(2):
        delays.schedule_delay("mail", {}, "1h", key="a", on_conflict="keep")
    assert counts(metrics) == {"mail": 1}


def test_tags_beyond_the_limit_are_counted_as_one() -> None:
    metrics = ProducerMetrics(max_tags=2)
    for tag in ("a", "b", "c", "d", "a"):
        metrics("task.scheduled", {"tag": tag})
    assert counts(metrics) == {"a": 2, "b": 1, "(other)": 2}
