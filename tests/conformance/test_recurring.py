"""Recurring schedules, on every database."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from delaytasks import ConfigError, DelayTasks, Status, StoreError, TaskNotFoundError
from tests.conformance.test_transactions import own_engine
from tests.conftest import closing_all
from tests.refusals import invalid
from tests.world import RUNNING, MonkeyPatch
from tests.world.recording import new_key
from tests.world.recurring_world import RecurringWorld, follow

MakeWorld = Callable[..., RecurringWorld]
CREATION = "delaytasks.recurring.creation"


@pytest.fixture
def make_world(store: Any, database_url: str) -> Iterator[MakeWorld]:
    with closing_all(partial(RecurringWorld, database_url)) as make:
        yield make


@pytest.fixture
def world(make_world: MakeWorld) -> RecurringWorld:
    return make_world()


# Sweeps make one task for each occurrence, ahead of time


LATER = [*range(1010, 1081, 10)]
TENS: dict[str, Any] = {"every": 10, "start": 10}
SECONDS: dict[str, Any] = {"every": 1, "start": 1, "missed": "all"}
HOURLY: dict[str, Any] = {"every": "1h", "start": 10, "missed": "skip"}


def set_back(world: RecurringWorld) -> None:
    world.change_schedules(next_at=world.at(20))


@pytest.mark.parametrize(
    ("options", "steps", "made", "missed"),
    [
        pytest.param({}, [0], [20, 40, 60], 0, id="near occurrences"),
        pytest.param({}, [0, 5], [20, 40, 60, 80], 0, id="as time passes"),
        pytest.param({}, [0, set_back, 0, 20], [20, 40, 60, 80], 0, id="with live tasks"),
        pytest.param(TENS, [n // 2 * 5 for n in range(40)], [*range(10, 180, 10)], 0, id="twice"),
        pytest.param(TENS | {"missed": "latest"}, [1005], [1000, *LATER], 1, id="latest missed"),
        pytest.param(TENS | {"missed": "all"}, [1005], [*range(10, 1081, 10)], 0, id="all"),
        pytest.param(SECONDS, [2000], [*range(1001, 2001)], 1, id="the last thousand"),
        pytest.param(TENS | {"missed": "skip"}, [1005], [1000, *LATER], 1, id="skip missed"),
        pytest.param(TENS | {"missed": "all", "overlap": "skip"}, [1005], [1000], 1, id="alone"),
        pytest.param(HOURLY, [90], [], 1, id="passed long ago"),
        pytest.param(HOURLY, [50], [10], 0, id="a sweep that is a little late"),
    ],
)
def test_the_occurrences_of_which_sweeps_make_tasks(
    world: RecurringWorld, options: Any, steps: list[Any], made: list[float], missed: int
) -> None:
    world.recur(body={"n": 1}, **options)
    for step in steps:
        step(world) if callable(step) else world.sweep_at(step)
    assert world.due_s() == made
    assert all(task.body == {"n": 1} for task in world.tasks())
    assert world.count("recurring.missed") == missed
    near = [task.id for task in world.tasks() if task.expected_time <= world.at(31)]
    assert steps != [0] or world.broker.ids == near, "sweeps arm the others"


def test_a_task_has_the_options_and_the_meta_of_its_schedule(world: RecurringWorld) -> None:
    options: Any = {"queue": "slow", "priority": 7, "retries": "15s 3m", "max_late": "1h"}
    options |= {"limit_key": "acme", "meta": {"tenant": "acme"}}
    made = world.recur("1m", **options)
    assert world.recur("1m", **options).version == made.version
    world.sweep_at(0)
    [task] = world.tasks()
    now = world.recurring.schedule_now("r")
    like = world.delays.schedule_delay("other", None, 60, **options)
    for name in ("queue", "priority", "headers_json", "limit_key", "meta", "body"):
        assert getattr(task, name) == getattr(now, name) == getattr(like, name), name
    assert world.delays.get(tag="report", key=task.key).id == task.id


def test_changed_versions_roll_tasks_back(world: RecurringWorld) -> None:
    """Without the fence, the tasks of a change that the sweep has not seen would be written."""
    world.recur()
    r, read = world.table("recurring"), world.runtime.recurring_table.due

    def change_after_reading(on: Any, *arguments: Any) -> Any:
        found = read(on, *arguments)
        on.execute(update(r).values(version=r.c.version + 1))
        return found

    changing = mock.patch.object(world.runtime.recurring_table, "due", change_after_reading)
    with changing, pytest.raises(StoreError, match="0 of 1"):
        world.sweep_at(0)
    assert world.due_s() == []


def test_waiting_schedules_hide_no_others(world: RecurringWorld, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(f"{CREATION}.BATCH_SCHEDULES", 2)
    for number in range(5):
        world.recur(10, f"a{number}", start=10, overlap="skip")
    world.sweep_at(0)  # one task each; the next occurrence waits until the task has ended
    world.recur("1h", "b", "other", start=60)
    world.sweep_at(0)
    assert (world.due_s(), world.due_s("other")) == ([10] * 5, [60])


def test_a_damaged_schedule_stops_no_other_and_can_be_replaced(world: RecurringWorld) -> None:
    for name in ("replaced", "removed"):
        world.recur(name=name)
    world.sweep_at(0)
    world.change_schedules(timing="nonsense", next_at=world.at(20))
    world.recur("1h", "good", "other", start=10)
    world.sweep_at(0)
    assert world.due_s("other") == [10]
    assert world.count("recurring.failed") == 2
    assert world.recur(30, "replaced").timing == "every 30s"
    world.recurring.remove("removed")
    assert [each.name for each in world.recurring.list()] == ["good", "replaced"]


def test_missed_tasks_are_made_in_portions(world: RecurringWorld, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(f"{CREATION}.BATCH_TASKS", 30)
    for number in range(5):
        world.recur(10, f"r{number}", start=10, missed="all")
    world.sweep_at(195)
    assert sorted(world.due_s()) == sorted([*range(10, 271, 10)] * 5)


def test_without_overlap_an_occurrence_is_skipped_while_one_runs(world: RecurringWorld) -> None:
    world.recur(overlap="skip")
    world.sweep_at(0)
    world.sweep_at(5)
    [task] = world.tasks()
    world.change(task, **RUNNING)
    for at_s in range(25, 70, 5):  # over the occurrences at 40 and 60
        world.sweep_at(at_s)
    assert world.due_s() == [20]
    assert world.count("recurring.overlapped") == 2
    assert world.recurring.get("r").last_at == world.at(20)
    world.finish([task])
    world.sweep_at(70)
    assert world.due_s() == [20, 80]


def test_each_occurrence_is_delayed_by_a_jitter_of_its_own(world: RecurringWorld) -> None:
    for number in range(20):
        world.recur("1h", f"r{number}", start=10, jitter="30s")
    world.sweep_at(0)
    assert all(10 <= due <= 40 for due in world.due_s())
    assert len({*world.due_s()}) > 15
    keys = {(task.key or "").partition("@")[2] for task in world.tasks()}
    assert keys == {world.at(10).isoformat().replace("+00:00", "Z")}


# The schedules that code declares, and how the table follows them


Code = Callable[..., DelayTasks]
OFTEN, BAD = {"every": "5m"}, {"every": "5m", "body": object()}


@pytest.fixture
def code(make_world: MakeWorld) -> Code:
    """Start a process with processors of these tags, which recur if they have options."""

    def start(**declared: Any) -> DelayTasks:
        delays = make_world().delays
        for tag, options in declared.items():
            processor = delays.processor(tag)(lambda body: None)
            if options:
                delays.recurring(**options)(processor)
        follow(delays)
        return delays

    return start


def celery_task(delays: DelayTasks) -> Any:
    """Return a Celery task of an app that is not finalized."""

    def poll(number: int) -> None: ...

    return delays._celery.task(name="shop.poll", shared=False)(poll)


def names(delays: DelayTasks) -> list[str]:
    return [schedule.name for schedule in delays.recurring.list()]


def test_a_declaration_is_stored_under_its_tag_and_keeps_a_pause(code: Code) -> None:
    code().recurring.set("report", "report", every="5m")  # the declaration takes it over
    delays = code(report={"cron": "0 9 * * *", "tz": "Asia/Tokyo", "body": {"n": 1}})
    found = delays.recurring.get("report")
    assert (found.timing, found.tz, found.body) == ("0 9 * * *", "Asia/Tokyo", {"n": 1})
    follow(delays)
    assert delays.recurring.get("report") == found
    with invalid("name", match="declared in code"):
        delays.recurring.set("report", "report", every="1m")
    delays.recurring.pause("report")
    changed = code(report={"every": "10m"}).recurring.get("report")
    assert (changed.timing, changed.is_paused) == ("every 10m", True)


@pytest.mark.parametrize(
    ("later", "left"),
    [
        pytest.param({"report": None}, [], id="the processor is not declared"),
        pytest.param({"invoice": OFTEN}, ["invoice", "report"], id="the processor is elsewhere"),
        pytest.param({"bad": BAD, "good": OFTEN}, ["good", "report"], id="one cannot be stored"),
    ],
)
def test_what_other_code_leaves_of_declarations(code: Code, later: Any, left: list[str]) -> None:
    code(report=OFTEN).recurring.set("dynamic", "report", every="5m")
    process = code(**later)
    assert names(process) == sorted([*left, "dynamic"])
    assert process.events.counts["loop.failed"] == ("bad" in later)


def test_declarations_have_names_of_their_own(code: Code) -> None:
    delays = code()
    processor = delays.processor("report")(lambda body: None)
    for name in ("morning", "evening"):
        delays.recurring("0 9 * * *", name=name)(processor)
    follow(delays)
    assert names(delays) == ["evening", "morning"]
    delays.recurring(every="6m", name="morning")(processor)
    with pytest.raises(ConfigError, match="declares the recurring schedule 'morning' twice"):
        follow(delays)
    with pytest.raises(TypeError, match="no processor and no Celery task"):
        code().recurring(every="5m")(print)
    assert delays.recurring.get("morning").timing == "0 9 * * *"


def test_a_celery_task_is_declared_without_finalizing_the_app(code: Code) -> None:
    owner, other = code(), code()
    owner.recurring(every="5m", body={"args": [1]})(celery_task(owner))
    assert not owner._celery.finalized
    follow(owner)
    assert owner.recurring.get("shop.poll").body == {"task": "shop.poll", "args": [1]}
    follow(other)
    assert names(other) == ["shop.poll"], "a process without the task removes nothing"
    celery_task(other)
    follow(other)
    assert names(other) == []


# The bodies of recurring schedules are encrypted, as those of tasks are


def test_a_body_is_encrypted_in_the_schedule_and_in_its_tasks(make_world: MakeWorld) -> None:
    world, secret = make_world(encryption_keys=[new_key()]), {"card": "4111"}
    for tag in ("mail", "report"):
        world.recur(tag=tag, body=secret)
    assert world.recurring.get("r").body == secret, "also after a change of the tag"
    world.sweep_at(0)
    assert [task.body for task in world.tasks()] == [secret] * 3
    tables = world.table("recurring"), world.table()
    bodies = [row[0] for table in tables for row in world.rows(select(table.c.message_body))]
    assert ["4111" in body for body in bodies] == [False] * 4
    other = make_world(encryption_keys=[new_key()])
    other.sweep_at(100)
    assert (len(other.tasks()), other.count("recurring.failed")) == (3, 1)


# Each occurrence gets one task if sweepers die at any step, and with any number of sweepers


def test_joint_sweeps_make_each_task_once(make_world: MakeWorld, monkeypatch: MonkeyPatch) -> None:
    """Normally `begin_sweep` lets only one process sweep. Here nothing keeps the others away."""
    monkeypatch.setattr(f"{CREATION}.BATCH_SCHEDULES", 4)
    sweepers = [make_world() for _ in range(3)]
    first = sweepers[0]
    for number in range(10):
        first.recur(10, f"r{number}", start=10, overlap="skip" if number == 9 else "allow")

    def sweep(sweeper: RecurringWorld) -> list[Exception]:
        sweeper.start, errors = first.start, list[Exception]()
        for at_s in range(0, 60, 5):
            try:
                sweeper.sweep_at(at_s)
            except Exception as error:
                errors.append(error)
        return errors

    with ThreadPoolExecutor(len(sweepers)) as pool:
        errors = sum(pool.map(sweep, sweepers), list[Exception]())
    assert all("database is locked" in str(error) for error in errors), errors
    # A sweeper that meets a change is rolled back as a whole; the next sweep repeats its work.
    first.sweep_at(60)
    keys = Counter(task.key for task in first.tasks())
    assert {key: count for key, count in keys.items() if count > 1} == {}
    found = Counter((key or "").partition("@")[0] for key in keys)
    assert found == {**{f"r{number}": 13 for number in range(9)}, "r9": 1}


# Define, change, pause, run, remove and read recurring schedules


def test_only_another_definition_replaces_the_tasks_that_wait(world: RecurringWorld) -> None:
    """A change makes the first tasks itself: the next sweep may come seconds later."""
    before = world.recurring.set("r", "report", "old", every=1)
    world.clock.advance(3)
    assert world.recurring.set("r", "report", "old", every=1) == before
    assert {task.status for task in world.tasks()} == {Status.NOT_COMPLETE}
    changed = world.recurring.set("r", "report", "new", every=1)
    kept = [task for task in world.tasks() if not task.is_finished]
    assert [task.expected_time for task in kept] == [world.at(n) for n in range(1, 49)]
    assert [task.body for task in kept] == ["old"] * 3 + ["new"] * 45
    assert (changed.last_task_id, changed.next_at) == (kept[-1].id, world.at(49))
    assert changed == world.recurring.get("r")
    assert {task.id for task in kept[3:30]} <= {*world.broker.ids}
    assert world.count("recurring.created") == 90


def test_a_paused_schedule_makes_no_task_until_it_is_resumed(world: RecurringWorld) -> None:
    world.recur()
    world.sweep_at(0)
    assert world.recurring.pause("r").is_paused
    assert world.recurring.pause("r").next_at is None
    assert {task.status for task in world.tasks()} == {Status.CANCELLED}
    changed = world.recur(body="new")
    assert (changed.is_paused, changed.next_at) == (True, None)
    world.sweep_at(100)
    assert len(world.tasks()) == 3
    resumed = world.recurring.resume("r")
    assert resumed == world.recurring.resume("r")
    assert resumed.next_at == world.at(160)
    waiting = [task for task in world.tasks() if not task.is_finished]
    assert [task.expected_time for task in waiting] == [world.at(120), world.at(140)]


def test_run_makes_one_task_and_keeps_the_occurrences(world: RecurringWorld) -> None:
    name = "x" * 166  # the longest name
    before = world.recur("1h", name, start=100, body={"n": 1})
    world.recurring.pause(name)
    world.clock.advance(0.5)  # the key of a run has milliseconds
    task = world.recurring.schedule_now(name)
    assert (world.broker.ids, len(task.key or "")) == ([task.id], 191)
    assert world.recurring.resume(name).next_at == before.next_at


def test_a_task_of_run_has_its_key_and_runs_again(world: RecurringWorld) -> None:
    world.delays.processor("report", retries="1m")(lambda body: 1 / 0)
    world.recur("1h")
    world.run(task := world.recurring.schedule_now("r"))
    assert world.read(task).status is Status.NOT_COMPLETE
    assert world.delays.get(tag="report", key=task.key).id == task.id


def test_a_schedule_that_a_caller_has_locked_delays_no_other_one(
    world: RecurringWorld, database_url: str
) -> None:
    if not world.has_row_locks:
        pytest.skip("SQLite locks the whole database")
    world.recur()
    world.recur(name="other", tag="other")
    engine = own_engine(database_url)
    with Session(engine) as session:
        world.recurring.pause("r", session=session)
        world.sweep_at(0)
        assert (world.due_s(), world.due_s("other")) == ([], [20, 40, 60])
        session.rollback()
    world.sweep_at(0)
    assert world.due_s() == [20, 40, 60]
    engine.dispose()


def test_a_task_of_run_keeps_the_next_one_away_and_ends_no_pause(world: RecurringWorld) -> None:
    world.recur(overlap="skip")
    world.recurring.pause("r")
    world.finish([world.recurring.schedule_now("r")])
    world.sweep_at(0)
    assert len(world.tasks()) == 1
    assert world.recurring.resume("r").last_at == world.at(20)
    world.clock.advance(1)
    world.recurring.schedule_now("r")
    world.sweep_at(1)
    assert [task.status for task in world.tasks()].count(Status.NOT_COMPLETE) == 1


def test_a_removed_schedule_is_gone_with_its_waiting_tasks(world: RecurringWorld) -> None:
    world.recur(jitter=5)
    world.sweep_at(0)
    world.recurring.remove("r")
    assert {task.status for task in world.tasks()} == {Status.CANCELLED}
    assert world.recurring.list() == []
    for call in (world.recurring.get, world.recurring.remove, world.recurring.schedule_now):
        with pytest.raises(TaskNotFoundError, match="no recurring schedule 'r'"):
            call("r")


def test_a_schedule_has_the_sessions_transaction(world: RecurringWorld, database_url: str) -> None:
    engine = own_engine(database_url)
    for end, call, left in (
        ("rollback", world.recur, 0),
        ("commit", world.recur, 1),
        ("rollback", lambda session: world.recurring.remove("r", session=session), 1),
    ):
        with Session(engine) as session:
            call(session=session)
            getattr(session, end)()
        assert len(world.recurring.list()) == left
    engine.dispose()
