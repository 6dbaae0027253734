"""Each fact yields one reason why a task has not run."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from delaytasks import DelayedTask, Status
from delaytasks.core.celery_calls import ANY_CELERY_TASK
from delaytasks.core.policies import Policy
from delaytasks.core.text import NO_KEY, NO_PROCESSOR, NO_TIME_LIMITS
from delaytasks.core.why import Facts, ScheduleFacts, unserved, why
from delaytasks.core.workers import RegisteredWorker

NOW = datetime(2030, 1, 31, 18, tzinfo=timezone.utc)
TASK = DelayedTask(7, "mail.send", "{}", NOW - timedelta(seconds=2), queue="letters")
WORKER = RegisteredWorker(
    "w1@host", True, 1.0, ["letters"], frozenset({"mail.send"}), "prefork", 2, NOW, NOW, 0.0
)


def facts(task: DelayedTask = TASK, **changes: object) -> Facts:
    return Facts(task, NOW, 0.0, [WORKER], swept_s=1.0)._replace(**changes)


def codes(found: Facts) -> list[str]:
    return [reason.code for reason in why(found)]


def text(found: Facts) -> str:
    return why(found)[0].text


HELD = replace(TASK, status=Status.HELD)
OVERDUE = replace(TASK, expected_time=NOW - timedelta(minutes=5))
FUTURE = replace(TASK, expected_time=NOW + timedelta(hours=1))
RUNS = replace(TASK, status=Status.RUNNING, worker="w1@host/5", execution_time=NOW)
OVER = replace(RUNS, lease_until=NOW - timedelta(seconds=1))
#: Its next try is now, and it still needs a worker that knows its tag.
DEFERRED = replace(TASK, due_time=NOW - timedelta(minutes=2), error=f"{NO_PROCESSOR}mail.send")
PAUSED = Policy("tag", "mail.send", is_paused=True)
LIMITED = Policy("tag", "mail.send", concurrency=5)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (facts(), "due"),
        (facts(policies=[LIMITED], running=4), "due"),
        (facts(workers=[WORKER._replace(queues=["*"])]), "due"),
        (facts(HELD), "held"),
        (facts(OVER), "lease_over"),
        (facts(OVERDUE, swept_s=None), "no_sweep"),
        (facts(OVERDUE, swept_s=60.0), "no_sweep"),
        (facts(OVERDUE, swept_s=3.0), "due"),
        (facts(DEFERRED, workers=[WORKER._replace(tags=frozenset())]), "no_processor"),
        # What an operator can end is named first.
        (facts(FUTURE, workers=[], policies=[PAUSED]), "paused future no_worker"),
    ],
)
def test_the_facts_decide_about_the_reasons_and_their_order(found: Facts, expected: str) -> None:
    assert codes(found) == expected.split()


@pytest.mark.parametrize("status", [Status.DONE, Status.FAILED, Status.CANCELLED])
def test_a_task_that_ended_has_its_status_as_the_only_reason(status: Status) -> None:
    found = facts(replace(TASK, status=status, error="x"), workers=[], clock_offset_s=9)
    assert codes(found) == [status.name.lower()]


def test_a_task_of_the_future_names_its_due_time() -> None:
    found = facts(FUTURE)
    assert codes(found) == ["future"]
    assert text(found) == "It is due at 2030-01-31T19:00:00Z, in 1h, by the clock of the database."


@pytest.mark.parametrize(("kind", "name"), [("tag", "mail.send"), ("queue", "letters")])
def test_a_pause_names_its_author_and_the_command_that_ends_it(kind: str, name: str) -> None:
    policy = Policy(kind, name, is_paused=True, updated_by="ann@desk", update_time=NOW)
    for task in (TASK, HELD):
        found = facts(task, policies=[policy])
        assert codes(found) == ["paused"]
        assert "by ann@desk since 2030-01-31T18:00:00Z" in text(found)
        assert text(found).endswith(f"delaytasks resume --{kind} {name}")
    ends = replace(policy, paused_until=NOW + timedelta(hours=1))
    assert "T18:00:00Z (0s), until 2030-01-31T19:00:00Z." in text(facts(TASK, policies=[ends]))


def test_a_full_limit_has_the_number_of_running_tasks() -> None:
    for task, is_in_waitlist in ((TASK, False), (HELD, True)):
        found = facts(task, policies=[LIMITED], is_in_waitlist=is_in_waitlist, running=5)
        assert codes(found) == ["limit"]
        assert "5 may run at the same time, and 5 do" in text(found)


def test_limits_of_keys_and_rates_are_named() -> None:
    policy = Policy("tag", "mail.send", concurrency_per_key=2, rate=100, rate_period_s=1)
    task = replace(HELD, limit_key="customer-7")
    said = text(facts(task, policies=[policy], is_in_waitlist=True, running_of_key=2))
    assert "2 of the key customer-7 may run, and 2 do" in said
    assert "its rate is 100/s" in said


def test_an_unserved_queue_names_the_queues_that_workers_serve() -> None:
    found = facts(workers=[WORKER._replace(queues=["default", "reports"])])
    assert codes(found) == ["no_worker"]
    assert text(found) == (
        "No live worker serves the queue letters; live workers serve default, reports (w1@host). "
        "Start one more worker: celery -A … worker -Q delaytasks.letters"
    )


def test_a_worker_of_other_queues_only_is_named_with_what_its_q_lacks() -> None:
    found = facts(workers=[WORKER._replace(queues=[])], namespace="staging")
    assert text(found) == (
        "No live worker serves the queue letters; live workers serve no queue of delaytasks "
        "(w1@host). Add staging.letters to the -Q of a worker, or start one more: "
        "celery -A … worker -Q staging.letters"
    )


def test_a_queue_whose_worker_died_names_the_worker() -> None:
    found = facts(workers=[WORKER._replace(is_alive=False, age_s=90)])
    assert codes(found) == ["no_worker"]
    assert "w1@host, which did, was seen 1m30s ago" in text(found)


def test_a_tag_that_no_worker_knows_is_named_with_its_queue_and_workers() -> None:
    found = facts(workers=[WORKER._replace(tags=frozenset({"other"}))])
    assert codes(found) == ["no_processor"]
    assert "queue letters has a processor for the tag mail.send (w1@host)" in text(found)


@pytest.mark.parametrize("tags", [None, frozenset({"mail.send"})])
def test_one_worker_that_may_know_the_tag_is_enough(tags: frozenset[str] | None) -> None:
    workers = [WORKER._replace(tags=known) for known in (frozenset({"other"}), tags)]
    assert unserved("letters", "mail.send", workers, "delaytasks") is None


def test_each_worker_serves_the_tags_of_celery_tasks() -> None:
    worker = WORKER._replace(tags=frozenset({ANY_CELERY_TASK}))
    assert unserved("letters", "celery:shop.remind", [worker], "delaytasks") is None


@pytest.mark.parametrize(
    ("begin", "code"),
    [(NO_PROCESSOR, "no_processor"), (NO_KEY, "no_key"), (NO_TIME_LIMITS, "no_time_limits")],
)
def test_the_reason_of_a_deferred_task_has_its_cause_and_the_next_try(
    begin: str, code: str
) -> None:
    task = replace(DEFERRED, expected_time=NOW + timedelta(seconds=9), error=f"{begin}x")
    tags = frozenset[str]() if code == "no_processor" else WORKER.tags
    found = facts(task, workers=[WORKER._replace(tags=tags)])
    assert codes(found) == [code], "one reason, though the registry and the row both tell it"
    assert "It was due 2m ago" in text(found)
    assert "next try is at 2030-01-31T18:00:09Z, in 9s" in text(found)


def test_a_retry_names_its_number_its_time_and_the_error() -> None:
    due, error = NOW + timedelta(minutes=3), "Traceback\nValueError: no"
    task = replace(TASK, expected_time=due, runs=2, error=error)
    found = facts(task)
    assert codes(found) == ["retry"]
    said = "Attempt 2 failed: Traceback. Retry 2 is due at 2030-01-31T18:03:00Z, in 3m"
    assert said in text(found)


def test_a_task_that_runs_names_its_worker() -> None:
    task = replace(RUNS, lease_until=NOW + timedelta(minutes=1))
    assert codes(facts(task)) == ["running"]
    assert "on w1@host/5 since 2030-01-31T18:00:00Z, 2s after it was due" in text(facts(task))


def test_a_key_that_is_not_here_is_named() -> None:
    task = replace(TASK, body_json="aesgcm:0123abcd:token")
    assert codes(facts(task)) == ["no_key_here"]
    assert "begins with aesgcm: and needs the key 0123abcd" in why(facts(task))[0].text
    assert codes(facts(task, keys=["0123abcd"])) == ["due"]


@pytest.mark.parametrize(("offset_s", "word"), [(30.0, "30s ahead of"), (-30.0, "30s behind")])
def test_a_clock_that_differs_from_the_databases_is_named(offset_s: float, word: str) -> None:
    reasons = why(facts(clock_offset_s=offset_s))
    assert [reason.code for reason in reasons] == ["due", "clock"]
    assert word in reasons[1].text


def test_the_interval_of_a_recurring_schedule_has_a_unit() -> None:
    reasons = why(facts(schedule=ScheduleFacts("feeds", "every 300", True, None)))
    assert reasons[-1].sentence.endswith("the recurring schedule feeds (every 5m); it is paused.")
