"""Limits, waitlists and slots, on every database."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytest
from sqlalchemy import select

from delaytasks import DelayTask
from delaytasks.core.errors import StoreError
from delaytasks.core.interfaces import Level, Settlement
from delaytasks.core.policies import WaitlistState
from delaytasks.core.states import Status
from delaytasks.execution import runner
from delaytasks.limits import admission as backlogs
from delaytasks.limits.admission import Admission
from delaytasks.storage.store import Store
from tests.conformance.store_rows import counts_moves
from tests.recording import RunnerHarness
from tests.waiting import wait_until


class LimitedRunnerHarness(RunnerHarness):
    @cached_property
    def admission(self) -> Admission:
        claims: Any = self.claims
        return Admission(self.waitlist, claims)

    def limit(self, tag: str = "note", **limits: Any) -> None:
        self.store.policies.set("tag", tag, limits, "a test")

    def claim(self, *tasks: DelayTask) -> list[DelayTask]:
        """Claim tasks like a worker that runs them for a while."""
        return self.claims.claim([self.entry(task) for task in tasks])

    def admit(self, limit: int = 100, tag: str = "note") -> list[DelayTask]:
        return list(self.admission.admit("default", tag, limit)[0])

    def waitlist_rows(self) -> int:
        with self.store.database.begin() as connection:
            return len(connection.execute(select(self.store.schema.waitlists)).all())


def touch_task(bench: LimitedRunnerHarness, task: DelayTask) -> None:
    assert bench.store.touches.touch(task.id, bench.clock.now() + timedelta(seconds=60))


@pytest.fixture
def bench(store: Store) -> LimitedRunnerHarness:
    return LimitedRunnerHarness(store)


# Tasks start within the limits, and others wait in the waitlist


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


# A task that is settled passes its slot on, and an overdue backlog of a limited tag waits


def test_the_settlement_of_a_task_transfers_its_slot_to_the_next_one(
    bench: LimitedRunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(4)]
    places: list[int] = []
    seen: list[tuple[str, ...]] = []
    next = Admission.admit_to_slots

    def admit_and_record(self: Admission, on: Any, queue: str, tag: str, count: int) -> Any:
        following = next(self, on, queue, tag, count)
        places.append(count)
        seen.append(tuple(bench.statuses(tasks)))
        return following

    monkeypatch.setattr(Admission, "admit_to_slots", admit_and_record)
    bench.runner.run([bench.entry(task) for task in tasks], for_s=20)
    assert bench.ran == [0, 1, 2, 3]
    assert places == [1, 1, 1]
    assert [statuses.count("RUNNING") for statuses in seen] == [1, 1, 1], "as others see it"
    assert [statuses.count("DONE") for statuses in seen] == [1, 2, 3]
    assert bench.statuses(tasks) == ["DONE"] * 4


def test_a_slot_is_transferred_in_the_transaction_of_the_settlement(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=1)
    failing, other = bench.schedule(body=0, key="k"), bench.schedule(body=1)
    [running] = bench.claim(failing, other)
    settlement = Settlement(running, "fail", error="oh")
    accepted, following = bench.admission.settle_and_admit([settlement], "default", "note")
    assert (accepted, [task.id for task in following]) == ({failing.id}, [other.id])
    assert bench.statuses([failing, other]) == ["FAILED", "RUNNING"]
    assert len(bench.store.tasks.attempts(failing.id)) == 1


def test_a_slot_that_was_lost_is_not_transferred(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n) for n in range(2)]
    [running] = bench.claim(*tasks)
    lost = replace(running, version=running.version + 5)
    assert bench.admission.settle_and_admit([Settlement(lost, "succeed")], "default", "note") == (
        set(),
        [],
    )
    assert bench.statuses(tasks) == ["RUNNING", "HELD"]


@pytest.mark.parametrize(
    "limits", [{"rate": 100, "rate_period_s": 1.0}, {"key_concurrency": 1}, {"concurrency": None}]
)
def test_a_slot_is_not_transferred_if_another_limit_also_applies(
    bench: LimitedRunnerHarness, limits: dict[str, Any]
) -> None:
    bench.limit(concurrency=1)
    tasks = [bench.schedule(body=n, concurrency_key="k") for n in range(3)]
    assert len(bench.claim(*tasks)) == 1
    bench.limit(**limits)
    with bench.store.database.begin() as connection:
        assert bench.admission.admit_to_slots(connection, "default", "note", 1) == []


def test_slot_transfers_alternate_between_concurrency_keys(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=1)
    first = bench.schedule(body="first")
    tasks = [
        bench.schedule(body=f"{key}{n}", concurrency_key=key) for key in "ab" for n in range(3)
    ]
    bench.runner.run([bench.entry(task) for task in [first, *tasks]], for_s=20)
    assert bench.ran == ["first", "a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_chunk_puts_all_overdue_tasks_of_a_full_tag_into_the_waitlist(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=1)
    bench.claim(bench.schedule())
    tasks = [bench.schedule(body=n) for n in range(20)]
    later, elsewhere = bench.schedule(delay=60), bench.schedule(queue="other")
    free = bench.schedule("free")
    report = bench.runner.run([bench.entry(task) for task in tasks[:8]])
    assert bench.statuses(tasks) == ["HELD"] * 20
    assert bench.statuses([later, elsewhere, free]) == ["NOT_COMPLETE"] * 3
    assert report.waitlists == (WaitlistState("default", "note", 0),)
    assert bench.run(*tasks[8:]).claimed == 0, "whose entries come later"
    bench.limit(concurrency=1000)
    assert [task.body for task in bench.admit()] == list(range(20))


def test_tasks_of_other_keys_join_the_waitlist_before_the_rest_of_a_large_backlog(
    bench: LimitedRunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlogs, "HOLD_ROWS", 8)
    bench = LimitedRunnerHarness(bench.store)
    bench.limit(concurrency=1)
    large = [bench.schedule(body=n, concurrency_key="large") for n in range(40)]
    small = [bench.schedule(body=n, concurrency_key=f"small {n}") for n in range(3)]
    later, free = bench.schedule(delay=60), bench.schedule("free")
    lines, tags = bench.waitlist, {"note", "other"}
    assert lines.hold_overdue("default", 0, {"note"})
    assert bench.statuses(small) == ["NOT_COMPLETE"] * 3, "the first step takes the oldest"
    assert lines.hold_overdue("default", 0, {"note"})
    assert bench.statuses(small) == ["HELD"] * 3
    assert Counter(bench.statuses(large)) == {"HELD": 8, "NOT_COMPLETE": 32}
    while lines.hold_overdue("default", 0, tags):
        pass
    assert bench.statuses(large) == ["HELD"] * 40
    assert bench.statuses([later, free]) == ["NOT_COMPLETE"] * 2
    assert bench.waitlist_rows() == 43


def test_a_backlog_without_keys_does_not_delay_tasks_of_other_tags(
    bench: LimitedRunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlogs, "HOLD_ROWS", 8)
    bench = LimitedRunnerHarness(bench.store)
    for _ in range(40):
        bench.schedule()
    other = bench.schedule("other")
    lines = bench.waitlist
    for _ in range(2):
        assert lines.hold_overdue("default", 0, {"note", "other"})
    assert bench.statuses([other]) == ["HELD"]


def test_locked_rows_do_not_keep_other_overdue_rows_from_the_waitlist(
    bench: LimitedRunnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bench.store.database.url.get_backend_name() != "postgresql":
        pytest.skip("others lock more of a small table than the rows that are named")
    monkeypatch.setattr(backlogs, "HOLD_ROWS", 4)
    bench = LimitedRunnerHarness(bench.store)
    large = [bench.schedule(body=n, concurrency_key="large") for n in range(12)]
    small = [bench.schedule(body=n, concurrency_key=f"small {n}") for n in range(6)]
    t, lines = bench.store.schema.tasks, bench.waitlist
    with bench.store.database.begin() as somebody:
        somebody.execute(
            select(t.c.id).where(t.c.id.in_([task.id for task in small])).with_for_update()
        )
        for _ in range(6):
            lines.hold_overdue("default", 0, {"note"})
        assert bench.statuses(large) == ["HELD"] * 12


def test_the_pause_sweeper_does_not_release_tasks_of_a_waitlist(
    bench: LimitedRunnerHarness,
) -> None:
    bench.limit(concurrency=1)
    bench.claim(bench.schedule())
    tasks = [bench.schedule(body=n, concurrency_key=key) for n, key in enumerate([None, "a", "a"])]
    assert bench.claim(*tasks) == []
    stray = bench.schedule("other")
    bench.change(stray, status=int(Status.HELD))
    level = Level("default", 0)
    assert [seen.id for seen in bench.store.paused_rows.look(Status.HELD, level, None, None)] == [
        stray.id
    ]
    touch_task(bench, tasks[1])
    found = {seen.id for seen in bench.store.paused_rows.look(Status.HELD, level, None, None)}
    assert found == {stray.id, tasks[1].id}, "it is not due any more, and waits in vain"


def test_admit_returns_at_most_the_requested_number_of_tasks(bench: LimitedRunnerHarness) -> None:
    bench.limit(concurrency=10)
    tasks = [bench.schedule(body=n) for n in range(20)]
    assert len(bench.claim(*tasks)) == 1
    assert len(bench.admission.admit("default", "note", 50, 6)[0]) == 6
    assert len(bench.admission.admit("default", "note", 50, 6)[0]) == 3, (
        "never more than there is room for"
    )
