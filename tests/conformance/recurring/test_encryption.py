"""The bodies of recurring schedules are encrypted, as those of tasks are."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.conformance.recurring.recurring_harness import RecurringHarness
from tests.recording import new_key

SECRET = {"card": "4111"}


def stored(store: Store) -> list[str]:
    with store.database.begin() as connection:
        return list(connection.execute(select(store.schema.recurring.c.message_body)).scalars())


def test_a_body_is_encrypted_in_the_schedule_and_in_its_tasks(
    store: Store, database_url: str
) -> None:
    harness = RecurringHarness(database_url, store, encryption_keys=[new_key()])
    harness.recurring.set("r", "mail", SECRET, every="20s", start=harness.at(20))
    harness.recurring.set("r", "report", SECRET, every="20s", start=harness.at(20))
    assert "4111" not in stored(store)[0]
    assert harness.recurring.get("r").body == SECRET, "also after a change of the tag"
    harness.store = runtime_of(harness.delays).store
    harness.sweep(0)
    assert [task.body for task in harness.tasks()] == [SECRET] * 3
    t = store.schema.tasks
    with store.database.begin() as connection:
        assert not [
            b for b in connection.execute(select(t.c.message_body)).scalars() if "4111" in b
        ]
    harness.close()


@pytest.mark.parametrize("keys", [[], [new_key()]])
def test_a_sweeper_without_the_key_makes_no_task_and_reports_it(
    store: Store, database_url: str, keys: list[str]
) -> None:
    owner = RecurringHarness(database_url, store, encryption_keys=[new_key()])
    owner.recurring.set("r", "report", SECRET, every="20s", start=owner.at(20))
    other = RecurringHarness(database_url, store, encryption_keys=keys)
    other.store = runtime_of(other.delays).store
    other.sweep(0)
    assert other.tasks() == []
    assert other.events.counts["recurring.failed"] == 1
    for harness in (owner, other):
        harness.close()
