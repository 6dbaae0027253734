"""Pauses and policies, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, select, update

from delaytasks import DelayedTask, DelayTasks, NewTask, Snooze, Status
from delaytasks.core import errors as e
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Stamp
from delaytasks.execution import policy_cache as policies_of
from delaytasks.execution.runner import Report
from delaytasks.maintenance import sweeper as engine_holding
from delaytasks.runtime import runtime_of
from delaytasks.storage import policy_rows as store_holding
from delaytasks.storage.store import Store
from delaytasks.worker import chunk_request
from tests.conformance.store_rows import counts_moves
from tests.conftest import empty
from tests.recording import CrashError, counted, delays_on, record, record_sweeps, runner_of
from tests.refusals import invalid
from tests.world.broker import RecordingTimer

PREFIX = "pol_"
HOUR = 3600.0


class PolicyHarness:
    """Tasks on a database, with sweeps and runs that the test starts."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.ran: list[Any] = []
        self.others: list[DelayTasks] = []
        self.delays = self.process()
        self.store: Store = runtime_of(self.delays).store
        self.timer: RecordingTimer = runtime_of(self.delays).sweeper._timer  # type: ignore[assignment]

    def process(self) -> DelayTasks:
        """Open another process on the same tables."""
        made = delays_on(self.url, table_prefix=PREFIX)
        timer = record(made)
        runtime = runtime_of(made)
        record_sweeps(runtime, timer)
        holding: Any = runtime.sweeper._pauses
        holding._budget_s = 60  # the pass completes even if the machine stalls for seconds
        for tag in ("mail", "sms"):
            made.processor(tag)(self.ran.append)
        self.others.append(made)
        return made

    def add(self, tag: str = "mail", in_s: float = HOUR, **options: Any) -> DelayedTask:
        task = self.delays.schedule_delay(tag, options.pop("body", {}), max(in_s, 0), **options)
        if in_s <= 0:
            t = self.store.schema.tasks
            due = task.expected_time + timedelta(seconds=in_s - 1)
            with self.store.database.begin() as connection:
                connection.execute(update(t).where(t.c.id == task.id).values(expected_time=due))
        return self.delays.get(task)

    def sweep(self, process: DelayTasks | None = None) -> None:
        s = self.store.schema.sweeps
        with self.store.database.begin() as connection:
            connection.execute(
                update(s).values(swept_at=self.store.tasks.now() - timedelta(seconds=60))
            )
        assert runtime_of(process or self.delays).sweeper.sweep()

    def sweep_until(self, is_so: Callable[[], object]) -> None:
        for _ in range(100):
            if is_so():
                return
            self.sweep()
        raise AssertionError("100 sweeps were not enough")

    def run(self, *tasks: DelayedTask, process: DelayTasks | None = None) -> Report:
        return runner_of(process or self.delays).run(
            [Entry(task.id, task.version, 0) for task in tasks]
        )

    def statuses(self, *tasks: DelayedTask) -> list[str]:
        return [self.delays.get(task).status.name for task in tasks]

    def count(self, name: str) -> int:
        return self.delays.events.counts[name]

    def let_pauses_end(self) -> None:
        p, now = self.store.schema.policies, self.store.tasks.now()
        with self.store.database.begin() as connection:
            connection.execute(update(p).values(paused_until=now, version=p.c.version + 1))

    def close(self) -> None:
        for delays in self.others:
            delays.close()

    def held(self) -> list[int]:
        return [task.id for task in self.delays.find(status="HELD", limit=1000)]


@pytest.fixture(scope="module")
def session_field(database_url: str) -> Iterator[PolicyHarness]:
    field = PolicyHarness(database_url)
    with field.store.database.begin() as connection:
        field.store.schema.metadata.drop_all(connection)
        field.store.schema.metadata.create_all(connection)
    yield field
    with field.store.database.begin() as connection:
        field.store.schema.metadata.drop_all(connection)
    field.close()


@pytest.fixture
def field(session_field: PolicyHarness) -> Iterator[PolicyHarness]:
    """Yield a fresh process on empty tables."""
    empty(session_field.store)
    made = PolicyHarness(session_field.url)
    yield made
    made.close()


@pytest.fixture
def small_steps(field: PolicyHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit each step to one row, and each sweep to one step."""
    monkeypatch.setattr(store_holding, "ROWS_PER_QUERY", 2)
    monkeypatch.setattr(engine_holding, "PAUSE_ROWS", 1)
    monkeypatch.setattr(runtime_of(field.delays).sweeper._pauses, "_budget_s", -1)


def pauses_of(field: PolicyHarness) -> Any:
    return runtime_of(field.delays).sweeper._pauses


# Tasks of a paused tag or queue are held, and the policies say so


def raise_unavailable(*_: Any) -> list[Any]:
    raise e.StoreUnavailableError("no route to host")


# -- pause ---------------------------------------------------------------------------------------


def test_a_pause_of_a_tag_holds_its_waiting_tasks_at_any_due_time_and_no_others(
    field: PolicyHarness,
) -> None:
    paused = [
        field.add(in_s=in_s, **options)
        for in_s in (-5, 5, HOUR)
        for options in ({}, {"priority": 3})
    ]
    others = [field.add("sms", in_s) for in_s in (-5, 5, HOUR)]
    policy = field.delays.policies.pause(tag="mail", actor="me")
    assert (policy.kind, policy.name, policy.is_paused, policy.updated_by) == (
        "tag",
        "mail",
        True,
        "me",
    )
    field.sweep()
    assert field.statuses(*paused) == ["HELD"] * 6
    assert field.statuses(*others) == ["NOT_COMPLETE"] * 3
    assert field.count("task.held") == 6
    [shown] = field.delays.policies.list()
    assert (shown.held, shown.is_applied) == (6, True)
    assert counted(field.store)[Status.HELD] == 6
    assert field.delays.get(paused[0]).version == paused[0].version + 1


# -- a pause that ends by itself -----------------------------------------------------------------


def test_a_pause_with_an_end_lasts_until_the_first_sweep_after_it(field: PolicyHarness) -> None:
    tasks, now = [field.add(in_s=in_s) for in_s in (-5, HOUR)], field.store.tasks.now()
    policy = field.delays.policies.pause(tag="mail", until="1h", actor="me")
    assert policy.paused_until is not None
    assert HOUR - 1 < (policy.paused_until - now).total_seconds() < HOUR + 60
    field.sweep()
    field.sweep()
    assert field.statuses(*tasks) == ["HELD"] * 2
    field.let_pauses_end()
    changes, other = field.count("policy.changed"), field.process()
    ends: list[Any] = []
    other.events.subscribe(lambda name, values: ends.append((name, values.get("actor"))))
    field.sweep(other)
    assert ("policy.changed", "the end of the pause") in ends
    assert field.statuses(*tasks) == ["NOT_COMPLETE"] * 2
    assert field.delays.policies.list() == []
    field.sweep()
    assert field.count("policy.changed") == changes, "the other process has ended the pause"
    field.run(field.delays.get(tasks[0]))
    assert field.ran == [{}]


@pytest.mark.parametrize("is_tag", [True, False])
def test_until_sets_or_extends_the_end_of_a_pause_and_never_shortens_it(
    field: PolicyHarness, is_tag: bool
) -> None:
    name = {"tag": "mail"} if is_tag else {"queue": "default"}
    task, policies = field.add(), field.delays.policies
    in_a_day = field.store.tasks.now() + timedelta(days=1)
    assert policies.pause(**name, until="2h", actor="ann").paused_until is not None
    assert policies.pause(**name, until=in_a_day, actor="ben").paused_until == in_a_day
    kept = policies.pause(**name, until="1h", actor="a processor")
    assert (kept.paused_until, kept.updated_by, kept.version) == (in_a_day, "ben", 2)
    for until in (None, "2d"):
        assert policies.pause(**name, until=until, actor="ann").paused_until is None
    field.sweep()
    assert (field.statuses(task), len(policies.list())) == (["HELD"], 1)
    assert policies.resume(**name).paused_until is None
    field.sweep()
    assert (field.statuses(task), policies.list()) == (["NOT_COMPLETE"], [])
    policies.pause(**name, until="2h")
    assert policies.remove(**name).paused_until is None


def test_a_pause_keeps_its_limits_when_it_ends(field: PolicyHarness) -> None:
    field.delays.policies.set(tag="mail", concurrency=3)
    field.delays.policies.pause(tag="mail", until="1h")
    field.let_pauses_end()
    field.sweep()
    [policy] = field.delays.policies.list()
    assert (policy.is_paused, policy.paused_until, policy.concurrency) == (False, None, 3)


def test_a_processor_can_pause_its_own_tag(field: PolicyHarness) -> None:
    delays = field.delays

    @delays.processor("partner.call")
    def call_partner(body: Any) -> Snooze:
        delays.policies.pause(tag="partner.call", until="1h")
        return Snooze(1)

    first, second = field.add("partner.call", -5), field.add("partner.call", -5)
    field.run(first)
    field.sweep()
    assert field.statuses(first, second) == ["HELD"] * 2


def test_a_pause_of_a_queue_holds_the_tasks_of_all_its_tags(field: PolicyHarness) -> None:
    slow = [field.add(tag, in_s, queue="slow") for tag in ("mail", "sms") for in_s in (-5, HOUR)]
    other = field.add("mail", -5)
    field.delays.policies.pause(queue="slow")
    field.sweep()
    assert field.statuses(*slow, other) == ["HELD"] * 4 + ["NOT_COMPLETE"]
    assert [(p.kind, p.name, p.held) for p in field.delays.policies.list()] == [
        ("queue", "slow", 4)
    ]


def test_a_queue_that_is_paused_gets_no_drain_messages(field: PolicyHarness) -> None:
    runtime_of(field.delays).store.workers.report("w", ["default", "slow"], "solo", 1, 0)
    field.delays.policies.pause(queue="slow")
    field.sweep()
    # The pause sweeper has already passed the due times of these rows.
    for queue in ("slow", "default"):
        field.add("mail", -60, queue=queue)
    field.sweep()
    assert [queue for queue, *_ in field.timer.requested_drains] == ["default"]


def test_a_paused_task_that_comes_within_the_horizon_is_held_and_not_armed(
    field: PolicyHarness,
) -> None:
    field.delays.policies.pause(tag="mail")
    field.sweep()  # the pass has ended
    late = [field.add(in_s=60 + n) for n in range(3)]
    near = field.add("sms", 60)
    t = field.store.schema.tasks
    with field.store.database.begin() as connection:
        soon = field.store.tasks.now() + timedelta(seconds=20)
        connection.execute(update(t).values(expected_time=soon))
        connection.execute(
            update(field.store.schema.sweeps).values(armed_until=field.store.tasks.now())
        )
    field.sweep()
    assert field.statuses(*late, near) == ["HELD"] * 3 + ["NOT_COMPLETE"]
    assert field.timer.ids == [near.id]


def test_a_claimed_task_of_a_paused_tag_is_held_and_does_not_run(field: PolicyHarness) -> None:
    field.delays.policies.pause(tag="mail")
    paused, other = field.add(in_s=-5, body="paused"), field.add("sms", -5, body="other")
    report = field.run(paused, other)
    assert (report.claimed, report.ran, field.ran) == (2, 1, ["other"])
    found = field.delays.get(paused)
    assert (found.status, found.runs, found.worker, found.execution_time) == (
        Status.HELD,
        0,
        None,
        None,
    )
    assert (found.lease_until, found.lapses) == (None, 0)
    assert (found.version == paused.version + 2) is counts_moves(field.store)
    assert field.count("task.held") == 1
    assert field.run(found).claimed == 0, "nobody claims it"


def test_a_worker_that_lost_its_lease_holds_nothing(field: PolicyHarness) -> None:
    field.delays.policies.pause(tag="mail")
    task = field.add(in_s=-5)
    [mine] = field.store.claims("frozen", None).claim([Entry(task.id, task.version, 0)])
    t = field.store.schema.tasks
    with field.store.database.begin() as connection:
        connection.execute(
            update(t).values(lease_until=field.store.tasks.now() - timedelta(seconds=9))
        )
    field.store.sweeps.recover(5, 10)
    lapsed = field.delays.get(task)
    [again] = field.store.claims("other", None).claim_alone(lapsed.id, lapsed.version)
    assert field.store.paused_rows.hold_claimed([mine]) == set()
    assert field.delays.get(task).status is Status.RUNNING
    assert field.store.paused_rows.hold_claimed([again]) == {task.id}


def test_a_drain_holds_the_overdue_rows_of_a_paused_tag(field: PolicyHarness) -> None:
    rows = [field.add(in_s=-5) for _ in range(7)]
    field.delays.policies.pause(tag="mail")
    runner = runner_of(field.delays)
    assert [runner.run_due("default", [0], 5).is_full for _ in range(2)] == [True, False]
    assert field.statuses(*rows) == ["HELD"] * 7
    assert field.ran == []


def test_a_row_that_lapsed_is_held_like_any_other(field: PolicyHarness) -> None:
    task = field.add(in_s=-5)
    t = field.store.schema.tasks
    with field.store.database.begin() as connection:
        connection.execute(update(t).values(lapses=1))
    field.delays.policies.pause(tag="mail")
    runner_of(field.delays).run_due("default", [0], 5)
    found = field.delays.get(task)
    assert (found.status, found.lapses, field.ran) == (Status.HELD, 1, [])


def test_a_process_applies_a_pause_within_about_a_second(
    field: PolicyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = field.process()
    assert not runtime_of(other).policy_cache.current().has_pauses
    field.delays.policies.pause(tag="mail")
    assert not runtime_of(other).policy_cache.current().has_pauses, "it reads once a second"
    runtime_of(other).policy_cache._read_at -= 1
    assert runtime_of(other).policy_cache.current().pauses("mail", "default")


def test_a_pool_process_reads_policies_when_its_main_process_has_others(
    field: PolicyHarness,
) -> None:
    child = runtime_of(field.process()).policy_cache
    reads = []
    read = child._read
    child._read = lambda *asked: reads.append(1) or read(*asked)
    child.follow(Stamp())
    child.current()
    assert not reads, "without policies nobody asks"
    field.delays.policies.pause(tag="mail")
    stamp = runtime_of(field.delays).policy_cache.refresh().stamp
    child.follow(stamp)
    assert child.current().pauses("mail", "default")
    child.follow(stamp)
    assert len(reads) == 1


def test_a_pool_process_reads_policies_when_its_main_process_has_read_none_yet(
    field: PolicyHarness,
) -> None:
    field.delays.policies.pause(tag="mail")
    main, child = (runtime_of(field.process()).policy_cache for _ in range(2))
    assert main.stamp is None
    child.follow(main.stamp)
    assert child.current().pauses("mail", "default")
    main.refresh()
    assert main.stamp == child.stamp


def test_a_process_that_cannot_read_policies_fails_unless_it_has_read_them_before(
    field: PolicyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    field.delays.policies.pause(tag="mail")
    policies = runtime_of(field.process()).policy_cache
    monkeypatch.setattr(policies_of, "POLICY_REFRESH_S", 0)
    with monkeypatch.context() as away:
        away.setattr(policies, "_read", raise_unavailable)
        for _ in range(2):
            with pytest.raises(e.StoreUnavailableError):
                policies.current()
    assert policies.current().pauses("mail", "default")
    monkeypatch.setattr(policies, "_read", raise_unavailable)
    assert policies.current().pauses("mail", "default")


def test_a_worker_whose_database_is_away_at_its_start_has_no_wrong_configuration(
    field: PolicyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field.store.policies, "check", raise_unavailable)
    with pytest.raises(e.StoreUnavailableError):
        field.store.check()


def test_a_worker_that_cannot_read_the_policies_reports_this_at_its_start(
    field: PolicyHarness,
) -> None:
    p = field.store.schema.policies
    assert field.store.check() is None
    with field.store.database.begin() as connection:
        p.drop(connection)
    try:
        with pytest.raises(
            e.ConfigError, match=r"policies cannot be read, in .*: .*delaytasks -A APP db upgrade"
        ):
            field.store.check()
    finally:
        with field.store.database.begin() as connection:
            p.create(connection)


def test_a_chunk_runs_no_task_while_its_process_cannot_read_the_policies(
    field: PolicyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = field.add(in_s=-5)
    child = field.process()
    monkeypatch.setattr(chunk_request, "current_app", runtime_of(child).celery)
    chunk = chunk_request.ChunkRequest((Entry(task.id, task.version, 0),), policies=None)
    policies = runtime_of(child).policy_cache
    with monkeypatch.context() as away:
        away.setattr(policies, "_read", raise_unavailable)
        report = chunk_request.run_chunk(chunk)
    assert (report.error, report.ran) == ("StoreUnavailableError: no route to host", 0)
    assert field.statuses(task) == ["NOT_COMPLETE"]
    assert policies.stamp is None
    assert chunk_request.run_chunk(chunk).ran == 1
    assert field.statuses(task) == ["DONE"]


# -- other moves of paused rows ------------------------------------------------------------------


def test_a_held_task_can_be_cancelled_rescheduled_touched_and_replaced(
    field: PolicyHarness,
) -> None:
    cancelled, moved, touched = field.add(), field.add(), field.add()
    replaced = field.add(key="k")
    field.delays.policies.pause(tag="mail")
    field.sweep()
    assert field.delays.cancel(cancelled)
    assert field.delays.touch(touched, 2 * HOUR)
    assert field.delays.get(touched).expected_time > touched.expected_time
    assert field.delays.reschedule(moved, 60).status is Status.NOT_COMPLETE
    new = field.delays.schedule_delay("mail", {"new": True}, 60, key="k", on_conflict="replace")
    assert new.id == replaced.id
    assert field.statuses(cancelled, touched) == ["CANCELLED", "HELD"]
    due = field.delays.reschedule(moved, 0)
    field.run(due)
    assert (field.statuses(due), field.ran) == (["HELD"], []), "it is paused all the same"


# -- policies ------------------------------------------------------------------------------------


def test_repeating_a_pause_resume_or_clear_changes_nothing(field: PolicyHarness) -> None:
    first = field.delays.policies.pause(tag="mail", actor="a")
    assert field.delays.policies.pause(tag="mail", actor="b") == first
    assert field.count("policy.changed") == 1
    assert field.delays.policies.resume(tag="sms").version == 0
    assert field.delays.policies.remove(queue="q").version == 0
    assert [policy.name for policy in field.delays.policies.list()] == ["mail"]


def test_a_pause_keeps_the_limits_and_clearing_the_policy_removes_both(
    field: PolicyHarness,
) -> None:
    field.delays.policies.pause(tag="mail")
    field.delays.policies.set(tag="mail", concurrency=10, concurrency_per_key=2, rate="100/s")
    field.delays.policies.resume(tag="mail")
    policy = field.delays.policies.set(tag="mail", concurrency_per_key=None)
    assert policy.limits == (10, None, 100, 1.0)
    assert runtime_of(field.delays).policy_cache.refresh().limited == {
        "mail": field.store.policies.read()[0]
    }
    field.sweep()
    assert [policy.as_json()["rate"] for policy in field.delays.policies.list()] == ["100/s"]
    assert field.delays.policies.remove(tag="mail").is_empty
    field.sweep()
    assert field.delays.policies.list() == []


def test_a_pause_sweep_of_an_old_version_does_not_mark_a_newer_policy_as_applied(
    field: PolicyHarness,
) -> None:
    table = field.store.policies
    paused = field.delays.policies.pause(tag="mail")
    resumed = field.delays.policies.resume(tag="mail")
    again = field.delays.policies.pause(tag="mail")
    for old in (paused, resumed):
        table.applied([old])
        assert [(each.version, each.is_paused, each.applied_version) for each in table.read()] == [
            (3, True, None)
        ]
    table.applied([again])
    assert table.read()[0].is_applied


def test_simultaneous_changes_of_a_policy_are_all_applied(field: PolicyHarness) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls: list[Callable[[], Any]] = [
            lambda: field.delays.policies.pause(tag="mail"),
            lambda: field.delays.policies.set(tag="mail", concurrency=3),
            lambda: field.delays.policies.set(tag="mail", rate="5/m"),
        ]
        for future in [pool.submit(call) for call in calls * 3]:
            future.result(30)
    [policy] = field.store.policies.read()
    assert (policy.is_paused, policy.limits, policy.version) == (True, (3, None, 5, 60.0), 3)


def test_invalid_policies_are_refused(field: PolicyHarness) -> None:
    delays: Any = field.delays
    for until in ("soon", -5, True, datetime(2030, 1, 1)):
        with invalid("until"):
            delays.policies.pause(tag="mail", until=until)
    for over in (0, "0s", field.store.tasks.now() - timedelta(seconds=9)):
        with invalid("until", match="is over.*'2h', or call resume"):
            delays.policies.pause(tag="mail", until=over)
    for call in (delays.policies.pause, delays.policies.resume, delays.policies.remove):
        for arguments in ({}, {"tag": "a", "queue": "b"}):
            with invalid("tag", match="a tag or a queue"):
                call(**arguments)
        with invalid("tag"):
            call(tag=" ")
        with invalid("queue"):
            call(queue="a b")
    with invalid("concurrency", match="what"):
        delays.policies.set(tag="mail")
    with invalid("queue", match=r"'slow' can be paused.*limits are for tags"):
        delays.policies.set(queue="slow", concurrency=3)
    for limit in (0, -1, True, 1.5, "5", 10**10):
        with invalid("concurrency", match="concurrency is an integer"):
            delays.policies.set(tag="mail", concurrency=limit)
        with invalid("concurrency_per_key", match="concurrency_per_key is an integer"):
            delays.policies.set(tag="mail", concurrency_per_key=limit)
    for rate in (
        "100",
        "0/s",
        "/s",
        "5/",
        "5/0s",
        "5/99d",
        "-5/s",
        "5/x",
        5,
        "٣/s",
        "9" * 99 + "/s",
        "5/s/s",
    ):
        with invalid("rate"):
            delays.policies.set(tag="mail", rate=rate)
    assert field.delays.policies.list() == []


# Held tasks are released step by step, by one process or several


# -- resume --------------------------------------------------------------------------------------


def test_after_a_resume_held_tasks_run_in_the_order_of_their_due_times(
    field: PolicyHarness,
) -> None:
    rows = [field.add(in_s=-in_s, body=in_s) for in_s in (10, 50, 30, 20, 40)]
    field.delays.policies.pause(tag="mail")
    field.sweep()
    assert field.run(*rows).claimed == 0
    field.delays.policies.resume(tag="mail")
    field.sweep()
    assert field.statuses(*rows) == ["NOT_COMPLETE"] * 5
    assert field.count("task.released") == 5
    runner_of(field.delays).run_due("default", [0], 10)
    assert field.ran == [50, 40, 30, 20, 10]
    assert field.delays.policies.list() == [], "a policy that says nothing is gone"
    with field.store.database.begin() as connection:
        [row] = connection.execute(select(field.store.schema.policies)).all()
    assert row.version == row.applied_version, (
        "the row stays for those who have not read yet that it says nothing"
    )


def test_a_released_task_within_the_horizon_is_armed(field: PolicyHarness) -> None:
    near, far, late = field.add(in_s=20), field.add(in_s=HOUR), field.add(in_s=-5)
    field.delays.policies.pause(tag="mail")
    field.sweep()
    field.timer.armed.clear()
    field.delays.policies.resume(tag="mail")
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
    field.delays.policies.pause(tag="mail")
    field.sweep_until(lambda: field.count("task.held") >= 6)
    field.delays.policies.resume(tag="mail")
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
    field.delays.policies.pause(tag="mail")
    field.delays.policies.pause(queue="slow")
    field.sweep()
    field.delays.policies.resume(tag="mail")
    field.sweep()
    assert field.statuses(here, there) == ["HELD", "NOT_COMPLETE"]
    field.delays.policies.resume(queue="slow")
    field.sweep()
    assert field.statuses(here) == ["NOT_COMPLETE"]


def test_a_worker_with_outdated_policies_runs_claimed_tasks_of_a_resumed_tag(
    field: PolicyHarness,
) -> None:
    field.delays.policies.pause(tag="mail")
    stale = field.process()
    runtime_of(stale).policy_cache.follow(runtime_of(stale).policy_cache.refresh().stamp)
    field.delays.policies.resume(tag="mail")
    field.sweep()
    task = field.add(in_s=-5, body="ran")
    field.run(task, process=stale)
    assert (field.statuses(task), field.ran) == (["DONE"], ["ran"])


def test_a_process_with_an_outdated_pause_holds_no_rows(field: PolicyHarness) -> None:
    task = field.add()
    assert field.store.paused_rows.hold([task.id]) == 0
    field.delays.policies.pause(queue="default")
    assert field.store.paused_rows.hold([task.id]) == 1
    assert field.store.paused_rows.hold([task.id]) == 0


def test_a_sweep_ends_that_can_hold_none_of_the_near_rows(
    field: PolicyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause ended meanwhile, or other transactions have locked the rows."""
    field.delays.policies.pause(queue="default")
    near, steps, pauses = field.add(in_s=20), list[None](), pauses_of(field)
    monkeypatch.setattr(pauses, "_budget_s", 1)
    monkeypatch.setattr(pauses._rows, "hold", lambda ids: 0)
    policies, now = runtime_of(field.delays).policy_cache.refresh(), field.store.tasks.now()
    pauses.hold_near(policies, now, now + timedelta(seconds=30), lambda: steps.append(None))
    assert (len(steps), field.statuses(near)) == (1, ["NOT_COMPLETE"])


def test_a_resume_between_looking_and_holding_leaves_nothing_held_or_counted(
    field: PolicyHarness,
) -> None:
    if field.store.database.url.get_backend_name() == "sqlite":
        pytest.skip("SQLite lets one writer in at a time")
    tasks = [field.add(), field.add("sms")]
    field.delays.policies.pause(tag="mail")
    field.delays.policies.pause(tag="sms")
    other, resumed = field.process(), list[str]()

    def resume_first(*args: Any) -> None:
        if not resumed and args[2].startswith("UPDATE") and "yb_delay_task_message" in args[2]:
            resumed.append("mail")
            other.policies.resume(tag="mail")

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
    field.delays.policies.pause(tag="mail")
    field.sweep()
    field.delays.policies.resume(tag="mail")
    t = field.store.schema.tasks
    with field.store.database.begin() as connection:
        connection.execute(select(t.c.id).where(t.c.id == locked.id).with_for_update()).all()
        field.sweep()
        assert field.statuses(free) == ["NOT_COMPLETE"]
    assert field.statuses(locked) == ["HELD"]
    field.sweep()
    assert field.statuses(locked) == ["NOT_COMPLETE"]
    field.sweep()
    assert field.delays.policies.list() == []


# -- steps, several processes and crashes --------------------------------------------------------


def test_each_sweep_holds_a_part_of_the_rows_and_the_next_sweep_continues(
    field: PolicyHarness, small_steps: None
) -> None:
    rows = [field.add(in_s=HOUR + n) for n in range(5)]
    others = [field.add("sms", HOUR + n) for n in range(5)]
    field.delays.policies.pause(tag="mail")
    seen = []
    for _ in range(100):
        field.sweep()
        seen.append(len(field.held()))
        if field.delays.policies.list()[0].is_applied:
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
    field.delays.policies.pause(tag="mail")
    field.sweep_until(lambda: field.count("task.held") >= 3)
    field.delays.policies.resume(tag="mail")
    field.sweep_until(lambda: field.count("task.released") >= 1)
    field.delays.policies.pause(tag="mail")
    field.sweep_until(lambda: field.delays.policies.list()[0].is_applied)
    assert field.statuses(*rows) == ["HELD"] * 6
    field.delays.policies.remove(tag="mail")
    field.sweep_until(lambda: not field.delays.policies.list())
    assert field.statuses(*rows) == ["NOT_COMPLETE"] * 6


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_the_next_sweep_continues_the_work_of_one_that_died(
    field: PolicyHarness, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [field.add(in_s=HOUR + n) for n in range(5)]
    if verb == "resume":
        field.delays.policies.pause(tag="mail")
        field.sweep()
    monkeypatch.setattr(engine_holding, "PAUSE_ROWS", 2)
    getattr(field.delays.policies, verb)(tag="mail")
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
        getattr(field.delays.policies, verb)(tag="mail")
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
    field.delays.policies.pause(tag="mail")
    field.sweep()
    assert (len(field.held()), counted(field.store)[Status.NOT_COMPLETE]) == (12, 13)
    field.delays.policies.resume(tag="mail")
    field.sweep()
    assert field.held() == []
