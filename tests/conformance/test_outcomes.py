"""How attempts end, on each database: retry schedules, outcomes, attempts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks.core.errors import DuplicateTaskError, TaskNotFoundError
from delaytasks.core.retry_schedule import RetrySchedule
from delaytasks.core.states import Status
from delaytasks.core.task import Cancel, DelayTask, Done, Fail, NewTask, Retry, Snooze
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now
from tests.recording import RunnerHarness


@pytest.fixture
def bench(store: Store) -> RunnerHarness:
    return RunnerHarness(store)


def run_again(bench: RunnerHarness, task: DelayTask) -> DelayTask:
    """Make the task due, run it again, and return it."""
    bench.change(task, expected_time=bench.clock.now() - timedelta(milliseconds=10))
    bench.run(bench.now(task))
    return bench.now(task)


def returns(bench: RunnerHarness, tag: str, value: Any, **options: Any) -> None:
    bench.registry.processor(tag, **options)(lambda body: value)


def raises(bench: RunnerHarness, tag: str, error: BaseException, **options: Any) -> None:
    def fail(body: Any) -> None:
        raise error

    bench.registry.processor(tag, **options)(fail)


def wait_s(bench: RunnerHarness, task: DelayTask) -> float:
    return (task.expected_time - bench.clock.now()).total_seconds()


def test_a_retry_schedule_with_two_delays_allows_three_runs(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError("busy"), retries="10s 60s")
    task = bench.schedule("pay")
    bench.run(task)
    first = bench.now(task)
    assert (first.status, first.attempts, first.lapses) == (Status.NOT_COMPLETE, 1, 0)
    assert 9 < wait_s(bench, first) <= 10
    assert first.error is not None
    assert "busy" in first.error
    second = run_again(bench, task)
    assert second.status is Status.NOT_COMPLETE
    assert 59 < wait_s(bench, second) <= 60
    third = run_again(bench, task)
    assert (third.status, third.attempts) == (Status.FAILED, 3)
    kept = bench.store.tasks.attempts(task.id)
    assert [(one.number, one.worker) for one in kept] == [(n, "worker-1") for n in (1, 2, 3)]
    for one in kept:
        assert one.began is not None
        assert one.began <= one.ended
        assert one.error is not None
        assert "ConnectionError: busy" in one.error


def test_a_retry_that_is_due_within_the_horizon_is_armed(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError(), retries="10s 1h")
    task = bench.schedule("pay")
    bench.run(task)
    [entry] = bench.timer.armed
    assert (entry.id, entry.version) == (task.id, bench.now(task).version)
    bench.timer.armed.clear()
    run_again(bench, task)
    assert bench.timer.armed == []


def test_a_task_that_succeeds_after_a_retry_is_done_and_keeps_its_failed_attempts(
    bench: RunnerHarness,
) -> None:
    answers = [ConnectionError("first"), None]

    @bench.registry.processor("pay", retries="1s 1s")
    def pay(body: Any) -> None:
        error = answers.pop(0)
        if error is not None:
            raise error

    task = bench.schedule("pay")
    bench.run(task)
    done = run_again(bench, task)
    assert (done.status, done.attempts, done.error) == (Status.DONE, 2, None)
    assert [one.number for one in bench.store.tasks.attempts(task.id)] == [1]


def test_a_success_leaves_no_attempt(bench: RunnerHarness) -> None:
    task = bench.schedule()
    bench.run(task)
    assert bench.store.tasks.attempts(task.id) == []


def test_a_task_may_have_its_own_retry_schedule(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError())
    task = bench.schedule("pay", retries=RetrySchedule("30s"))
    assert bench.now(task).retry_schedule == RetrySchedule("30s")
    bench.run(task)
    assert 29 < wait_s(bench, bench.now(task)) <= 30
    assert run_again(bench, task).status is Status.FAILED


def test_an_error_without_a_retry_schedule_fails_the_task_without_a_retry(
    bench: RunnerHarness,
) -> None:
    raises(bench, "pay", ValueError("wrong account"), retries={ValueError: None, Exception: "10s"})
    task = bench.schedule("pay")
    bench.run(task)
    assert bench.now(task).status is Status.FAILED


@pytest.mark.slow
def test_the_last_fifty_attempts_are_kept(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError(), retries=RetrySchedule.fixed(0, times=60))
    task = bench.schedule("pay")
    for _ in range(60):
        run_again(bench, task)
    assert [one.number for one in bench.store.tasks.attempts(task.id)] == list(range(11, 61))
    run_again(bench, task)
    bench.store.tasks.rerun(task.id, bench.store.tasks.now())  # counts attempts from 1 again
    for _ in range(55):
        run_again(bench, task)
    assert [one.number for one in bench.store.tasks.attempts(task.id)] == list(range(6, 56))


def test_a_lapse_is_an_attempt_that_failed(bench: RunnerHarness) -> None:
    task = bench.schedule()
    bench.claims.claim([bench.entry(task)])
    bench.change(task, lease_until=bench.clock.now() - timedelta(seconds=1))
    bench.store.sweeps.recover(5, 10)
    [kept] = bench.store.tasks.attempts(task.id)
    assert (kept.number, kept.worker) == (1, "worker-1")
    assert "lost its lease" in (kept.error or "")


# -- outcomes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, Done(), 7, "text"])
def test_anything_that_is_no_outcome_is_success(bench: RunnerHarness, value: Any) -> None:
    returns(bench, "pay", value)
    task = bench.schedule("pay")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).result) == (Status.DONE, None)


@pytest.mark.parametrize(
    ("value", "kept"), [({"paid": 7}, {"paid": 7}), (Done([1, "é"]), [1, "é"]), (None, None)]
)
def test_a_result_is_stored_if_the_processor_has_keep_result(
    bench: RunnerHarness, value: Any, kept: Any
) -> None:
    returns(bench, "pay", value, keep_result=True)
    task = bench.schedule("pay")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).result) == (Status.DONE, kept)


@pytest.mark.parametrize("value", [object(), "x" * 100_000, float("nan")])
def test_a_result_that_cannot_be_stored_leaves_the_task_done(
    bench: RunnerHarness, value: Any
) -> None:
    returns(bench, "pay", value, keep_result=True)
    task = bench.schedule("pay")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).result) == (Status.DONE, None)
    assert len(bench.named("result.dropped")) == 1


def test_retry_with_a_time_waits_for_it_and_uses_one_retry_delay(bench: RunnerHarness) -> None:
    returns(bench, "pay", Retry(after="5m", reason="the bank is closed"), retries="10s")
    task = bench.schedule("pay")
    bench.run(task)
    first = bench.now(task)
    assert (first.status, first.attempts, first.error) == (
        Status.NOT_COMPLETE,
        1,
        "the bank is closed",
    )
    assert 299 < wait_s(bench, first) <= 300
    assert run_again(bench, task).status is Status.FAILED


def test_retry_without_a_time_waits_for_the_next_retry_delay(bench: RunnerHarness) -> None:
    returns(bench, "pay", Retry(), retries="10s")
    task = bench.schedule("pay")
    bench.run(task)
    assert 9 < wait_s(bench, bench.now(task)) <= 10


def test_retry_without_a_time_and_a_retry_schedule_fails_with_an_explanation(
    bench: RunnerHarness,
) -> None:
    returns(bench, "pay", Retry())
    task = bench.schedule("pay")
    bench.run(task)
    assert bench.now(task).status is Status.FAILED
    assert "needs a retry schedule" in (bench.now(task).error or "")


def test_snooze_uses_no_attempt(bench: RunnerHarness) -> None:
    returns(bench, "pay", Snooze("1h"), retries="10s")
    task = bench.schedule("pay")
    for _ in range(3):
        snoozed = run_again(bench, task)
        assert (snoozed.status, snoozed.attempts, snoozed.error) == (Status.NOT_COMPLETE, 0, None)
        assert 3599 < wait_s(bench, snoozed) <= 3600
    assert bench.store.tasks.attempts(task.id) == []


def test_cancel_ends_the_task_and_frees_its_key(bench: RunnerHarness) -> None:
    returns(bench, "pay", Cancel("paid by other means"), retries="10s")
    task = bench.schedule("pay", key="7")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).error) == (
        Status.CANCELLED,
        "paid by other means",
    )
    assert bench.schedule("pay", key="7").id != task.id, "its key is free"


def test_fail_uses_no_further_retry(bench: RunnerHarness) -> None:
    returns(bench, "pay", Fail("no such account"), retries="10s")
    task = bench.schedule("pay")
    bench.run(task)
    assert (bench.now(task).status, bench.now(task).error) == (Status.FAILED, "no such account")
    assert len(bench.store.tasks.attempts(task.id)) == 1


@pytest.mark.parametrize("value", [Retry(after=-1), Snooze("soon"), Snooze(float("inf"))])
def test_an_invalid_outcome_fails_the_task_with_an_explanation(
    bench: RunnerHarness, value: Any
) -> None:
    returns(bench, "pay", value)
    task = bench.schedule("pay")
    bench.run(task)
    assert bench.now(task).status is Status.FAILED
    assert "InvalidDelayError" in (bench.now(task).error or "")


# -- expiry and keys ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["processor", "task"])
def test_an_expired_task_is_cancelled(bench: RunnerHarness, where: str) -> None:
    returns(
        bench, "pay", None, **({"expires": "1m"} if where == "processor" else {"expires": "1d"})
    )
    late = bench.schedule("pay", **({"expires": "1m"} if where == "task" else {}))
    bench.change(late, expected_time=bench.clock.now() - timedelta(seconds=61))
    bench.run(bench.now(late))
    found = bench.now(late)
    assert (found.status, found.attempts, found.execution_time) == (Status.CANCELLED, 0, None)
    assert "expired" in (found.error or "")
    in_time = bench.schedule("pay")
    bench.run(in_time)
    assert bench.now(in_time).status is Status.DONE


def test_a_task_whose_key_went_to_another_one_does_not_run_again(bench: RunnerHarness) -> None:
    newer: list[DelayTask] = []

    @bench.registry.processor("pay", retries="10s")
    def pay(body: Any) -> None:
        new = NewTask("pay", "newer", 60, key="7")
        newer.append(bench.producer.schedule(new, "replace", None))
        raise ConnectionError("busy")

    older = bench.schedule("pay", key="7")
    bench.run(older)
    assert bench.now(older).status is Status.FAILED
    assert "its key '7' went to another task" in (bench.now(older).error or "")
    assert bench.now(newer[0]).status is Status.NOT_COMPLETE
    with pytest.raises(DuplicateTaskError):
        bench.schedule("pay", key="7")


def test_a_task_keeps_its_key_until_its_last_retry(bench: RunnerHarness) -> None:
    raises(bench, "pay", ConnectionError(), retries="10s")
    task = bench.schedule("pay", key="7")
    bench.run(task)
    with pytest.raises(DuplicateTaskError):
        bench.schedule("pay", key="7")
    assert run_again(bench, task).status is Status.FAILED
    assert bench.schedule("pay", key="7").id != task.id


def test_attempts_are_deleted_with_their_task(bench: RunnerHarness) -> None:
    raises(bench, "pay", ValueError())
    task = bench.schedule("pay")
    bench.run(task)
    old = bench.clock.now() - timedelta(days=1)
    bench.change(task, expected_time=old, update_time=old)
    assert bench.store.sweeps.purge(3600, 10) == 1
    with pytest.raises(TaskNotFoundError):
        bench.store.tasks.attempts(task.id)


def test_a_task_that_is_retried_while_it_would_be_purged_keeps_its_attempts(
    bench: RunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    raises(bench, "pay", ValueError())
    task, other = bench.schedule("pay"), bench.schedule("pay")
    bench.run(task, other)
    old = bench.clock.now() - timedelta(days=1)
    for each in (task, other):
        bench.change(each, expected_time=old, update_time=old)
    sweeps = bench.store.sweeps
    lock_all = sweeps._keys.lock_all  # runs between the read and the delete

    def retried_meanwhile(on: Any, tasks: Any) -> Any:
        t = bench.store.schema.tasks
        on.execute(update(t).where(t.c.id == task.id).values(update_time=db_now()))
        return lock_all(on, tasks)

    monkeypatch.setattr(sweeps._keys, "lock_all", retried_meanwhile)
    assert sweeps.purge(3600, 10) == 1
    assert len(bench.store.tasks.attempts(task.id)) == 1


def test_a_batch_ends_each_of_its_tasks_and_keeps_their_failed_attempts(
    bench: RunnerHarness,
) -> None:
    def work(tasks: list[DelayTask]) -> Any:
        return [Done(7), Retry(reason="busy"), Snooze("30m"), Cancel("closed"), Fail("no")]

    bench.registry.processor("batch", batch=10, retries="10s", keep_result=True)(work)
    tasks = [bench.schedule("batch", key=str(n)) for n in range(5)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED", "FAILED"]
    assert bench.now(tasks[0]).result == 7
    kept = [[attempt.error for attempt in bench.store.tasks.attempts(task.id)] for task in tasks]
    assert kept == [[], ["busy"], [], [], ["no"]]
    assert bench.schedule("batch", key="0").id != tasks[0].id, "its key is free"


@pytest.mark.parametrize("is_async", [False, True])
def test_each_of_several_concurrent_rows_has_its_own_outcome(
    bench: RunnerHarness, is_async: bool
) -> None:
    def work(body: Any) -> Any:
        if body == 1:
            raise ConnectionError("busy")
        return Snooze("30m") if body == 2 else None

    async def work_on_loop(body: Any) -> Any:
        return work(body)

    bench.registry.processor("wait", in_flight=10, retries="10s")(
        work_on_loop if is_async else work
    )
    tasks = [bench.schedule("wait", n) for n in range(30)]
    bench.run(*tasks)
    assert bench.statuses(tasks) == ["DONE", "NOT_COMPLETE", "NOT_COMPLETE", *["DONE"] * 27]
    assert [bench.now(task).attempts for task in tasks[:3]] == [1, 1, 0]
