"""Tasks start within the limits, and others wait in the waitlist."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import select

from delaytasks import DelayTask
from delaytasks.core.errors import StoreError
from delaytasks.core.interfaces import Settlement
from delaytasks.core.policies import WaitlistState
from delaytasks.core.states import Status
from delaytasks.execution import runner
from delaytasks.limits.admission import Admission
from tests.conformance.store_rows import counts_moves
from tests.conformance.waitlists.limited_runner import LimitedRunnerHarness, touch_task
from tests.waiting import wait_until


def test_no_more_tasks_start_than_the_limit_allows_and_the_others_are_held(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=4)
    tasks = [bench.schedule(body=n) for n in range(6)]
    other = bench.schedule("other")
    assert len(bench.claim(*tasks[:1], other)) == 2, "another tag is not limited"
    assert len(bench.claim(*tasks[1:])) == 1, "a part of what is free, so that others have some"
    assert Counter(bench.statuses(tasks)) == {"RUNNING": 2, "HELD": 4}
    assert [task.body for task in bench.admit()] == [2]
    assert [task.body for task in bench.admit()] == [3]
    assert bench.admit() == []
    assert Counter(bench.statuses(tasks)) == {"RUNNING": 4, "HELD": 2}
    assert bench.waitlist_rows() == 2


def test_a_later_task_waits_behind_the_tasks_of_the_waitlist(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=1)
    first, second = bench.schedule(body=1), bench.schedule(body=2)
    bench.run(first)
    assert bench.claim(bench.schedule(body=0)) != []
    assert bench.claim(second) == []
    third = bench.schedule(body=3, priority=1)
    assert bench.claim(third) == []
    bench.limit(concurrency=17)
    assert bench.claim(bench.schedule(body=4)) == [], "there would be room"
    assert [task.body for task in bench.admit()] == [3, 2], "by priority and time"
    assert [task.body for task in bench.admit()] == [4]


def test_a_claim_that_holds_fewer_rows_than_it_has_locked_is_rolled_back(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(3)]
    queries, t = bench.waitlist.queries, bench.store.schema.tasks
    queries._hold = queries._hold.where(t.c.id != tasks[2].id)
    with pytest.raises(StoreError, match="rows to hold: 1 of 2 locked rows were changed"):
        bench.claim(*tasks)
    assert bench.statuses(tasks) == ["NOT_COMPLETE"] * 3
    assert bench.waitlist_rows() == 0


def test_a_runner_admits_the_next_task_of_the_waitlist_when_one_ends(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(5)]
    report = bench.runner.run([bench.entry(task) for task in tasks], for_s=20)
    assert bench.ran == [0, 1, 2, 3, 4]
    assert bench.statuses(tasks) == ["DONE"] * 5
    assert (report.ran, report.waitlists, bench.waitlist_rows()) == (5, (), 0)
    done = bench.now(tasks[4])
    assert done.attempts == 1
    assert (done.version == 3) is counts_moves(bench.store)


def test_a_runner_whose_time_is_over_reports_the_waitlist_that_is_left(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(3)]
    report = bench.runner.run([bench.entry(task) for task in tasks])
    assert bench.ran == [0, 1]
    assert report.waitlists == (WaitlistState("default", "note", 1),)
    report = bench.runner.run_waitlist("default", "note", 10, 20)
    assert bench.ran == [0, 1, 2]
    assert report.waitlists == ()


def test_overdue_tasks_of_a_limited_tag_join_the_waitlist(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=2)
    tasks = [bench.schedule(body=n) for n in range(7)]
    other = bench.schedule("other", body="other")
    bench.registry.processor("other")(bench.ran.append)
    report = bench.runner.run_due("default", [0], 5)
    assert report.is_full, "there may be more behind those who were held"
    bench.runner.run_due("default", [0], 5, for_s=20)
    assert sorted(map(str, bench.ran)) == ["0", "1", "2", "3", "4", "5", "6", "other"]
    assert bench.statuses([*tasks, other]) == ["DONE"] * 8


def test_a_process_finds_an_unknown_waitlist_behind_a_backlog(
    bench: LimitedRunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.limit(concurrency=1)
    first, second = [bench.schedule(body=n) for n in range(2)]
    bench.claims.settle([Settlement(task, "succeed") for task in bench.claim(first, second)])
    assert bench.statuses([second]) == ["HELD"]
    bench.registry.processor("other")(bench.ran.append)
    for _ in range(20):
        bench.schedule("other", body="other")
    monkeypatch.setattr(runner, "RECOVERED_S", 0)  # otherwise a second must pass first
    report = bench.runner.run_due("default", [0], 5)
    assert (report.is_full, report.waitlists) == (True, (WaitlistState("default", "note", None),))
    assert bench.statuses([second]) == ["HELD"], "the backlog goes on"


def test_each_key_has_its_own_limit(bench: LimitedRunnerHarness) -> None:
    bench.limit(key_concurrency=2)
    tasks = [bench.schedule(body=key, concurrency_key=key) for key in "aaaab"] + [
        bench.schedule(body="none")
    ] * 1
    assert sorted(task.body for task in bench.claim(*tasks)) == ["a", "a", "b", "none"]
    assert bench.admit() == []
    bench.claims.settle([])
    late = [bench.schedule(body="b", concurrency_key="b") for _ in range(3)]
    assert bench.claim(*late) == []
    assert [task.body for task in bench.admit()] == ["b"], "the others of a wait, and keep nobody"
    assert bench.waitlist_rows() == 4


def test_tasks_of_different_concurrency_keys_are_admitted_in_turn(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=1)
    bench.claim(bench.schedule(body="first"))
    tasks = [bench.schedule(body=f"a{n}", concurrency_key="a") for n in range(5)]
    tasks += [bench.schedule(body=f"b{n}", concurrency_key="b") for n in range(2)]
    tasks += [bench.schedule(body=f"-{n}") for n in range(2)]
    assert bench.claim(*tasks) == []
    order = []
    for limit in range(2, 11):
        bench.limit(concurrency=limit)
        [task] = bench.admit()
        order.append(task.body)
    assert order == ["-0", "a0", "b0", "-1", "a1", "b1", "a2", "a3", "a4"]


def test_several_tasks_admitted_together_are_shared_among_concurrency_keys(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=1)
    bench.claim(bench.schedule(body="first"))
    tasks = [bench.schedule(body="a", concurrency_key="a") for n in range(30)]
    tasks += [bench.schedule(body="b", concurrency_key="b") for n in range(3)]
    tasks += [bench.schedule(body="c", concurrency_key="c") for n in range(30)]
    bench.claim(*tasks)
    bench.limit(concurrency=1000)
    assert Counter(task.body for task in bench.admit(15)) == {"a": 5, "b": 3, "c": 7}
    assert len(bench.admit(100)) == 48
    assert bench.waitlist_rows() == 0


def test_the_capacity_of_a_dead_worker_is_free_when_its_tasks_lapse(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=2)
    tasks = [bench.schedule(body=n) for n in range(4)]
    bench.claim(tasks[0])
    bench.claim(tasks[1])
    assert bench.claim(*tasks[2:]) == []
    assert bench.admit() == []
    assert bench.store.leases.release(["worker-1"], 5).total == 2
    assert [task.body for task in bench.admit()] == [2]


def test_a_recovered_task_waits_in_the_waitlist_and_runs_alone(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=1)
    lapsed, *others = [bench.schedule(body=n) for n in range(3)]
    bench.change(lapsed, lapses=1)
    blocking = bench.schedule(body="blocking")
    bench.claim(blocking)
    assert bench.claims.claim_alone(lapsed.id, lapsed.version) == []
    assert bench.claims.claim_recovered("default") == []
    assert bench.claim(*others) == []
    assert bench.statuses([lapsed, *others]) == ["HELD"] * 3
    bench.limit(concurrency=100)
    assert [task.body for task in bench.admit()] == [0]
    assert [task.body for task in bench.admit()] == [1, 2]


@pytest.mark.slow
def test_several_workers_together_keep_a_rate(bench: LimitedRunnerHarness) -> None:
    bench.limit(rate=40, rate_period_s=1.0)
    tasks = [bench.schedule(body=n) for n in range(60)]
    bench.claim(*tasks)
    began: list[float] = []
    over = threading.Event()

    def take() -> None:
        admission = Admission(bench.waitlist, bench.store.claims("other", None))
        while not over.wait(0.002):
            for task in admission.admit("default", "note", 10)[0]:
                assert task.update_time is None
                began.append(task.id)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(take)
        wait_until(lambda: bench.waitlist_rows() == 0, 20, "all to start")
        over.set()
    t = bench.store.schema.tasks
    with bench.store.database.begin() as connection:
        starts = sorted(connection.execute(select(t.c.execution_time)).scalars())
    assert len(starts) == 60
    worst = max(
        sum(since <= start < since + timedelta(seconds=1) for start in starts) for since in starts
    )
    assert worst <= 40


def test_a_slow_rate_returns_the_time_until_the_next_check(bench: LimitedRunnerHarness) -> None:
    bench.limit(rate=5, rate_period_s=60.0)
    tasks = [bench.schedule(body=n) for n in range(3)]
    assert len(bench.claim(*tasks)) == 1
    assert bench.admission.admit("default", "note", 10) == (
        [],
        WaitlistState("default", "note", 0, 1.0),
    )
    bench.limit(rate=5, rate_period_s=3.0)
    opening = bench.admission.admit("default", "note", 10)[1]
    assert opening is not None
    assert 0.1 < opening.recheck_s < 0.62
    assert bench.runner.run_waitlist("default", "note", 10, 2).ran == 2


def test_simultaneous_workers_never_exceed_the_limit(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=5)
    tasks = [bench.schedule(body=n) for n in range(40)]
    running, most, ran = Counter[int](), [], list[int]()
    lock = threading.Lock()

    def work(body: int) -> None:
        with lock:
            running[body] += 1
            most.append(sum(running.values()))
        threading.Event().wait(0.1)
        with lock:
            running[body] -= 1
            ran.append(body)

    bench.registry.processor("limited")(work)
    bench.limit("limited", concurrency=5)
    tasks = [bench.schedule("limited", body=n) for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        parts = [
            pool.submit(bench.runner.run, [bench.entry(task) for task in tasks[n::8]], 20)
            for n in range(8)
        ]
        for part in parts:
            part.result()
        while bench.waitlist_rows():
            bench.runner.run_waitlist("default", "limited", 10, 5)
    assert sorted(ran) == list(range(40))
    assert 2 <= max(most) <= 5


def _cancel(bench: LimitedRunnerHarness, task: DelayTask) -> None:
    bench.store.tasks.cancel(task.id, None)


def _reschedule(bench: LimitedRunnerHarness, task: DelayTask) -> None:
    bench.store.tasks.reschedule(task.id, bench.clock.now() + timedelta(seconds=60), None)


@pytest.mark.parametrize(
    ("move", "status"),
    [(_cancel, "CANCELLED"), (touch_task, "NOT_COMPLETE"), (_reschedule, "NOT_COMPLETE")],
)
def test_a_task_that_left_the_waitlist_does_not_run(
    bench: LimitedRunnerHarness,
    move: Callable[[LimitedRunnerHarness, DelayTask], None],
    status: str,
) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(15)]
    bench.claim(tasks[0])
    bench.claim(*tasks[1:])
    for task in tasks[1:-1]:
        move(bench, task)
    bench.limit(concurrency=2)
    admitted = bench.admit()
    if not admitted:  # one call examines only a few rows
        admitted = bench.admit() or bench.admit()
    assert [task.body for task in admitted] == [14]
    assert bench.waitlist_rows() == 0
    assert bench.statuses(tasks[1:-1]) == [status] * 13


def test_a_locked_task_of_the_waitlist_does_not_delay_the_others(
    bench: LimitedRunnerHarness,
) -> None:
    if bench.store.database.url.get_backend_name() == "sqlite":
        return  # SQLite has one writer at a time
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(3)]
    bench.claim(tasks[0])
    bench.claim(*tasks[1:])
    bench.limit(concurrency=2)
    with bench.store.database.begin() as connection:
        bench.store.tasks.cancel(tasks[1].id, None, connection)
        assert [task.body for task in bench.admit()] == [2]
        connection.rollback()
    bench.limit(concurrency=3)
    assert [task.body for task in bench.admit()] == [1]


def test_without_limits_all_tasks_of_a_waitlist_are_admitted(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(5)]
    bench.claim(tasks[0])
    bench.claim(*tasks[1:])
    p = bench.store.schema.policies
    with bench.store.database.begin() as connection:
        connection.execute(p.delete())
    assert len(bench.admit()) == 4


def test_a_sweep_finds_queues_with_waitlists(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n, queue="slow") for n in range(3)]
    assert [level.queue for level in bench.store.sweeps.levels(0)] == ["slow"]
    bench.claim(*tasks)
    assert [level.queue for level in bench.store.sweeps.levels(0)] == ["slow"]
    assert bench.store.waitlist_names.in_queue("slow") == {("slow", "note")}
    assert bench.store.waitlist_names.in_queue("default") == set()


def test_a_task_in_a_waitlist_is_held(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(2)]
    bench.claim(tasks[0])
    bench.claim(tasks[1])
    assert bench.now(tasks[1]).status is Status.HELD
