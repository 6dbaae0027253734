"""Settle the rows that a worker has claimed, on every database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from delaytasks import DelayedTask, Status
from tests.world import MOVES, NASTY, MonkeyPatch, Settlement, World

pytestmark = pytest.mark.quick


def test_runs_with_different_ends_are_settled_the_same_together_or_singly(world: World) -> None:
    now, worker = world.now() + timedelta(minutes=1), world.worker()
    later, before = now + timedelta(seconds=60), now - timedelta(seconds=1)
    # Each end, with the status, start, attempts and lapses that it leaves.
    ends: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"move": "succeed"}, ("DONE", None, 1, 0)),
        ({"move": "succeed", "began": now, "result": '{"a":1}'}, ("DONE", now, 1, 0)),
        ({"move": "fail", "began": before, "error": NASTY}, ("FAILED", before, 1, 0)),
        ({"move": "snooze", "began": now, "expected_time": later}, ("NOT_COMPLETE", now, 0, 0)),
        (
            {"move": "schedule_retry", "began": now, "expected_time": later, "error": "again"},
            ("NOT_COMPLETE", now, 1, 0),
        ),
        ({"move": "give_back", "error": "tag='x'"}, ("NOT_COMPLETE", None, 0, 2)),
        ({"move": "expire", "error": "too late"}, ("CANCELLED", None, 0, 2)),
    ]

    def left(is_together: bool) -> list[DelayedTask]:
        made = [world.put(lapses=2) for _ in ends]
        claimed = [one for row in made for one in worker.claim_alone(row)]
        ended = [Settlement(one, **end) for one, (end, _) in zip(claimed, ends, strict=True)]
        parts = [ended] if is_together else [[one] for one in ended]
        assert {id for part in parts for id in worker.settle(part)} == {one.id for one in made}
        rows = [world.read(row) for row in made]
        for row, one, (end, expected) in zip(rows, claimed, ends, strict=True):
            status, began, attempts, lapses = expected
            assert (row.status.name, row.runs, row.lapses) == (status, attempts, lapses), end
            if end == {"move": "succeed"}:  # then the attempt starts at its claim
                assert row.execution_time is not None
            else:
                assert row.execution_time == began
            has_run = end["move"] not in ("give_back", "expire")
            begun = ("worker-1", "127.0.0.1") if has_run else (None, None)
            assert (row.worker, row.ip_address) == begun
            assert (row.version, row.lease_until) == (one.version + 1, None)
            assert (row.error, row.result_json) == (end.get("error"), end.get("result"))
            assert row.expected_time == end.get("expected_time", one.expected_time)
        times = dict.fromkeys(("create_time", "update_time", "execution_time"), now)
        same = {"id": 0, "version": 0, **times}
        return [replace(row, **same, expected_time=now) for row in rows]

    assert left(is_together=True) == left(is_together=False)


def test_long_errors_are_settled_in_bounded_texts(world: World, monkeypatch: MonkeyPatch) -> None:
    made, sizes = world.put_many(30), list[int]()

    def note(rows: Any) -> str:
        text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
        sizes.append(len(text.encode()))
        return text

    monkeypatch.setattr("delaytasks.db.claims.dump_json", note)
    error = ("时'\\" * 26_214)[:65_536]  # three bytes of UTF-8, and quoted by two layers
    assert len(world.worker().end(world.claim(*made), "fail", error=error)) == 30
    assert len(sizes) >= 2
    assert max(sizes) < 2_500_000
    assert {world.read(one).error for one in made[::10]} == {error}


def test_a_claim_returns_the_new_values_of_its_rows(world: World) -> None:
    odd: list[dict[str, Any]] = [{}, {"version": 2**62, "runs": 2**31 - 1}, {"key": "k", "runs": 3}]
    named = [world.put(**fields) for fields in odd]
    claimed = [*world.claim(*named)]
    due = [world.put(**fields) for fields in odd]
    claimed += world.claim_due(most=10)
    assert {one.id for one in claimed} == {one.id for one in named + due}
    read_later = ("update_time", "execution_time", "lease_until", "worker", "ip")
    for one in claimed:
        unread = {name: getattr(one, name) for name in read_later}
        assert replace(world.read(one), **unread) == one


@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "behind_a_pooler"])
@pytest.mark.parametrize("versions", [(4, 4, 4, 4), (4, 0, 7, 4)], ids=["one_version", "several"])
def test_rows_with_the_same_end_are_matched_by_version_and_keep_their_start_times(
    world: World, versions: Sequence[int], prepares: bool
) -> None:
    if not prepares:
        world.deny("prepare")
    now, worker = world.now(), world.worker()
    made = [world.put(version=version) for version in versions]
    stale = replace(world.put(version=9), version=4)
    theirs = world.put(Status.RUNNING, version=9)
    # Each claim gives its rows a version of its own.
    chunks = [made] if len({*versions}) == 1 else [[row] for row in made]
    # Two messages name the same rows.
    claimed = [one for chunk in chunks for one in worker.claim(*chunk, *chunk, stale)]
    assert {one.id for one in claimed} == {one.id for one in made}
    begins = {one.id: now + timedelta(hours=n + 1) for n, one in enumerate(made[:-1])}
    # The clock of the process is behind, and the row keeps the time of its claim.
    before = now - timedelta(hours=1)
    ends = [Settlement(one, "succeed", begins.get(one.id, before)) for one in claimed]
    ends.append(Settlement(replace(claimed[0], id=theirs.id), "succeed", now))
    assert worker.settle(ends) == {one.id for one in made}
    fences = {one.id: one.version for one in claimed}
    done = [world.read(one) for one in made]
    assert {(row.status, row.version - fences[row.id]) for row in done} == {(Status.DONE, 1)}
    assert {row.id: row.execution_time for row in done[:-1]} == begins
    assert done[-1].execution_time >= now  # type: ignore[operator]
    assert world.statuses([theirs, stale]) == ["RUNNING", "NOT_COMPLETE"]


@pytest.mark.parametrize(("end", "max_lost_leases"), [("give_back", 5), ("fail", 1)])
def test_no_worker_settles_without_its_lease(world: World, end: Any, max_lost_leases: int) -> None:
    """Its end must not be mistaken for a recovery that leaves the same status."""
    made = world.schedule(key="k")
    [old] = world.claim(made)
    world.lapse(made, max_lost_leases=max_lost_leases)
    assert world.read(made).status is MOVES[end].target
    assert len(world.rows(select(world.table("keys")))) == (end == "give_back"), "its key is free"
    assert not world.settle(old, end, error="mine")
    if max_lost_leases > 1:
        [new] = world.worker("worker-2").claim_alone(world.read(made))
        for move in ("succeed", "fail", "give_back"):
            assert not world.settle(old, move)
        found = world.read(made)
        expected = (Status.RUNNING, new.version, "worker-2")
        assert (found.status, found.version, found.worker) == expected


def test_settling_again_after_a_lost_answer_is_accepted_and_changes_nothing(world: World) -> None:
    worker, [one, two] = world.worker(), [*world.claim(world.put(), world.put())]
    assert world.settle(one)
    again = [Settlement(one, "succeed"), Settlement(two, "fail", error="x")]
    assert worker.settle(again) == {one.id, two.id}
    assert world.read(one).version == one.version + 1


# -- rows that failed because their workers died --------------------------------------------------


def test_a_recovery_names_the_time_limit_that_was_over(world: World) -> None:
    running: Any = {"status": Status.RUNNING, "runs": 1}
    last, slow = (world.put(tag="slow", lapses=lapses, **running) for lapses in (2, 0))
    others = world.put(tag="slower", **running), world.put(tag="free", lapses=2, **running)
    for row in (last, slow, *others):
        world.change(row, execution_time=world.now() - timedelta(seconds=7))
    found = world.store.leases.recover_dead(["worker-1"], 3, {"slow": 5.0, "slower": 8.0})
    timed_out = [(last.id, "slow"), (slow.id, "slow")]
    assert (found.total, sorted(found.timed_out)) == (4, timed_out)
    for row in (last, slow, *others):
        [attempt] = world.attempts(row)
        is_over = str(attempt.error).endswith("; its time limit of 5 s was over")
        assert is_over is (row in (last, slow))
    assert {task.id for task in found.worker_lost} == {last.id, others[1].id}
    waits = world.read(slow)
    assert (waits.status, waits.lapses, waits.version) == (Status.NOT_COMPLETE, 1, 1)
