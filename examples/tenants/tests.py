"""Tests of several databases, which need neither a broker nor a worker. Each has a tester."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from sqlalchemy import create_engine

from delaytasks.testing import DelaysTester, create_tables
from examples.tenants.app import count_done, has_paid, remind_later, shards

TENANTS = [f"tenant-{number}" for number in range(12)]


@pytest.fixture
def testers() -> Iterator[list[DelaysTester]]:
    with ExitStack() as stack:
        testers = []
        for delays, url in zip(
            shards.members, os.environ["TENANTS_DATABASES"].split(), strict=True
        ):
            engine = create_engine(url)
            with engine.begin() as connection:
                create_tables(connection, delays)
            engine.dispose()
            testers.append(stack.enter_context(DelaysTester(delays)))
            testers[-1].clear()
        yield testers


def test_each_tenant_is_reminded_once(testers: list[DelaysTester]) -> None:
    for tenant in TENANTS * 2:
        remind_later(shards, tenant, "1h")
    runs = [tester.fast_forward("2h") for tester in testers]
    assert all(runs)
    reminded = [run.task.body["tenant"] for some in runs for run in some]
    assert sorted(reminded) == sorted(TENANTS)


def test_a_tenant_that_has_paid_is_not_reminded(testers: list[DelaysTester]) -> None:
    for tenant in TENANTS:
        remind_later(shards, tenant, "1h")
    assert has_paid(shards, "tenant-3")
    assert [tester.fast_forward("2h") for tester in testers]
    assert not has_paid(shards, "tenant-4")
    assert count_done() == 11
