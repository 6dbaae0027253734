"""Held tasks are released step by step, by one process or several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, select, update

from delaytasks import DelayTasks, NewTask, Status
from delaytasks.maintenance import sweeper as engine_holding
from delaytasks.runtime import runtime_of
from delaytasks.storage import policy_rows as store_holding
from tests.conformance.policies.policy_harness import HOUR, PolicyHarness
from tests.recording import CrashError, counted

# -- resume --------------------------------------------------------------------------------------


def test_after_a_resume_held_tasks_run_in_the_order_of_their_due_times(
    field: PolicyHarness,
) -> None:
    rows = [field.add(in_s=-in_s, body=in_s) for in_s in (10, 50, 30, 20, 40)]
    field.delays.pause(tag="mail")
    field.sweep()
    assert field.run(*rows).claimed == 0
    field.delays.resume(tag="mail")
    field.sweep()
    assert field.statuses(*rows) == ["NOT_COMPLETE"] * 5
    assert field.count("task.released") == 5
    field.delays.runner().run_due("default", [0], 10)
    assert field.ran == [50, 40, 30, 20, 10]
    assert field.delays.policies() == [], "a policy that says nothing is gone"
    with field.store.database.begin() as connection:
        [row] = connection.execute(select(field.store.schema.policies)).all()
    assert row.version == row.applied_version, (
        "the row stays for those who have not read yet that it says nothing"
    )


def test_a_released_task_within_the_horizon_is_armed(field: PolicyHarness) -> None:
    near, far, late = field.add(in_s=20), field.add(in_s=HOUR), field.add(in_s=-5)
    field.delays.pause(tag="mail")
    field.sweep()
    field.timer.armed.clear()
    field.delays.resume(tag="mail")
    field.sweep()
    [entry] = field.timer.armed
    assert (entry.id, entry.version) == (near.id, near.version + 2)
    assert field.statuses(near, far, late) == ["NOT_COMPLETE"] * 3


@pytest.mark.slow
def test_held_tasks_are_released_step_by_step_and_the_oldest_first(
    field: PolicyHarness, small_steps: None
) -> None:
    rows = [
        field.add(in_s=-in_s, priority=priority) for priority in (0, 5) for in_s in (10, 30, 20)
    ]
    field.delays.pause(tag="mail")
    field.sweep_until(lambda: field.count("task.held") >= 6)
    field.delays.resume(tag="mail")
    order: list[int] = []
    for _ in range(100):
        field.sweep()
        order += [
            task.id
            for task in rows
            if task.id not in order and field.statuses(task) == ["NOT_COMPLETE"]
        ]
    expected = [rows[n].id for n in (4, 5, 3, 1, 2, 0)]
    assert order == expected, "the highest priority first, then by their times"


def test_a_tag_that_is_resumed_stays_held_in_a_queue_that_is_not(field: PolicyHarness) -> None:
    here, there = field.add(queue="slow"), field.add()
    field.delays.pause(tag="mail")
    field.delays.pause(queue="slow")
    field.sweep()
    field.delays.resume(tag="mail")
    field.sweep()
    assert field.statuses(here, there) == ["HELD", "NOT_COMPLETE"]
    field.delays.resume(queue="slow")
    field.sweep()
    assert field.statuses(here) == ["NOT_COMPLETE"]


def test_a_worker_with_outdated_policies_runs_claimed_tasks_of_a_resumed_tag(
    field: PolicyHarness,
) -> None:
    field.delays.pause(tag="mail")
    stale = field.process()
    runtime_of(stale).policy_cache.follow(runtime_of(stale).policy_cache.refresh().stamp)
    field.delays.resume(tag="mail")
    field.sweep()
    task = field.add(in_s=-5, body="ran")
    field.run(task, process=stale)
    assert (field.statuses(task), field.ran) == (["DONE"], ["ran"])


def test_a_process_with_an_outdated_pause_holds_no_rows(field: PolicyHarness) -> None:
    task = field.add()
    assert field.store.paused_rows.hold([task.id]) == 0
    field.delays.pause(queue="default")
    assert field.store.paused_rows.hold([task.id]) == 1
    assert field.store.paused_rows.hold([task.id]) == 0


def test_a_resume_between_looking_and_holding_leaves_nothing_held_or_counted(
    field: PolicyHarness,
) -> None:
    if field.store.database.url.get_backend_name() == "sqlite":
        pytest.skip("SQLite lets one writer in at a time")
    tasks = [field.add(), field.add("sms")]
    field.delays.pause(tag="mail")
    field.delays.pause(tag="sms")
    other, resumed = field.process(), list[str]()

    def resume_first(*args: Any) -> None:
        if not resumed and args[2].startswith("UPDATE") and "yb_delay_task_message" in args[2]:
            resumed.append("mail")
            other.resume(tag="mail")

    event.listen(field.store.database.tx, "before_cursor_execute", resume_first)
    assert field.store.paused_rows.hold([task.id for task in tasks]) == 1
    assert (resumed, field.statuses(*tasks)) == (["mail"], ["NOT_COMPLETE", "HELD"])


def test_a_held_row_without_a_pause_is_released(field: PolicyHarness) -> None:
    task = field.add()
    t = field.store.schema.tasks
    with field.store.database.begin() as connection:
        connection.execute(update(t).values(status=int(Status.HELD)))
    field.sweep()
    assert field.statuses(task) == ["NOT_COMPLETE"]


def test_a_locked_row_is_released_after_its_transaction_has_ended(field: PolicyHarness) -> None:
    if field.store.database.url.get_backend_name() == "sqlite":
        return  # SQLite locks the database for each writer, so no other sweep runs
    locked, free = field.add(), field.add()
    field.delays.pause(tag="mail")
    field.sweep()
    field.delays.resume(tag="mail")
    t = field.store.schema.tasks
    with field.store.database.begin() as connection:
        connection.execute(select(t.c.id).where(t.c.id == locked.id).with_for_update()).all()
        field.sweep()
        assert field.statuses(free) == ["NOT_COMPLETE"]
    assert field.statuses(locked) == ["HELD"]
    field.sweep()
    assert field.statuses(locked) == ["NOT_COMPLETE"]
    field.sweep()
    assert field.delays.policies() == []


# -- steps, several processes and crashes --------------------------------------------------------


def test_each_sweep_holds_a_part_of_the_rows_and_the_next_sweep_continues(
    field: PolicyHarness, small_steps: None
) -> None:
    rows = [field.add(in_s=HOUR + n) for n in range(5)]
    others = [field.add("sms", HOUR + n) for n in range(5)]
    field.delays.pause(tag="mail")
    seen = []
    for _ in range(100):
        field.sweep()
        seen.append(len(field.held()))
        if field.delays.policies()[0].is_applied:
            break
    assert seen[-1] == 5
    assert max(b - a for a, b in zip([0, *seen], seen, strict=False)) == 1, (
        "one row in a sweep at most"
    )
    assert field.statuses(*rows, *others) == ["HELD"] * 5 + ["NOT_COMPLETE"] * 5


def test_the_last_of_several_pauses_and_resumes_is_applied(
    field: PolicyHarness, small_steps: None
) -> None:
    rows = [field.add(in_s=HOUR + n) for n in range(6)]
    field.delays.pause(tag="mail")
    field.sweep_until(lambda: field.count("task.held") >= 3)
    field.delays.resume(tag="mail")
    field.sweep_until(lambda: field.count("task.released") >= 1)
    field.delays.pause(tag="mail")
    field.sweep_until(lambda: field.delays.policies()[0].is_applied)
    assert field.statuses(*rows) == ["HELD"] * 6
    field.delays.clear_policy(tag="mail")
    field.sweep_until(lambda: not field.delays.policies())
    assert field.statuses(*rows) == ["NOT_COMPLETE"] * 6


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_the_next_sweep_continues_the_work_of_one_that_died(
    field: PolicyHarness, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [field.add(in_s=HOUR + n) for n in range(5)]
    if verb == "resume":
        field.delays.pause(tag="mail")
        field.sweep()
    monkeypatch.setattr(engine_holding, "PAUSE_ROWS", 2)
    getattr(field.delays, verb)(tag="mail")
    runtime = runtime_of(field.delays)
    calls: list[Any] = []
    move = getattr(runtime.store.paused_rows, {"pause": "hold", "resume": "release"}[verb])

    def dies(ids: Any) -> Any:
        calls.append(ids)
        if len(calls) == 2:
            raise CrashError
        return move(ids)

    monkeypatch.setattr(runtime.store.paused_rows, move.__name__, dies)
    with pytest.raises(CrashError):
        field.sweep()
    monkeypatch.undo()
    half = field.statuses(*rows)
    assert {"HELD", "NOT_COMPLETE"} == set(half)
    field.sweep(field.process())
    assert field.statuses(*rows) == [{"pause": "HELD", "resume": "NOT_COMPLETE"}[verb]] * 5


def test_simultaneous_pause_sweeps_of_several_workers_count_each_row_once(
    field: PolicyHarness,
) -> None:
    field.delays.schedule_many([NewTask("mail", n, HOUR) for n in range(1500)])
    walkers = [field.process() for _ in range(3)]

    def walk(process: DelayTasks) -> int:
        holding = runtime_of(process).sweeper._pauses
        assert holding is not None
        holding.walk(holding.cache.refresh(), lambda: None)
        return sum(process.events.counts[name] for name in ("task.held", "task.released"))

    for verb in ("pause", "resume"):
        getattr(field.delays, verb)(tag="mail")
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(walk, walkers))
        for _ in range(10):
            walk(field.delays)
    moved = sum(
        p.events.counts[n] for p in [*walkers, field.delays] for n in ("task.held", "task.released")
    )
    assert (field.held(), moved) == ([], 3000), "each row was held once and released once"


# -- policies ------------------------------------------------------------------------------------


def test_all_of_many_rows_with_one_due_time_are_held_and_released(
    field: PolicyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_holding, "ROWS_PER_QUERY", 3)
    at = field.store.tasks.now() + timedelta(hours=1)
    rows = [NewTask("mail" if n % 3 == 0 else "sms", n, at=at) for n in range(20)]
    rows += [NewTask("mail", n, at=at + timedelta(seconds=n - 2)) for n in range(5)]
    field.delays.schedule_many(rows)
    field.delays.pause(tag="mail")
    field.sweep()
    assert (len(field.held()), counted(field.store)[Status.NOT_COMPLETE]) == (12, 13)
    field.delays.resume(tag="mail")
    field.sweep()
    assert field.held() == []
