"""Recurring schedules, on every database."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import event, select, update
from sqlalchemy.orm import Session

from delaytasks import DelayTasks, Status
from delaytasks.core.errors import ConfigError, StoreError, TaskNotFoundError
from delaytasks.recurrence import creation as creation_module
from delaytasks.recurrence.recurring import follow
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.conformance.recurring_harness import RecurringHarness
from tests.conformance.store_rows import RUNNING
from tests.conformance.test_transactions import own_engine
from tests.recording import CrashError, new_key
from tests.refusals import invalid
from tests.waiting import wait_until


@pytest.fixture
def harness(store: Store, database_url: str) -> Iterator[RecurringHarness]:
    made = RecurringHarness(database_url, store)
    yield made
    made.close()


# Sweeps make one task for each occurrence, ahead of time


def test_a_sweep_makes_the_tasks_of_the_near_occurrences(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", {"n": 1}, every="20s", start=harness.at(20))
    harness.sweep(0)
    assert harness.due_s() == [20, 40, 60]
    assert [task.body for task in harness.tasks()] == [{"n": 1}] * 3
    harness.sweep(5)
    assert harness.due_s() == [20, 40, 60, 80]


def test_a_task_has_the_options_of_its_schedule(harness: RecurringHarness) -> None:
    options: dict[str, Any] = {
        "queue": "slow",
        "priority": 7,
        "retries": "15s 3m",
        "max_late": "1h",
    }
    harness.recurring.set("r", "report", every="1m", limit_key="acme", **options)
    harness.sweep(0)
    [task] = harness.tasks()
    like = harness.delays.schedule_delay("other", None, 60, limit_key="acme", **options)
    assert (task.queue, task.priority, task.headers_json, task.limit_key, task.body) == (
        like.queue,
        like.priority,
        like.headers_json,
        like.limit_key,
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


# The schedules that code declares, and how the table follows them


Make = Callable[[], DelayTasks]


@pytest.fixture
def process(store: Store, database_url: str) -> Iterator[Make]:
    """Return a new process without declarations."""
    made: list[RecurringHarness] = []

    def make() -> DelayTasks:
        made.append(RecurringHarness(database_url, store))
        return made[-1].delays

    yield make
    for harness in made:
        harness.close()


def declare(delays: DelayTasks, *arguments: Any, tag: str = "report", **options: Any) -> None:
    @delays.recurring(*arguments, **options)
    @delays.processor(tag)
    def report(body: Any) -> None: ...


def celery_task(delays: DelayTasks) -> Any:
    """Return a Celery task of an app that is not finalized."""

    def poll(number: int) -> None: ...

    return delays._celery.task(name="shop.poll", shared=False)(poll)


def names(delays: DelayTasks) -> list[str]:
    return [schedule.name for schedule in delays.recurring.list()]


def test_a_declaration_is_stored_under_its_tag(process: Make) -> None:
    delays = process()
    declare(delays, "0 9 * * *", tz="Asia/Tokyo", body={"n": 1})
    follow(runtime_of(delays))
    found = delays.recurring.get("report")
    assert (found.tag, found.timing, found.tz, found.body, found.is_declared) == (
        "report",
        "0 9 * * *",
        "Asia/Tokyo",
        {"n": 1},
        True,
    )


def test_following_the_code_again_changes_nothing(process: Make) -> None:
    delays = process()
    declare(delays, every="5m")
    follow(runtime_of(delays))
    before = delays.recurring.get("report")
    follow(runtime_of(delays))
    assert delays.recurring.get("report") == before


def test_a_changed_declaration_replaces_the_stored_one_and_keeps_a_pause(process: Make) -> None:
    old, new = process(), process()
    declare(old, every="5m")
    follow(runtime_of(old))
    old.recurring.pause("report")
    declare(new, every="10m")
    follow(runtime_of(new))
    found = new.recurring.get("report")
    assert (found.timing, found.is_paused) == ("every 600", True)


def test_a_declaration_that_the_code_no_longer_has_is_removed(process: Make) -> None:
    old, new = process(), process()
    declare(old, every="5m")
    follow(runtime_of(old))
    new.processor("report")(lambda body: None)
    follow(runtime_of(new))
    assert names(new) == []


def test_a_process_without_the_processor_removes_nothing(process: Make) -> None:
    owner, other = process(), process()
    declare(owner, every="5m")
    follow(runtime_of(owner))
    declare(other, every="5m", tag="invoice")
    follow(runtime_of(other))
    assert names(other) == ["invoice", "report"]


def test_a_stored_schedule_is_not_removed_because_no_code_declares_it(process: Make) -> None:
    delays = process()
    delays.processor("report")(lambda body: None)
    delays.recurring.set("dynamic", "report", every="5m")
    follow(runtime_of(delays))
    assert names(delays) == ["dynamic"]


def test_a_call_cannot_change_what_code_declares(process: Make) -> None:
    delays = process()
    declare(delays, every="5m")
    follow(runtime_of(delays))
    with invalid("name", match="declared in code"):
        delays.recurring.set("report", "report", every="1m")


def test_a_declaration_takes_over_a_stored_schedule(process: Make) -> None:
    delays = process()
    delays.recurring.set("report", "report", every="5m")
    declare(delays, every="5m")
    follow(runtime_of(delays))
    assert delays.recurring.get("report").is_declared


def test_one_processor_may_have_several_declarations_with_names(process: Make) -> None:
    delays = process()

    @delays.recurring("0 9 * * *", name="morning", body="am")
    @delays.recurring("0 18 * * *", name="evening", body="pm")
    @delays.processor("report")
    def report(body: Any) -> None: ...

    follow(runtime_of(delays))
    assert names(delays) == ["evening", "morning"]


def test_two_declarations_cannot_have_one_name(process: Make) -> None:
    delays = process()
    declare(delays, every="5m")
    declare(delays, every="6m", tag="other", name="report")
    with pytest.raises(ConfigError, match="declares the recurring schedule 'report' twice"):
        follow(runtime_of(delays))
    assert names(delays) == []


def test_the_declaration_of_a_celery_task_does_not_finalize_the_app(process: Make) -> None:
    delays = process()
    delays.recurring(every="5m", body={"args": [1]})(celery_task(delays))
    assert not delays._celery.finalized
    follow(runtime_of(delays))
    found = delays.recurring.get("shop.poll")
    assert found.body == {"task": "shop.poll", "args": [1]}


def test_a_process_without_a_celery_task_does_not_remove_its_schedule(process: Make) -> None:
    owner, other = process(), process()
    owner.recurring(every="5m")(celery_task(owner))
    follow(runtime_of(owner))
    follow(runtime_of(other))
    assert names(other) == ["shop.poll"]
    celery_task(other)
    follow(runtime_of(other))
    assert names(other) == []


def test_only_a_processor_can_be_declared_to_recur(process: Make) -> None:
    with pytest.raises(TypeError, match="no processor and no Celery task"):
        process().recurring(every="5m")(print)


def test_a_wrong_timing_is_an_error_where_the_code_has_it(process: Make) -> None:
    with invalid("cron", match="Bad minute"):
        declare(process(), "61 * * * *")


def test_a_declaration_that_cannot_be_stored_stops_no_other_one(process: Make) -> None:
    delays = process()
    declare(delays, every="5m", tag="bad", body=object())
    declare(delays, every="5m", tag="good")
    follow(runtime_of(delays))
    assert names(delays) == ["good"]
    assert delays.events.counts["loop.failed"] == 1


# The bodies of recurring schedules are encrypted, as those of tasks are


SECRET = {"card": "4111"}


def stored(store: Store) -> list[str]:
    with store.database.begin() as connection:
        return list(connection.execute(select(store.schema.recurring.c.message_body)).scalars())


def test_a_body_is_encrypted_in_the_schedule_and_in_its_tasks(
    store: Store, database_url: str
) -> None:
    harness = RecurringHarness(database_url, store, encryption_keys=[new_key()])
    harness.recurring.set("r", "mail", SECRET, every="20s", start=harness.at(20))
    harness.recurring.set("r", "report", SECRET, every="20s", start=harness.at(20))
    assert "4111" not in stored(store)[0]
    assert harness.recurring.get("r").body == SECRET, "also after a change of the tag"
    harness.store = runtime_of(harness.delays).store
    harness.sweep(0)
    assert [task.body for task in harness.tasks()] == [SECRET] * 3
    t = store.schema.tasks
    with store.database.begin() as connection:
        assert not [
            b for b in connection.execute(select(t.c.message_body)).scalars() if "4111" in b
        ]
    harness.close()


@pytest.mark.parametrize("keys", [[], [new_key()]])
def test_a_sweeper_without_the_key_makes_no_task_and_reports_it(
    store: Store, database_url: str, keys: list[str]
) -> None:
    owner = RecurringHarness(database_url, store, encryption_keys=[new_key()])
    owner.recurring.set("r", "report", SECRET, every="20s", start=owner.at(20))
    other = RecurringHarness(database_url, store, encryption_keys=keys)
    other.store = runtime_of(other.delays).store
    other.sweep(0)
    assert other.tasks() == []
    assert other.events.counts["recurring.failed"] == 1
    for harness in (owner, other):
        harness.close()


# Each occurrence gets one task if sweepers die at any step, and with any number of sweepers


EXPECTED_S = [10, 20, 30, 40, 50, 60, 70]


class KilledError(Exception):
    """Ends a sweeper. SQLAlchemy rolls its transaction back, as a database does after a death."""


class Killer:
    """Kills the sweeper at one of its steps: before or after a statement, or after a commit."""

    def __init__(self, harness: RecurringHarness, step: int) -> None:
        self._harness = harness
        self._left = step
        self._engine = harness.store.database.tx
        self.has_killed = False

    def sweep(self, at_s: float) -> None:
        names = ("before_cursor_execute", "after_cursor_execute")
        for name in names:
            event.listen(self._engine, name, self._count)
        try:
            self._harness.sweep(at_s, self._count)
        except KilledError:
            pass
        for name in names:
            event.remove(self._engine, name, self._count)

    def _count(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self.has_killed = True
            raise KilledError


def test_a_sweeper_may_die_at_each_step(harness: RecurringHarness) -> None:
    """Every step of a sweep is a point of death, until the sweep ends without one."""
    steps = 0
    while True:
        steps += 1
        name = f"r{steps}"
        harness.recurring.set(name, name, every="10s", start=harness.at(10))
        killer = Killer(harness, steps)
        killer.sweep(0)
        if not killer.has_killed:
            break
        assert harness.due_s(name) in ([], EXPECTED_S), f"step {steps} left a part of the tasks"
        harness.sweep(0)
        assert harness.due_s(name) == EXPECTED_S, f"after a death at step {steps}"
    assert steps >= 8


def test_sweepers_that_sweep_together_make_each_task_once(
    store: Store, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normally `begin_sweep` lets only one process sweep. Here nothing keeps the others away."""
    monkeypatch.setattr(creation_module, "BATCH_SCHEDULES", 4)
    sweepers = [RecurringHarness(database_url, store) for _ in range(3)]
    first, errors = sweepers[0], list[BaseException]()
    for number in range(10):
        overlap: Any = "skip" if number == 9 else "allow"
        first.recurring.set(
            f"r{number}", "report", every="10s", start=first.at(10), overlap=overlap
        )

    def sweep(sweeper: RecurringHarness) -> None:
        for at_s in range(0, 60, 5):
            sweeper.start = first.start
            try:
                sweeper.sweep(at_s)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=sweep, args=(sweeper,)) for sweeper in sweepers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # A sweeper that meets a change is rolled back as a whole; the next sweep repeats its work.
    first.sweep(60)
    keys = Counter(task.key for task in first.tasks())
    assert {key: count for key, count in keys.items() if count > 1} == {}
    names = Counter((key or "").partition("@")[0] for key in keys)
    assert names == {**{f"r{number}": 13 for number in range(9)}, "r9": 1}
    assert all("database is locked" in str(error) for error in errors), errors
    for sweeper in sweepers:
        sweeper.close()


# Define, change, pause, run, remove and read recurring schedules


def test_a_schedule_is_stored_as_it_was_defined(harness: RecurringHarness) -> None:
    made = harness.recurring.set(
        "ünï 'quoted' %s", "report", {"ä": [1]}, cron="0  9 * * mon-fri", tz="Europe/Berlin"
    )
    found = harness.recurring.get("ünï 'quoted' %s")
    assert found == made
    assert (found.timing, found.tz, found.body) == ("0 9 * * mon-fri", "Europe/Berlin", {"ä": [1]})
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
    task = harness.recurring.schedule_now("r")
    assert task.body == {"n": 1}
    assert task.expected_time <= harness.store.tasks.now()
    assert harness.timer.ids == [task.id]
    assert harness.recurring.resume("r").next_at == before.next_at
    assert harness.delays.get(task.id).key == task.key


def test_the_next_task_does_not_overlap_one_that_run_has_made(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20), overlap="skip")
    task = harness.recurring.schedule_now("r")
    harness.sweep(0)
    assert [each.id for each in harness.tasks()] == [task.id]


def test_a_paused_schedule_without_overlap_that_is_run_stays_paused(
    harness: RecurringHarness,
) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20), overlap="skip")
    harness.recurring.pause("r")
    harness.finish([harness.recurring.schedule_now("r")])
    harness.sweep(0)
    assert len(harness.tasks()) == 1
    assert harness.recurring.get("r").next_at is None


def test_a_removed_schedule_is_gone_with_its_waiting_tasks(harness: RecurringHarness) -> None:
    harness.recurring.set("r", "report", every="20s", start=harness.at(20), jitter=5)
    harness.sweep(0)
    harness.recurring.remove("r")
    assert set(harness.statuses()) == {"CANCELLED"}
    assert harness.recurring.list() == []
    for call in (harness.recurring.get, harness.recurring.remove, harness.recurring.schedule_now):
        with pytest.raises(TaskNotFoundError, match="no recurring schedule 'r'"):
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
    assert harness.recurring.get("r").next(2, after) == [harness.at(40), harness.at(60)]


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
    ("options", "argument"),
    [
        ({}, "cron"),
        ({"cron": "* * * * *", "every": 5}, "cron"),
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": "0 0 31 2 *"}, "cron"),
        ({"cron": "* * *"}, "cron"),
        ({"cron": "* " * 400}, "cron"),
        ({"cron": object()}, "cron"),
        ({"cron": "* * * * *", "tz": "Mars/Olympus"}, "tz"),
        ({"cron": "* * * * *", "tz": "../etc/passwd"}, "tz"),
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"every": -5}, "every"),
        ({"every": "5 parsecs"}, "every"),
        ({"every": 5, "missed": "maybe"}, "missed"),
        ({"every": 5, "most_missed": 0}, "most_missed"),
        ({"every": 5, "overlap": "queue"}, "overlap"),
        ({"every": 5, "jitter": -1}, "jitter"),
        ({"every": 5, "priority": 11}, "priority"),
    ],
)
def test_wrong_options_are_refused_and_nothing_is_written(
    harness: RecurringHarness, options: dict[str, Any], argument: str
) -> None:
    with invalid(argument):
        harness.recurring.set("r", "report", **options)
    assert harness.recurring.list() == []


def test_wrong_names_and_instants_are_refused(harness: RecurringHarness) -> None:
    with invalid("name", match="at most 166"):
        harness.recurring.set("x" * 167, "report", every=5)
    with invalid("tag"):
        harness.recurring.set("r", "", every=5)
    with invalid("start"):
        harness.recurring.set("r", "report", every=5, start=harness.start.replace(tzinfo=None))
    with pytest.raises(TypeError, match="no option colour"):
        harness.recurring.set("r", "report", every=5, colour="red")  # type: ignore[call-arg]


def test_the_longest_name_fits_into_the_key_of_a_task(harness: RecurringHarness) -> None:
    harness.recurring.set("x" * 166, "report", every="20s", start=harness.at(20))
    harness.sweep(0)
    assert len(harness.tasks()) == 3
    assert len(harness.recurring.schedule_now("x" * 166).key or "") == 191


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
    harness.recurring.schedule_now("a")
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
    with invalid("meta"):
        harness.recurring.set("a", "report", meta={"tenant": 7}, **options)  # type: ignore[dict-item]
