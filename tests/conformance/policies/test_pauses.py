"""Tasks of a paused tag or queue are held, and the policies say so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, update

from delaytasks import Status
from delaytasks.core import errors as e
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Stamp
from delaytasks.execution import policy_cache as policies_of
from delaytasks.runtime import runtime_of
from delaytasks.worker import chunk_request
from tests.conformance.policies.policy_harness import HOUR, PolicyHarness
from tests.conformance.store_rows import counts_moves
from tests.recording import counted


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
    policy = field.delays.pause(tag="mail", actor="me")
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
    [shown] = field.delays.policies()
    assert (shown.held, shown.is_applied) == (6, True)
    assert counted(field.store)[Status.HELD] == 6
    assert field.delays.get(paused[0]).version == paused[0].version + 1


def test_a_pause_of_a_queue_holds_the_tasks_of_all_its_tags(field: PolicyHarness) -> None:
    slow = [field.add(tag, in_s, queue="slow") for tag in ("mail", "sms") for in_s in (-5, HOUR)]
    other = field.add("mail", -5)
    field.delays.pause(queue="slow")
    field.sweep()
    assert field.statuses(*slow, other) == ["HELD"] * 4 + ["NOT_COMPLETE"]
    assert [(p.kind, p.name, p.held) for p in field.delays.policies()] == [("queue", "slow", 4)]


def test_a_queue_that_is_paused_gets_no_drain_messages(field: PolicyHarness) -> None:
    runtime_of(field.delays).store.workers.report("w", ["default", "slow"], "solo", 1, 0)
    field.delays.pause(queue="slow")
    field.sweep()
    # The pause sweeper has already passed the due times of these rows.
    for queue in ("slow", "default"):
        field.add("mail", -60, queue=queue)
    field.sweep()
    assert [queue for queue, *_ in field.timer.requested_drains] == ["default"]


def test_a_paused_task_that_comes_within_the_horizon_is_held_and_not_armed(
    field: PolicyHarness,
) -> None:
    field.delays.pause(tag="mail")
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
    field.delays.pause(tag="mail")
    paused, other = field.add(in_s=-5, body="paused"), field.add("sms", -5, body="other")
    report = field.run(paused, other)
    assert (report.claimed, report.ran, field.ran) == (2, 1, ["other"])
    found = field.delays.get(paused)
    assert (found.status, found.attempts, found.worker, found.execution_time) == (
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
    field.delays.pause(tag="mail")
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
    field.delays.pause(tag="mail")
    runner = field.delays.runner()
    assert [runner.run_due("default", [0], 5).is_full for _ in range(2)] == [True, False]
    assert field.statuses(*rows) == ["HELD"] * 7
    assert field.ran == []


def test_a_row_that_lapsed_is_held_like_any_other(field: PolicyHarness) -> None:
    task = field.add(in_s=-5)
    t = field.store.schema.tasks
    with field.store.database.begin() as connection:
        connection.execute(update(t).values(lapses=1))
    field.delays.pause(tag="mail")
    field.delays.runner().run_due("default", [0], 5)
    found = field.delays.get(task)
    assert (found.status, found.lapses, field.ran) == (Status.HELD, 1, [])


def test_a_process_applies_a_pause_within_about_a_second(
    field: PolicyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = field.process()
    assert not runtime_of(other).policy_cache.current().has_pauses
    field.delays.pause(tag="mail")
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
    field.delays.pause(tag="mail")
    stamp = runtime_of(field.delays).policy_cache.refresh().stamp
    child.follow(stamp)
    assert child.current().pauses("mail", "default")
    child.follow(stamp)
    assert len(reads) == 1


def test_a_pool_process_reads_policies_when_its_main_process_has_read_none_yet(
    field: PolicyHarness,
) -> None:
    field.delays.pause(tag="mail")
    main, child = (runtime_of(field.process()).policy_cache for _ in range(2))
    assert main.stamp is None
    child.follow(main.stamp)
    assert child.current().pauses("mail", "default")
    main.refresh()
    assert main.stamp == child.stamp


def test_a_process_that_cannot_read_policies_fails_unless_it_has_read_them_before(
    field: PolicyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    field.delays.pause(tag="mail")
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
    field.delays.pause(tag="mail")
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


def test_a_purge_leaves_held_tasks(field: PolicyHarness) -> None:
    task, done = field.add(in_s=-5), field.add("sms", -5)
    field.delays.pause(tag="mail")
    field.sweep()
    field.run(done)
    long_ago = field.store.tasks.now() - timedelta(days=9)
    with field.store.database.begin() as connection:
        connection.execute(
            update(field.store.schema.tasks).values(update_time=long_ago, expected_time=long_ago)
        )
    assert field.store.sweeps.purge(86400, 100) == 1
    assert field.statuses(task) == ["HELD"]


# -- policies ------------------------------------------------------------------------------------


def test_repeating_a_pause_resume_or_clear_changes_nothing(field: PolicyHarness) -> None:
    first = field.delays.pause(tag="mail", actor="a")
    assert field.delays.pause(tag="mail", actor="b") == first
    assert field.count("policy.changed") == 1
    assert field.delays.resume(tag="sms").version == 0
    assert field.delays.clear_policy(queue="q").version == 0
    assert [policy.name for policy in field.delays.policies()] == ["mail"]


def test_a_pause_keeps_the_limits_and_clearing_the_policy_removes_both(
    field: PolicyHarness,
) -> None:
    field.delays.pause(tag="mail")
    field.delays.set_policy(tag="mail", concurrency=10, key_concurrency=2, rate="100/s")
    field.delays.resume(tag="mail")
    policy = field.delays.set_policy(tag="mail", key_concurrency=None)
    assert policy.limits == (10, None, 100, 1.0)
    assert runtime_of(field.delays).policy_cache.refresh().limited == {
        "mail": field.store.policies.read()[0]
    }
    field.sweep()
    assert [policy.as_json()["rate"] for policy in field.delays.policies()] == ["100/s"]
    assert field.delays.clear_policy(tag="mail").is_empty
    field.sweep()
    assert field.delays.policies() == []


def test_a_pause_sweep_of_an_old_version_does_not_mark_a_newer_policy_as_applied(
    field: PolicyHarness,
) -> None:
    table = field.store.policies
    paused = field.delays.pause(tag="mail")
    resumed = field.delays.resume(tag="mail")
    again = field.delays.pause(tag="mail")
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
            lambda: field.delays.pause(tag="mail"),
            lambda: field.delays.set_policy(tag="mail", concurrency=3),
            lambda: field.delays.set_policy(tag="mail", rate="5/m"),
        ]
        for future in [pool.submit(call) for call in calls * 3]:
            future.result(30)
    [policy] = field.store.policies.read()
    assert (policy.is_paused, policy.limits, policy.version) == (True, (3, None, 5, 60.0), 3)


def test_invalid_policies_are_refused(field: PolicyHarness) -> None:
    delays: Any = field.delays
    for call in (delays.pause, delays.resume, delays.clear_policy):
        for arguments in ({}, {"tag": "a", "queue": "b"}):
            with pytest.raises(e.InvalidPolicyError, match="a tag or a queue"):
                call(**arguments)
        with pytest.raises(e.InvalidTagError):
            call(tag=" ")
        with pytest.raises(e.InvalidQueueError):
            call(queue="a b")
    with pytest.raises(e.InvalidPolicyError, match="what"):
        delays.set_policy(tag="mail")
    with pytest.raises(e.InvalidPolicyError, match=r"'slow' can be paused.*limits are for tags"):
        delays.set_policy(queue="slow", concurrency=3)
    for limit in (0, -1, True, 1.5, "5", 10**10):
        with pytest.raises(e.InvalidPolicyError, match="concurrency is an integer"):
            delays.set_policy(tag="mail", concurrency=limit)
        with pytest.raises(e.InvalidPolicyError, match="key_concurrency is an integer"):
            delays.set_policy(tag="mail", key_concurrency=limit)
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
        with pytest.raises(e.InvalidPolicyError):
            delays.set_policy(tag="mail", rate=rate)
    assert field.delays.policies() == []


def test_without_policies_a_chunk_executes_no_query_about_policies(field: PolicyHarness) -> None:
    tasks = [field.add(in_s=-5) for _ in range(3)]
    runtime_of(field.delays).policy_cache.follow(0)
    field.delays.runner()
    seen: list[str] = []
    for engine in (field.store.database.auto, field.store.database.tx):
        event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    field.run(*tasks)
    assert field.statuses(*tasks) == ["DONE"] * 3
    assert not [sql for sql in seen if "policy" in sql]
