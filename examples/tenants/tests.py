"""Tests of the schedules of tenants, which need neither a broker nor a worker."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

import pytest
from sqlalchemy import create_engine

from delaytasks.testing import DelaysTester
from examples.tenants.app import add_tenant, delays, remove_tenant, send_now


@pytest.fixture
def tester() -> Iterator[DelaysTester]:
    engine = create_engine(f"sqlite:///{delays.settings.data_dir}/delays.sqlite3")
    with engine.begin() as connection:
        delays.create_tables(connection)
    engine.dispose()
    with DelaysTester(delays) as tester:
        tester.clear()
        tester.travel_to(datetime(2029, 12, 31, 12, tzinfo=timezone.utc))
        yield tester


def test_a_tenant_gets_a_report_each_day_in_its_time_zone(tester: DelaysTester) -> None:
    add_tenant("acme", "Europe/Berlin")
    add_tenant("initech", "Asia/Tokyo")
    runs = [(run.task.body["tenant"], run.at.day, run.at.hour) for run in tester.fast_forward("2d")]
    # It is 9:00 in Tokyo at 0:00 UTC, and in Berlin at 8:00 UTC.
    assert sorted(runs) == [("acme", 1, 8), ("acme", 2, 8), ("initech", 1, 0), ("initech", 2, 0)]


def test_a_report_between_two_occurrences_is_sent_immediately(tester: DelaysTester) -> None:
    add_tenant("globex", "America/New_York")
    id = send_now("globex")
    assert [run.task.id for run in tester.run_due()] == [id]


def test_a_tenant_that_left_gets_no_report(tester: DelaysTester) -> None:
    add_tenant("acme", "Europe/Berlin")
    remove_tenant("acme")
    assert tester.fast_forward("2d") == []
