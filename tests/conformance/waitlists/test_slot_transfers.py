"""A task that is settled passes its slot on, and an overdue backlog of a limited tag waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from delaytasks.core.interfaces import Level, Settlement
from delaytasks.core.policies import WaitlistState
from delaytasks.core.states import Status
from delaytasks.limits import admission as backlogs
from delaytasks.limits.admission import Admission
from tests.conformance.waitlists.limited_runner import LimitedRunnerHarness, touch_task


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
