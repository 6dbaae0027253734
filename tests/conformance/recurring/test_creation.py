"""Sweeps make one task for each occurrence, ahead of time."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, update

from delaytasks.core.errors import StoreError
from delaytasks.recurrence import creation as creation_module
from tests.conformance.recurring.recurring_harness import RecurringHarness
from tests.conformance.store_rows import RUNNING
from tests.recording import CrashError


def test_a_sweep_makes_the_tasks_of_the_near_occurrences(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", {"n": 1}, every="20s", start=harness.at(20))
    harness.sweep(0)
    assert harness.due_s() == [20, 40, 60]
    assert [task.body for task in harness.tasks()] == [{"n": 1}] * 3
    harness.sweep(5)
    assert harness.due_s() == [20, 40, 60, 80]


def test_a_task_has_the_options_of_its_schedule(harness: RecurringHarness) -> None:
    options: dict[str, Any] = {"queue": "slow", "priority": 7, "retries": "15s 3m", "expires": "1h"}
    harness.recurring.set("r", "report", every="1m", concurrency_key="acme", **options)
    harness.sweep(0)
    [task] = harness.tasks()
    like = harness.delays.schedule_delay("other", None, 60, concurrency_key="acme", **options)
    assert (task.queue, task.priority, task.headers_json, task.concurrency_key, task.body) == (
        like.queue,
        like.priority,
        like.headers_json,
        like.concurrency_key,
        None,
    )
    assert task.key is not None
    assert task.key.startswith("r@")
    found = harness.delays.get(tag="report", key=task.key)
    assert found.id == task.id


def test_only_tasks_that_sweeps_may_have_passed_are_armed(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20))
    harness.sweep(0)
    near = [task.id for task in harness.tasks() if task.expected_time <= harness.at(31)]
    assert harness.armed.ids == near


def test_two_sweepers_make_each_task_once(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="10s", start=harness.at(10))
    for at_s in range(0, 100, 5):
        harness.sweep(at_s)
        harness.sweep(at_s)
    assert harness.due_s() == [*range(10, 180, 10)][: len(harness.due_s())]
    assert len(harness.due_s()) == 17


def test_a_sweeper_that_dies_before_its_commit_leaves_no_task(
    harness: RecurringHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.recurring.set("r", "report", every="10s", start=harness.at(10))

    def die(*_: object) -> None:
        raise CrashError

    creation = harness.creation()
    with monkeypatch.context() as patch:
        patch.setattr(creation._table, "advance", die)
        with pytest.raises(CrashError):
            creation.create(lambda: None)
    assert harness.due_s() == []
    harness.sweep(0)
    assert harness.due_s() == [10, 20, 30, 40, 50, 60, 70]


def test_a_changed_version_rolls_the_tasks_back(
    harness: RecurringHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the fence, the tasks of a change that the sweep has not seen would be written."""
    harness.recurring.set("r", "report", every="10s", start=harness.at(10))
    creation = harness.creation()
    r, read = harness.store.schema.recurring, creation._table.due

    def change_after_reading(on: Any, *arguments: Any) -> Any:
        found = read(on, *arguments)
        on.execute(update(r).values(version=r.c.version + 1))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(creation._table, "due", change_after_reading)
        with pytest.raises(StoreError, match="0 of 1"):
            creation.create(lambda: None)
    assert harness.due_s() == []


def test_an_occurrence_with_a_live_task_gets_no_second_one(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20))
    harness.sweep(0)
    r = harness.store.schema.recurring
    with harness.store.database.begin() as connection:
        connection.execute(update(r).values(next_at=harness.at(20)))
    harness.sweep(0)
    harness.sweep(20)
    assert harness.due_s() == [20, 40, 60, 80]


def test_all_due_schedules_are_visited_in_batches(
    harness: RecurringHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation_module, "BATCH_SCHEDULES", 3)
    for number in range(8):
        overlap: Any = "skip" if number % 2 else "allow"
        harness.recurring.set(
            f"r{number}", "report", every="1h", start=harness.at(10), overlap=overlap
        )
    harness.sweep(0)
    assert harness.due_s() == [10] * 8


def test_schedules_that_wait_for_their_last_task_do_not_hide_others(
    harness: RecurringHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation_module, "BATCH_SCHEDULES", 2)
    for number in range(5):
        harness.recurring.set(
            f"a{number}", "report", every="10s", start=harness.at(10), overlap="skip"
        )
    harness.sweep(0)  # one task each; the next occurrence waits until the task has ended
    harness.recurring.set("b", "other", every="1h", start=harness.at(60))
    harness.sweep(0)
    assert harness.due_s("other") == [60]


def test_the_statements_of_a_batch_do_not_grow_with_its_schedules(
    harness: RecurringHarness,
) -> None:
    def statements(schedules: int) -> int:
        for number in range(schedules):
            harness.recurring.set(
                f"n{number}", f"t{number}", every="1h", start=harness.at(10), overlap="skip"
            )
        seen: list[str] = []

        def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            seen.append(statement)

        event.listen(harness.store.database.tx, "before_cursor_execute", note)
        harness.sweep(0)
        event.remove(harness.store.database.tx, "before_cursor_execute", note)
        return len(seen)

    first = statements(1)
    assert statements(40) <= first + 1


def test_a_schedule_that_cannot_be_read_stops_no_other_one(harness: RecurringHarness) -> None:
    harness.recurring.set("bad", "report", every="10s", start=harness.at(10))
    harness.recurring.set("good", "report", every="1h", start=harness.at(10))
    r = harness.store.schema.recurring
    with harness.store.database.begin() as connection:
        connection.execute(update(r).where(r.c.name == "bad").values(timing="nonsense"))
    harness.sweep(0)
    assert [task.key for task in harness.tasks()] == [
        f"good@{harness.at(10).isoformat().replace('+00:00', 'Z')}"
    ]
    assert harness.events.counts["recurring.failed"] == 1


def test_many_missed_tasks_are_made_in_several_transactions(
    harness: RecurringHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation_module, "BATCH_TASKS", 30)
    for number in range(5):
        harness.recurring.set(
            f"r{number}", "report", every="10s", start=harness.at(10), missed="all"
        )
    steps: list[None] = []
    harness.sweep(195, lambda: steps.append(None))
    assert len(steps) == 3
    assert sorted(harness.due_s()) == sorted([*range(10, 271, 10)] * 5)


# -- missed occurrences ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missed", "made"), [("latest", [1000]), ("all", [980, 990, 1000]), ("skip", [1000])]
)
def test_of_many_missed_occurrences_the_policy_runs_some(
    harness: RecurringHarness, missed: Any, made: list[float]
) -> None:
    options: dict[str, Any] = {"missed": missed, "most_missed": 3}
    harness.recurring.set("r", "report", every="10s", start=harness.at(10), **options)
    harness.sweep(1005)
    assert [due for due in harness.due_s() if due <= 1005] == made
    assert [due for due in harness.due_s() if due > 1005] == [*range(1010, 1081, 10)]
    assert harness.events.counts["recurring.missed"] == 1


def test_an_occurrence_that_passed_long_ago_is_skipped(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="1h", start=harness.at(10), missed="skip")
    harness.sweep(90)
    assert harness.due_s() == []
    assert harness.events.counts["recurring.missed"] == 1


def test_a_sweep_that_is_a_little_late_misses_nothing(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="1h", start=harness.at(10), missed="skip")
    harness.sweep(50)
    assert harness.due_s() == [10]
    assert harness.events.counts["recurring.missed"] == 0


# -- overlap --------------------------------------------------------------------------------------


def test_without_overlap_the_next_task_is_made_when_the_last_one_has_ended(
    harness: RecurringHarness,
) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20), overlap="skip")
    harness.sweep(0)
    harness.sweep(5)
    assert harness.due_s() == [20]
    harness.finish(harness.tasks())
    harness.sweep(22)
    assert harness.due_s() == [20, 40]


def test_an_occurrence_is_skipped_while_the_last_task_runs(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20), overlap="skip")
    harness.sweep(0)
    [running] = harness.tasks()
    t = harness.store.schema.tasks
    with harness.store.database.begin() as connection:
        connection.execute(update(t).values(**RUNNING))
    for at_s in range(25, 70, 5):  # over the occurrences at 40 and 60
        harness.sweep(at_s)
    assert harness.due_s() == [20]
    assert harness.events.counts["recurring.overlapped"] == 2
    assert harness.recurring.get("r").last_at == harness.at(20)
    harness.finish([running])
    harness.sweep(70)
    assert harness.due_s() == [20, 80]


def test_of_missed_occurrences_that_must_not_overlap_the_last_one_runs(
    harness: RecurringHarness,
) -> None:
    options: dict[str, Any] = {"missed": "all", "overlap": "skip"}
    harness.recurring.set("r", "report", every="10s", start=harness.at(10), **options)
    harness.sweep(1005)
    assert harness.due_s() == [1000]
    assert harness.events.counts["recurring.missed"] == 1


# -- jitter ---------------------------------------------------------------------------------------


def test_jitter_delays_each_task_by_a_part_of_it_that_no_sweep_changes(
    harness: RecurringHarness,
) -> None:
    for number in range(20):
        harness.recurring.set(
            f"r{number}", "report", every="1h", start=harness.at(10), jitter="30s"
        )
    harness.sweep(0)
    made = harness.due_s()
    assert all(10 <= due <= 40 for due in made)
    assert len({*made}) > 15
    keys = {(task.key or "").partition("@")[2] for task in harness.tasks()}
    assert keys == {harness.at(10).isoformat().replace("+00:00", "Z")}


def test_each_occurrence_has_a_jitter_of_its_own(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="10s", start=harness.at(10), jitter="5s")
    harness.sweep(0)
    assert len({round(due % 10, 3) for due in harness.due_s()}) > 1
