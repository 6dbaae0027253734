"""Settle claimed rows, on every database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from delaytasks.core.body import dump_json
from delaytasks.core.events import Events
from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import MOST_VERSIONS, MOVES, Status
from delaytasks.core.task import DelayedTask
from delaytasks.maintenance.sweeper import emit_recovered
from delaytasks.storage import settlements
from delaytasks.storage.claims import Claims
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now
from delaytasks.worker.task_events import WorkerLostEvents
from tests.conformance.store_rows import (
    NASTY,
    RUNNING,
    add,
    entry,
    lapse_all,
    put,
    read,
    seconds,
    task,
)

# Settle claimed rows, on every database


@pytest.mark.quick
def test_settling_writes_the_end_of_each_run(store: Store, claims: Claims) -> None:
    won, lost, back = (add(store) for _ in range(3))
    claimed = {one.id: one for one in claims.claim([entry(one) for one in (won, lost, back)])}
    began, due = store.tasks.now(), seconds(store.tasks.now(), 30)
    ends = [
        Settlement(claimed[won.id], "succeed", began=began),
        Settlement(claimed[lost.id], "fail", error=NASTY),
        Settlement(
            claimed[back.id], "give_back", expected_time=due, error="no such processor, tag='mail'"
        ),
    ]
    assert claims.settle(ends) == {won.id, lost.id, back.id}
    done, failed, waiting = (read(store, one.id) for one in (won, lost, back))
    assert (done.status, done.runs, done.error) == (Status.DONE, 1, None)
    assert done.version == claimed[won.id].version + 1
    assert done.execution_time == began
    assert (failed.status, failed.error) == (Status.FAILED, NASTY)
    assert (waiting.status, waiting.runs, waiting.expected_time) == (
        Status.NOT_COMPLETE,
        0,
        due,
    )
    assert waiting.error == "no such processor, tag='mail'"
    assert [one.lease_until for one in (done, failed, waiting)] == [None] * 3
    assert [(one.worker, one.ip_address) for one in (done, failed)] == [
        ("worker-1", "127.0.0.1")
    ] * 2
    assert (waiting.worker, waiting.ip_address, waiting.execution_time) == (None, None, None)


@pytest.mark.quick
@pytest.mark.parametrize(
    "error",
    [NASTY, '{"json": [1, "\\u0041"]}', "\u2028 \x1b[31m \x7f", "𝒳" * 10_000, "a" * 65_536, ""],
)
def test_any_error_text_is_stored_as_it_is(store: Store, claims: Claims, error: str) -> None:
    made = add(store)
    claims.settle([Settlement(one, "fail", error=error) for one in claims.claim([entry(made)])])
    assert read(store, made.id).error == error


@pytest.mark.quick
@pytest.mark.slow
def test_a_whole_chunk_of_long_errors_is_settled(store: Store, claims: Claims) -> None:
    made = [task(store, key="k" if n == 150 else None) for n in range(200)]
    store.tasks.insert_many(made)
    error = ("时'\\" * 13_107)[:32_768]  # 64 KB, and twice that size after both layers quote it
    claimed = claims.claim([entry(one) for one in made])
    assert claims.settle([Settlement(one, "fail", error=error) for one in claimed]) == {
        one.id for one in made
    }
    assert {read(store, one.id).error for one in made[::50]} == {error}


@pytest.mark.quick
def test_one_statement_carries_a_bounded_text(
    store: Store, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [task(store) for _ in range(30)]
    store.tasks.insert_many(made)
    claimed = claims.claim([entry(one) for one in made])
    sizes: list[int] = []

    def note(rows: Any) -> str:
        text = dump_json(rows)
        sizes.append(len(text.encode()))
        return text

    monkeypatch.setattr(settlements, "dump_json", note)
    assert (
        len(claims.settle([Settlement(one, "fail", error="时" * 65_536) for one in claimed])) == 30
    )
    assert len(sizes) == 3
    assert max(sizes) < 2_100_000


@pytest.mark.quick
def test_a_claim_returns_the_new_values_of_its_rows(store: Store, claims: Claims) -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"version": MOST_VERSIONS, "runs": 2**31 - 1},
        {"key": "k", "runs": 3},
    ]
    by_id = [
        put(store, Status.NOT_COMPLETE, expected_time=seconds(store.tasks.now(), -5), **fields)
        for fields in odd
    ]
    claimed = claims.claim([entry(one) for one in by_id])
    due = [
        put(store, Status.NOT_COMPLETE, expected_time=seconds(store.tasks.now(), -5), **fields)
        for fields in odd
    ]
    claimed += claims.claim_due("default", [0], 10)
    assert {one.id for one in claimed} == {one.id for one in by_id + due}
    told_later = ("update_time", "execution_time", "lease_until", "worker", "ip")
    for one in claimed:
        unsaid = {name: getattr(one, name) for name in told_later}
        assert replace(read(store, one.id), **unsaid) == one


@pytest.mark.quick
def test_runs_with_different_outcomes_are_settled_the_same_together_or_singly(
    store: Store, claims: Claims
) -> None:
    now = store.tasks.now()
    ends: list[dict[str, Any]] = [
        {"move": "succeed"},
        {"move": "succeed", "began": now, "result": '{"a":1}'},
        {"move": "fail", "began": seconds(now, -1), "error": "all\nof it"},
        {"move": "snooze", "began": now, "expected_time": seconds(now, 60)},
        {
            "move": "schedule_retry",
            "began": now,
            "expected_time": seconds(now, 30),
            "error": "again",
        },
        {"move": "give_back"},
        {"move": "expire", "error": "too late"},
    ]

    def left_by(settle: Callable[[list[Settlement]], object]) -> list[DelayedTask]:
        made = [
            put(store, Status.NOT_COMPLETE, expected_time=seconds(now, -5), lapses=2) for _ in ends
        ]
        claimed = [row for one in made for row in claims.claim_alone(one.id, 0)]
        settle([Settlement(one, **end) for one, end in zip(claimed, ends, strict=True)])
        rows = [read(store, one.id) for one in made]
        # If the settlement has no start time, the attempt starts at its claim.
        same = {"id": 0, "create_time": now, "update_time": now}
        if rows[0].execution_time is not None:
            rows[0] = replace(rows[0], execution_time=now)
        return [
            replace(row, **same, version=row.version - one.version)
            for row, one in zip(rows, claimed, strict=True)
        ]

    together = left_by(lambda settlements: claims.settle(settlements))
    one_by_one = left_by(lambda settlements: [claims.settle([each]) for each in settlements])
    assert together == one_by_one
    assert [row.status.name for row in together] == [
        "DONE", "DONE", "FAILED", "NOT_COMPLETE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED",
    ]  # fmt: skip
    assert [row.execution_time for row in together[1:]] == [
        now,
        seconds(now, -1),
        now,
        now,
        None,
        None,
    ]
    assert [row.lapses for row in together] == [0, 0, 0, 0, 0, 2, 2]


@pytest.mark.quick
@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "behind_a_pooler"])
@pytest.mark.parametrize("versions", [(4, 4, 4, 4), (4, 0, 7, 4)], ids=["one_version", "several"])
def test_rows_with_the_same_outcome_are_matched_by_version_and_keep_their_start_times(
    store: Store, versions: Sequence[int], prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not prepares:
        monkeypatch.setattr(store.database, "can", replace(store.database.can, prepare=False))
    claims, now = store.claims("worker-1", None), store.tasks.now()
    past = {"expected_time": seconds(now, -5)}
    made = [put(store, Status.NOT_COMPLETE, version=version, **past) for version in versions]
    waiting, running = (
        put(store, status, version=9, **past) for status in (Status.NOT_COMPLETE, Status.RUNNING)
    )
    stale = entry(waiting)._replace(version=4)
    if len(set(versions)) == 1:
        claimed = [*claims.claim([*map(entry, made), stale])]
    else:  # each claim gives its rows a version of its own
        claimed = [one for row in made for one in claims.claim([entry(row), stale])]
    assert {one.id for one in claimed} == {one.id for one in made}
    begins = {one.id: seconds(now, -n) for n, one in enumerate(made)}
    # The settlement of the last task has no start time.
    ends = [
        Settlement(one, "succeed", None if one.id == made[-1].id else begins[one.id])
        for one in claimed
    ]
    theirs = Settlement(replace(claimed[0], id=running.id), "succeed", now)
    assert claims.settle([*ends, theirs]) == begins.keys()
    done = [read(store, one.id) for one in made]
    fences = {one.id: one.version for one in claimed}
    assert {(row.status, row.version - fences[row.id]) for row in done} == {(Status.DONE, 1)}
    assert [row.execution_time for row in done[:-1]] == [begins[row.id] for row in done[:-1]]
    assert done[-1].execution_time >= now  # type: ignore[operator]
    assert read(store, running.id).status is Status.RUNNING


@pytest.mark.quick
def test_a_stale_worker_cannot_settle_a_reclaimed_task(store: Store, claims: Claims) -> None:
    made = add(store)
    [old] = claims.claim([entry(made)])
    lapse_all(store, [made])
    assert claims.settle([Settlement(old, "succeed")]) == set()
    assert read(store, made.id).status is Status.NOT_COMPLETE
    [new] = store.claims("worker-2", None).claim_alone(made.id, old.version + 1)
    for move in ("succeed", "fail", "give_back"):
        assert claims.settle([Settlement(old, move)]) == set()
    found = read(store, made.id)
    assert (found.status, found.version, found.worker) == (Status.RUNNING, new.version, "worker-2")


@pytest.mark.quick
@pytest.mark.parametrize(("end", "max_lost_leases"), [("give_back", 5), ("fail", 1)])
def test_the_end_of_a_run_is_not_mistaken_for_a_lapse_that_leaves_the_same_status(
    store: Store, claims: Claims, end: Any, max_lost_leases: int
) -> None:
    made = add(store)
    [old] = claims.claim([entry(made)])
    lapse_all(store, [made], max_lost_leases=max_lost_leases)
    assert read(store, made.id).status is MOVES[end].target
    assert claims.settle([Settlement(old, end, error="mine")]) == set()


@pytest.mark.quick
def test_settling_again_after_a_lost_answer_is_accepted_and_changes_nothing(
    store: Store, claims: Claims
) -> None:
    made, other = add(store), add(store)
    [one, two] = claims.claim([entry(made), entry(other)])
    assert claims.settle([Settlement(one, "succeed")]) == {made.id}
    assert claims.settle([Settlement(one, "succeed"), Settlement(two, "fail", error="x")]) == {
        made.id,
        other.id,
    }
    assert read(store, made.id).version == one.version + 1


# Rows that failed because their workers died can be found, on each database


def _add(store: Store, **values: Any) -> None:
    row = {
        "tag": "t",
        "message_body": "{}",
        "expected_time": db_now(),
        "update_time": db_now(),
        **values,
    }
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.tasks).values(**row))


def test_a_lapse_names_the_time_limit_that_was_over(store: Store) -> None:
    began = store.tasks.now() - timedelta(seconds=7)
    running = {**RUNNING, "worker": "w/1", "runs": 1, "execution_time": began}
    _add(store, id=1, **running, tag="slow", lapses=2)
    _add(store, id=2, **running, tag="slow")
    _add(store, id=3, **running, tag="slower")
    _add(store, id=4, **running, tag="free", lapses=2)
    lapsed = store.leases.release(["w/1"], 3, {"slow": 5.0, "slower": 8.0})
    assert (lapsed.total, sorted(lapsed.timed_out)) == (4, [(1, "slow"), (2, "slow")])
    ends = {id: store.tasks.attempts(id)[0].error for id in (1, 2, 3, 4)}
    for id, error in ends.items():
        assert error is not None
        assert error.endswith("; its time limit of 5 s was over") is (id in (1, 2))
    errors = {task.id: task.error or "" for task in lapsed.worker_lost}
    assert errors.keys() == {1, 4}
    assert errors[1].endswith(
        "3 times in a row while this task ran; its time limit of 5 s was over"
    )
    assert errors[4].endswith("3 times in a row while this task ran")
    found = store.tasks.get(2)
    assert found is not None
    assert (found.status, found.lapses, found.version) == (Status.NOT_COMPLETE, 1, 1)
    events = Events()
    emit_recovered(events, lapsed)
    assert (
        events.counts["task.recovered"],
        events.counts["task.timed_out"],
        events.counts["task.worker_lost"],
    ) == (4, 2, 2)


class RecordingTaskEvents:
    """Record calls in place of `TaskEvents`."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str | None]] = []
        self.flushed = 0

    def worker_lost(self, task: DelayedTask) -> None:
        self.rows.append((task.id, task.error))

    def flush(self) -> None:
        self.flushed = len(self.rows)


@pytest.mark.parametrize("sends_events", [True, False])
def test_subscribers_receive_an_event_for_each_row_that_was_given_up(
    store: Store, sends_events: bool
) -> None:
    running = {**RUNNING, "worker": "w/1", "runs": 3}
    _add(store, id=1, **running, lapses=2)
    _add(store, id=2, **running, lapses=1)
    events, heard = Events(), RecordingTaskEvents()
    seen: list[tuple[str, int | None]] = []
    events.subscribe(
        lambda name, fields: seen.append((name, fields.get("id") or fields.get("count")))
    )
    events.subscribe(WorkerLostEvents(heard, lambda: sends_events))
    emit_recovered(events, store.leases.release(["w/1"], 3), reason="it died")
    assert seen == [("task.recovered", 2), ("task.worker_lost", 1)]
    assert [id for id, _ in heard.rows] == ([1] if sends_events else [])
    assert heard.flushed == len(heard.rows)
