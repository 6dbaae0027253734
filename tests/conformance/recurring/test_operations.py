"""Define, change, pause, run, remove and read recurring schedules."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from delaytasks import Status
from delaytasks.core.errors import (
    InvalidDelayError,
    InvalidInputError,
    InvalidMetaError,
    InvalidScheduleError,
    InvalidTagError,
    InvalidTimingError,
    NaiveDatetimeError,
    RecurringNotFoundError,
)
from tests.conformance.recurring.recurring_harness import RecurringHarness
from tests.conformance.transactions.shop import own_engine
from tests.waiting import wait_until


def test_a_schedule_is_stored_as_it_was_defined(harness: RecurringHarness) -> None:
    made = harness.recurring.set(
        "ünï 'quoted' %s", "report", {"ä": [1]}, cron="0  9 * * mon-fri", tz="Europe/Berlin"
    )
    found = harness.recurring.get("ünï 'quoted' %s")
    assert found == made
    assert (found.timing, found.tz, found.body) == (
        "0 9 * * mon-fri",
        "Europe/Berlin",
        {"ä": [1]},
    )
    assert found.next_at is not None
    assert found.next_at > harness.start


def test_the_same_definition_changes_nothing(harness: RecurringHarness) -> None:
    made = harness.recurring.set("r", "report", every="20s")
    harness.sweep(0)
    before = harness.recurring.get("r")
    assert harness.recurring.set("r", "report", every="20s") == before
    assert before.start_at == made.start_at
    assert set(harness.statuses()) == {"NOT_COMPLETE"}


def test_another_definition_replaces_the_tasks_that_wait(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", "old", every="20s", start=harness.at(20))
    harness.sweep(0)
    changed = harness.recurring.set("r", "report", "new", every="20s", start=harness.at(20))
    assert changed.next_at == harness.at(20)
    harness.sweep(0)
    waiting = [task for task in harness.tasks() if not task.is_finished]
    assert [task.body for task in waiting] == ["new"] * 3
    assert [(task.expected_time - harness.start).total_seconds() for task in waiting] == [
        20,
        40,
        60,
    ]


def test_a_paused_schedule_makes_no_task_until_it_is_resumed(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20))
    harness.sweep(0)
    assert harness.recurring.pause("r").is_paused
    assert harness.recurring.pause("r").next_at is None
    assert set(harness.statuses()) == {"CANCELLED"}
    harness.sweep(100)
    assert len(harness.tasks()) == 3
    resumed = harness.recurring.resume("r")
    assert resumed == harness.recurring.resume("r")
    assert resumed.next_at == harness.at(20)
    harness.sweep(0)
    assert harness.statuses().count("NOT_COMPLETE") == 3


def test_a_new_definition_keeps_the_pause(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s")
    harness.recurring.pause("r")
    changed = harness.recurring.set("r", "report", every="30s")
    assert changed.is_paused
    assert changed.next_at is None


def test_run_makes_one_task_and_keeps_the_occurrences(harness: RecurringHarness) -> None:
    before = harness.recurring.set("r", "report", {"n": 1}, every="1h")
    harness.recurring.pause("r")
    task = harness.recurring.run("r")
    assert task.body == {"n": 1}
    assert task.expected_time <= harness.store.tasks.now()
    assert harness.timer.ids == [task.id]
    assert harness.recurring.resume("r").next_at == before.next_at
    assert harness.delays.get(task.id).key == task.key


def test_the_next_task_does_not_overlap_one_that_run_has_made(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20), overlap="skip")
    task = harness.recurring.run("r")
    harness.sweep(0)
    assert [each.id for each in harness.tasks()] == [task.id]


def test_a_paused_schedule_without_overlap_that_is_run_stays_paused(
    harness: RecurringHarness,
) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20), overlap="skip")
    harness.recurring.pause("r")
    harness.finish([harness.recurring.run("r")])
    harness.sweep(0)
    assert len(harness.tasks()) == 1
    assert harness.recurring.get("r").next_at is None


def test_a_removed_schedule_is_gone_with_its_waiting_tasks(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20), jitter=5)
    harness.sweep(0)
    harness.recurring.remove("r")
    assert set(harness.statuses()) == {"CANCELLED"}
    assert harness.recurring.list() == []
    for call in (harness.recurring.get, harness.recurring.remove, harness.recurring.run):
        with pytest.raises(RecurringNotFoundError, match="no recurring schedule 'r'"):
            call("r")


def test_a_schedule_that_another_program_has_damaged_can_be_replaced_and_removed(
    harness: RecurringHarness,
) -> None:
    r = harness.store.schema.recurring
    for name in ("replaced", "removed"):
        harness.recurring.set(name, "report", every="20s")
    harness.sweep(0)
    with harness.store.database.begin() as connection:
        connection.execute(update(r).values(timing="nonsense"))
    assert harness.recurring.set("replaced", "report", every="30s").timing == "every 30"
    harness.recurring.remove("removed")
    assert len(harness.recurring.list()) == 1


def test_list_returns_pages_by_name(harness: RecurringHarness) -> None:
    for name in ("eu-1", "eu-2", "us-1", "us-2"):
        harness.recurring.set(name, f"tag.{name[:2]}", every="1h")

    def names(**filters: Any) -> list[str]:
        return [schedule.name for schedule in harness.recurring.list(**filters)]

    assert names() == ["eu-1", "eu-2", "us-1", "us-2"]
    assert names(limit=2, after="eu-1") == ["eu-2", "us-1"]
    assert names(prefix="us-") == names(tag="tag.us") == ["us-1", "us-2"]


def test_next_returns_occurrences_of_a_paused_schedule_too(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20))
    harness.recurring.pause("r")
    after = harness.at(25)
    assert harness.recurring.next("r", 2, after=after) == [harness.at(40), harness.at(60)]


def test_a_schedule_belongs_to_the_transaction_of_the_session(
    harness: RecurringHarness, database_url: str
) -> None:
    engine = own_engine(database_url)
    with Session(engine) as session:
        harness.recurring.set("r", "report", every="1h", session=session)
        session.rollback()
    assert harness.recurring.list() == []
    with Session(engine) as session:
        harness.recurring.set("r", "report", every="1h", session=session)
        session.commit()
    assert [schedule.name for schedule in harness.recurring.list()] == ["r"]
    with Session(engine) as session:
        harness.recurring.remove("r", session=session)
        session.rollback()
    assert [schedule.name for schedule in harness.recurring.list()] == ["r"]
    engine.dispose()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, InvalidScheduleError),
        ({"cron": "* * * * *", "every": 5}, InvalidScheduleError),
        ({"cron": "61 * * * *"}, InvalidTimingError),
        ({"cron": "0 0 31 2 *"}, InvalidTimingError),
        ({"cron": "* * *"}, InvalidTimingError),
        ({"cron": "* " * 400}, InvalidTimingError),
        ({"cron": object()}, InvalidTimingError),
        ({"cron": "* * * * *", "tz": "Mars/Olympus"}, InvalidTimingError),
        ({"cron": "* * * * *", "tz": "../etc/passwd"}, InvalidTimingError),
        ({"every": 0}, InvalidTimingError),
        ({"every": 1.5}, InvalidTimingError),
        ({"every": -5}, InvalidDelayError),
        ({"every": "5 parsecs"}, InvalidDelayError),
        ({"every": 5, "missed": "maybe"}, InvalidScheduleError),
        ({"every": 5, "most_missed": 0}, InvalidScheduleError),
        ({"every": 5, "overlap": "queue"}, InvalidScheduleError),
        ({"every": 5, "jitter": -1}, InvalidDelayError),
        ({"every": 5, "priority": 11}, InvalidInputError),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(
    harness: RecurringHarness, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        harness.recurring.set("r", "report", **options)
    assert harness.recurring.list() == []


def test_wrong_names_and_instants_are_refused(harness: RecurringHarness) -> None:
    with pytest.raises(InvalidScheduleError, match="at most 166"):
        harness.recurring.set("x" * 167, "report", every=5)
    with pytest.raises(InvalidTagError):
        harness.recurring.set("r", "", every=5)
    with pytest.raises(NaiveDatetimeError):
        harness.recurring.set("r", "report", every=5, start=harness.start.replace(tzinfo=None))
    with pytest.raises(TypeError, match="no option colour"):
        harness.recurring.set("r", "report", every=5, colour="red")  # type: ignore[call-arg]


def test_the_longest_name_fits_into_the_key_of_a_task(harness: RecurringHarness) -> None:
    harness.recurring.set("x" * 166, "report", every="20s", start=harness.at(20))
    harness.sweep(0)
    assert len(harness.tasks()) == 3
    assert len(harness.recurring.run("x" * 166).key or "") == 191


def test_a_missed_occurrence_stays_missed_if_other_options_change(
    harness: RecurringHarness,
) -> None:
    before = harness.at(-20)
    harness.recurring.set("r", "report", every="1h", start=before)
    r = harness.store.schema.recurring
    with harness.store.database.begin() as connection:
        connection.execute(update(r).values(next_at=before, last_at=None))
    assert harness.recurring.set("r", "report", {"n": 1}, every="1h").next_at == before
    changed = harness.recurring.set("r", "report", every="30m", start=harness.at(600))
    assert changed.next_at == harness.at(600), "the times are others"


@pytest.mark.slow
def test_a_change_leaves_the_task_of_an_occurrence_that_has_passed(
    harness: RecurringHarness,
) -> None:
    """With jitter the task may be due later than its occurrence."""
    harness.recurring.set("r", "report", every="1h", start=harness.at(10), jitter="50m")
    harness.sweep(0)
    [task] = harness.tasks()
    wait_until(lambda: harness.store.tasks.now() > harness.at(10), 15, "the occurrence to pass")
    harness.recurring.pause("r")
    assert harness.delays.get(task.id).status is Status.NOT_COMPLETE


def test_a_start_that_is_no_longer_defined_is_removed(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", cron="0 9 * * *", start=harness.at(10**8))
    assert harness.recurring.set("r", "report", cron="0 9 * * *").start_at is None


def test_each_task_has_the_meta_of_its_schedule(harness: RecurringHarness) -> None:
    options: Any = {"every": "10s", "retries": 2}
    made = harness.recurring.set("a", "report", meta={"tenant": "acme"}, **options)
    assert made.meta == {"tenant": "acme"}
    again = harness.recurring.set("a", "report", meta={"tenant": "acme"}, **options)
    assert again.version == made.version
    harness.sweep(0)
    harness.recurring.run("a")
    tasks = harness.tasks()
    assert len(tasks) > 1
    assert {task.meta["tenant"] for task in tasks} == {"acme"}
    assert {task.headers_json for task in tasks} == {
        harness.delays.schedule_delay("report", {}, 1, retries=2).headers_json
    }
    assert harness.delays.find(meta={"tenant": "acme"}, limit=1).tasks

    changed = harness.recurring.set("a", "report", meta={"tenant": "initech"}, **options)
    assert (changed.version, changed.meta) != (made.version, made.meta)
    assert harness.recurring.set("a", "report", **options).meta == {}
    with pytest.raises(InvalidMetaError):
        harness.recurring.set("a", "report", meta={"tenant": 7}, **options)  # type: ignore[dict-item]
