"""`Follower` finds the changes of tasks in each database, at a bounded cost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event

from delaytasks import DelayTask, DelayTasks
from delaytasks.core.filters import filter_of
from delaytasks.operations.explanations import Follower
from delaytasks.runtime import runtime_of
from delaytasks.storage import state_queries as changes
from delaytasks.storage.store import Store
from tests.recording import RunnerHarness


@pytest.fixture
def bench(store: Store) -> RunnerHarness:
    return RunnerHarness(store)


def follow(delays: DelayTasks, **filters: Any) -> Follower:
    follower = Follower(runtime_of(delays).store, filter_of(filters))
    follower.read()
    return follower


def seen(follower: Follower) -> list[tuple[int, str]]:
    return [(task.id, task.status.name) for task in follower.read().tasks]


def make_late(store: Store, task: DelayTask) -> None:
    """Let the task be due long ago, as in a backlog."""
    t = store.schema.tasks
    due = task.expected_time - timedelta(hours=1)
    with store.database.begin() as connection:
        connection.execute(
            t.update().where(t.c.id == task.id).values(expected_time=due, update_time=due)
        )


def test_each_change_is_shown_once(delays: DelayTasks, bench: RunnerHarness) -> None:
    follower = follow(delays)
    task = delays.schedule_delay("note", {"secret": 1}, 0)
    assert seen(follower) == [(task.id, "NOT_COMPLETE")]
    assert seen(follower) == []
    bench.claims.claim([bench.entry(task)])
    assert seen(follower) == [(task.id, "RUNNING")]
    later = delays.schedule_delay("note", {}, 3600)
    assert seen(follower) == [(later.id, "NOT_COMPLETE")]
    delays.cancel(later)
    assert seen(follower) == [(later.id, "CANCELLED")]


def test_a_run_between_two_reads_is_shown_as_it_ended(
    delays: DelayTasks, bench: RunnerHarness
) -> None:
    follower = follow(delays)
    task = delays.schedule_delay("note", {"secret": 1}, 0)
    bench.run(task)
    [found] = follower.read().tasks
    assert found.status.name == "DONE"
    assert found.body_json == "", "bodies are not read"


def test_a_task_of_a_backlog_is_found_while_it_runs_and_when_it_ends(
    delays: DelayTasks, bench: RunnerHarness, store: Store
) -> None:
    task = delays.schedule_delay("note", {}, 0)
    make_late(store, task)
    follower = follow(delays)
    # The follower has not seen it yet, and it was due long ago, so only its status leads to it.
    [claimed] = bench.claims.claim([bench.entry(bench.now(task))])
    assert (task.id, "RUNNING") in seen(follower)
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(
            t.update().where(t.c.id == task.id).values(status=1, version=claimed.version + 1)
        )
    assert seen(follower) == [(task.id, "DONE")], "it was seen before"


def test_filters_apply_to_the_changes(delays: DelayTasks) -> None:
    by_tag, by_key = follow(delays, tag="a"), follow(delays, key="k")
    by_meta, by_status = follow(delays, meta={"tenant": "acme"}), follow(delays, status="CANCELLED")
    one = delays.schedule_delay("a", {}, 60)
    two = delays.schedule_delay("b", {}, 60, key="k", meta={"tenant": "acme"})
    assert seen(by_tag) == [(one.id, "NOT_COMPLETE")]
    assert seen(by_key) == seen(by_meta) == [(two.id, "NOT_COMPLETE")]
    assert seen(by_status) == []
    delays.cancel(two)
    assert seen(by_status) == seen(by_key) == [(two.id, "CANCELLED")]


@pytest.fixture
def statements(store: Store, delays: DelayTasks) -> Iterator[list[str]]:
    found: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        found.append(statement)

    engine = runtime_of(delays).store.database.auto
    event.listen(engine, "before_cursor_execute", note)
    yield found
    event.remove(engine, "before_cursor_execute", note)


def test_a_read_has_few_statements_and_each_is_bounded(
    delays: DelayTasks, statements: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = follow(delays)
    delays.schedule_many(("note", {}, 60) for _ in range(30))
    monkeypatch.setattr(changes, "MOST_CHANGES", 20)
    statements.clear()
    step = follower.read()
    assert step.is_incomplete
    assert len(step.tasks) == 20
    assert len(statements) == 5, "the time, three parts, and the rows"
    assert sum("LIMIT" in statement for statement in statements) == 3
