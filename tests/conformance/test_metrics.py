"""Metrics of the database, as Prometheus gets them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from delaytasks.operate.metrics import exporter_app
from tests.world import World
from tests.world.recording import delays_on


class Values:
    """The values that a scrape of a new exporter finds."""

    def __init__(self, delays: Any) -> None:
        request = {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": ""}
        body = b"".join(exporter_app(delays)(request, lambda *_: None))
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    def of(self, name: str, **labels: str) -> float | None:
        return self._values.get((f"delaytasks_{name}", frozenset(labels.items())))

    def late(self) -> dict[tuple[str, str], float]:
        """Return the overdue tasks by queue and tag."""
        found = {name: value for name, value in self._values.items() if "_by_tag" in name[0]}
        return {(dict(labels)["queue"], dict(labels)["tag"]): n for (_, labels), n in found.items()}


def test_a_scrape_counts_tasks_by_status_and_shows_the_oldest_overdue_one(world: World) -> None:
    world.schedule("mail", delay=60)
    values = Values(world.delays)
    assert values.of("oldest_overdue_seconds") == values.of("overdue_tasks") == 0
    assert values.late() == {}
    assert values.of("sweep_age_seconds", sweep_partition="0") == float("inf")
    world.sweep()
    first = world.put_many(3, due_s=-90, tag="mail", queue="letters")[0]
    world.claim(first)
    values = Values(world.delays)
    counts = [values.of("tasks", status=name) for name in ("NOT_COMPLETE", "RUNNING", "FAILED")]
    assert (counts, values.of("overdue_tasks")) == ([3, 1, 0], 2)
    assert (values.of("oldest_overdue_seconds") or 0) >= 90
    assert values.late() == {("letters", "mail"): 2}
    assert (values.of("database_up"), values.of("expired_leases")) == (1, 0)
    assert (values.of("sweep_age_seconds", sweep_partition="0") or 0) < 600
    world.change(first, lease_until=world.now() - timedelta(minutes=10))
    assert Values(world.delays).of("expired_leases") == 1
    world.delays.schedule_many((f"t{n}", {}, 0) for n in range(25))
    world.advance(90)
    assert len(Values(world.delays).late()) == 20, "the number of tags with a label is bounded"


def test_the_workers_that_report_are_counted_and_show_what_they_lack(world: World) -> None:
    world.serve("quiet", "default", beat_s=0)
    world.serve("alive", "default", "mail", clock_offset_s=0.25, beat_s=500)
    world.serve("cut off", "default", broker_down_s=120, timer_down_s=100, beat_s=0)
    world.silence(1000, "quiet")
    values = Values(world.delays)
    assert values.of("workers") == 2
    assert values.of("queue_workers", queue="default") == 2
    assert values.of("queue_workers", queue="mail") == 1
    assert values.of("worker_clock_offset_seconds", worker="alive") == 0.25
    for name, down_s in (("broker", 120), ("timer", 100)):
        assert values.of(f"worker_{name}_down_seconds", worker="alive") == 0
        assert (values.of(f"worker_{name}_down_seconds", worker="cut off") or 0) >= down_s
    assert (values.of("beat_age_seconds") or 0) >= 500, "a worker without a broker hears nothing"


@pytest.mark.quick
def test_a_database_that_does_not_answer_is_down(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("nothing")
    delays = delays_on(f"sqlite:///{folder / 'empty.sqlite3'}")
    values = Values(delays)
    assert values.of("database_up") == 0
    assert values.of("workers") is None
    delays.close()
