"""Limits from another program that no worker can apply."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert, text

from delaytasks import DelayTasks, Status
from delaytasks.cli.deployment import read_deployment
from delaytasks.cli.policies import _limits, _row
from delaytasks.cli.waiting import warnings_of
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.recording import RecordingTimer

pytestmark = pytest.mark.slow

#: `rate` and `rate_period_s` as SQL, and the databases that can store them.
RATES = [
    ("0", "1", "postgresql mysql sqlite"),
    ("-5", "1", "postgresql mysql sqlite"),
    ("5", "NULL", "postgresql mysql sqlite"),
    ("5", "0", "postgresql mysql sqlite"),
    ("5", "-1", "postgresql mysql sqlite"),
    ("5", "1e300", "postgresql mysql sqlite"),
    ("5", "'NaN'", "postgresql"),
    ("5", "'Infinity'", "postgresql"),
    ("5", "'-Infinity'", "postgresql"),
    ("5", "9e999", "sqlite"),
    ("'x'", "1", "sqlite"),
    ("5", "'x'", "sqlite"),
]


def store_policy(store: Store, **values: str) -> None:
    p = store.schema.policies
    with store.database.begin() as connection:
        connection.execute(insert(p).values(kind="tag", name="mail", is_paused=False, version=1))
        changes = ", ".join(f"{name} = {value}" for name, value in values.items())
        connection.execute(text(f"UPDATE {p.name} SET {changes}"))


def run_one(delays: DelayTasks) -> Status:
    task = delays.schedule_delay("mail", {}, 0)
    delays.runner().run([Entry(task.id, task.version, 0)])
    delays.runner().run_due("default", [0], 100, 0.5)
    return delays.get(task).status


def look(delays: DelayTasks) -> list[str]:
    """Read the policies like `policy list`, `stats` and `check`.

    Return the warnings about the tag `mail`. A test server may cause others, for example without
    fsync.
    """
    for policy in delays.policies():
        _row(policy), _limits(policy), policy.as_json()
    read_deployment(delays)
    runtime_of(delays).policy_cache.refresh(checks=True)
    return [warning for warning in warnings_of(delays) if "mail" in warning]


@pytest.fixture(autouse=True)
def _processor(delays: DelayTasks) -> None:
    delays.processor("mail")(lambda body: None)


@pytest.mark.parametrize(("rate", "period", "where"), RATES)
def test_a_rate_that_no_worker_can_apply_is_ignored_and_reported(
    store: Store, delays: DelayTasks, timer: RecordingTimer, rate: str, period: str, where: str
) -> None:
    if store.database.url.get_backend_name() not in where.split():
        pytest.skip(f"only {where} can store it")
    store_policy(store, rate=rate, rate_period_s=period)
    told: list[dict[str, Any]] = []
    delays.events.subscribe(
        lambda name, fields: told.append(fields) if name == "policy.ignored" else None
    )
    assert [run_one(delays) for _ in range(3)] == [Status.DONE] * 3
    for _ in range(2):
        runtime_of(delays).sweeper._read_policies()
    assert [fields["policy"] for fields in told] == ["mail"]
    assert told[0]["limits"].startswith("rate = ")
    [warning] = look(delays)
    assert "rate_period_s" in warning


@pytest.mark.parametrize("column", ["concurrency", "key_concurrency"])
def test_a_limit_that_is_not_a_number_is_ignored(
    store: Store, delays: DelayTasks, timer: RecordingTimer, column: str
) -> None:
    if store.database.url.get_backend_name() != "sqlite":
        pytest.skip("only SQLite stores values of any type")
    store_policy(store, **{column: "'x'"})
    assert run_one(delays) is Status.DONE
    assert [one for one in look(delays) if f"{column} = 'x'" in one]


@pytest.mark.parametrize("column", ["concurrency", "key_concurrency"])
@pytest.mark.parametrize("limit", ["0", "-2000000000"])
def test_a_limit_below_one_does_not_stop_the_other_tags(
    store: Store, delays: DelayTasks, timer: RecordingTimer, column: str, limit: str
) -> None:
    store_policy(store, **{column: limit})
    delays.processor("other")(lambda body: None)
    limited = [delays.schedule_delay("mail", {}, 0, concurrency_key=f"k{n % 3}") for n in range(9)]
    other = delays.schedule_delay("other", {}, 0)
    for _ in range(3):
        delays.runner().run_due("default", [0], 100, 0.5)
    assert delays.get(other).status is Status.DONE
    if column == "concurrency":
        assert {delays.get(task).status for task in limited} == {Status.HELD}
    look(delays)


def test_an_invalid_rate_can_be_removed(store: Store, delays: DelayTasks) -> None:
    store_policy(store, rate="0", rate_period_s="NULL")
    assert delays.set_policy(tag="mail", rate=None).rate is None
    assert look(delays) == []
