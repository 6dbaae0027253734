"""A sweep arms the rows that are due within the horizon."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks import Status
from delaytasks.core.clock import Clock
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.filters import AuditEntry
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Policies
from tests.recording import CrashError, RecordingTimer
from tests.unit.sweeper.sweeper_harness import Make, SweeperHarness


def test_near_rows_are_armed_in_the_order_of_their_times_and_once(field: SweeperHarness) -> None:
    late, far = field.row(-5), field.row(60)
    ids = [field.row(in_s) for in_s in (20, 5, 29, 10)]
    others = [field.row(5, status) for status in Status if status is not Status.NOT_COMPLETE]
    assert field.sweep() == [ids[1], ids[3], ids[0], ids[2]]
    assert field.sweep() == [], "what was armed is not armed again"
    assert field.count("sweep.armed") == 4
    assert {late, far, *others}.isdisjoint(field.timer.ids)
    assert field.timer.armed[0].queue == "default"


def test_each_sweep_arms_rows_that_came_within_the_horizon_since_the_last_one(
    field: SweeperHarness,
) -> None:
    field.sweep()
    field.near_until(10)
    soon, new = field.row(9), field.row(11)
    assert field.sweep() == [new], "the producer armed the other one"
    assert soon not in field.timer.ids
    assert abs((field.armed_until() - field.clock.now()).total_seconds() - 30) < 1


def test_a_long_pause_leaves_no_gap(field: SweeperHarness) -> None:
    field.sweep()
    field.near_until(-100)
    late, near = field.row(-50), field.row(25)
    assert field.sweep() == [near]
    assert late not in field.timer.ids, "it is overdue, and drained"


class CrashingTimer(RecordingTimer):
    """Raise CrashError after `calls` calls, and keep the entries that were armed before."""

    def __init__(self, calls: int, armed: list[Entry]) -> None:
        super().__init__()
        self._calls = calls
        self.armed = armed

    def arm(self, entries: Iterable[Entry]) -> bool:
        answer = super().arm(entries)
        self._calls -= 1
        if self._calls == 0:
            raise CrashError
        return answer


def test_a_crash_between_arming_and_marking_costs_duplicates_and_makes_no_gap(
    field: SweeperHarness,
) -> None:
    ids = field.rows(19.9 + n / 250 for n in range(2500))
    crashing = CrashingTimer(2, field.timer.armed)
    field.let_pass()
    with pytest.raises(CrashError):
        field.sweeper(crashing).sweep()
    armed = len(field.timer.armed)
    assert 0 < armed < len(ids)
    assert field.sweep() == ids, "all of them again, also those after the crash"
    assert len(field.timer.armed) == armed + len(ids)


def test_while_the_broker_is_unavailable_nothing_counts_as_armed(field: SweeperHarness) -> None:
    ids = [field.row(5), field.row(10)]
    field.timer.is_up = False
    field.sweep()
    field.sweep()
    assert field.armed_until() <= field.clock.now()
    assert field.count("sweep.armed") == 0
    field.timer.is_up = True
    assert field.sweep() == ids


class RefusingTimer(RecordingTimer):
    """Simulate a broker that is available and refuses one queue."""

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        super().arm(entry for entry in entries if entry.queue != "bad")
        return all(entry.queue != "bad" for entry in entries)


def test_a_refused_queue_does_not_keep_other_rows_from_being_armed(field: SweeperHarness) -> None:
    refused = field.rows((20 + n / 1000 for n in range(1200)), queue="bad")
    ids = field.rows(25 + n / 1000 for n in range(1200))
    refusing = RefusingTimer()
    field.sweep(timer=refusing)
    assert refusing.ids == ids
    field.sweep(timer=refusing)
    assert refusing.ids == ids, "and not again at each sweep"
    assert set(refused).isdisjoint(refusing.ids), "they are drained when they are overdue"


def test_a_clock_without_a_measurement_arms_nothing_and_marks_nothing(
    field: SweeperHarness,
) -> None:
    id = field.row(5)
    known = field.clock

    def fail(insists: bool) -> datetime:
        raise StoreUnavailableError("the database can not be reached")

    field.clock = Clock(fail)
    assert field.sweeper().sweep()
    assert field.armed_until() <= known.now()
    field.clock = known
    assert field.sweep() == [id]


@pytest.mark.parametrize(
    "stage", ["expire", "due_between", "recover", "levels_of", "purge", "purge_audit"]
)
def test_a_stage_that_fails_does_not_prevent_the_other_stages(
    make: Make, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = make(purge_after_s=3600)
    long_ago = field.clock.now() - timedelta(hours=2)
    near = field.row(5)
    lapsed = field.row(-5, Status.RUNNING, lease_until=field.clock.now() - timedelta(seconds=1))
    old = field.row(-7200, Status.DONE, update_time=long_ago)
    field.store.bulk.begin(
        AuditEntry(1, "cancel", {}, "ann", "done", long_ago, long_ago, long_ago, 0, 0, 0)
    )
    field.row(-60)
    field.serve("w1", "default")
    field.serve("dead", "default")
    field.silence("dead")

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a row can not be read")

    monkeypatch.setattr(
        field.store.workers if stage == "expire" else field.store.sweeps, stage, fail
    )
    field.sweep()
    done = {
        "expire": field.count("worker.lost") == 1,
        "due_between": field.timer.ids == [near],
        "recover": field.status(lapsed) is Status.NOT_COMPLETE,
        "levels_of": len(field.timer.requested_drains) == 1,
        "purge": field.store.tasks.get(old) is None,
        "purge_audit": field.store.bulk.audit(10) == [],
    }
    assert [name for name, is_done in done.items() if not is_done] == [stage]
    [failure] = [fields for name, fields in field.told if name == "loop.failed"]
    names = {
        "expire": "workers",
        "due_between": "arm",
        "recover": "abandoned",
        "levels_of": "overdue",
        "purge": "purge",
    }
    names["purge_audit"] = "audit"
    assert (failure["loop"], failure["stage"]) == ("sweep", names[stage])
    assert failure["error"] == "ValueError: a row can not be read"


def test_drain_messages_that_could_not_be_sent_are_not_reported(field: SweeperHarness) -> None:
    field.row(-60)
    field.serve("w1", "default")
    field.timer.is_up = False
    field.sweep()
    assert field.count("sweep.drain") == 0
    field.timer.is_up = True
    field.sweep()
    assert field.count("sweep.drain") == 1


def test_if_the_broker_takes_no_messages_the_sweeping_worker_drains_its_own_queues(
    field: SweeperHarness,
) -> None:
    for queue in ("default", "mail"):
        field.row(-60, queue=queue)
        field.serve(f"w-{queue}", queue)
    sweeper, here = field.sweeper(), list[tuple[str, Sequence[int]]]()

    def drain(queue: str, priorities: Sequence[int]) -> bool:
        here.append((queue, priorities))
        return queue == "default"

    for is_up in (True, False):
        field.timer.is_up = is_up
        field.let_pass()
        assert sweeper.sweep(start_drain=drain)
    assert here == [("default", [0]), ("mail", [0])]
    assert field.count("sweep.local_drain") == 1


def test_a_sweep_that_could_not_read_the_policies_releases_nothing(field: SweeperHarness) -> None:
    """Without policies, no row seems to be paused."""
    done: list[str] = []
    is_away = True

    def policies() -> Policies:
        if is_away:
            raise StoreUnavailableError("away")
        return Policies(())

    holding: Any = SimpleNamespace(
        cache=SimpleNamespace(refresh=policies),
        walk=lambda *_: done.append("walk"),
        hold_near=lambda *_: None,
    )
    sweeper = field.sweeper()
    sweeper._pauses = holding
    field.let_pass()
    assert sweeper.sweep()
    assert done == []
    is_away = False
    field.let_pass()
    assert sweeper.sweep()
    assert done == ["walk"]


def test_a_late_row_is_drained_although_the_broker_refuses_near_rows(
    field: SweeperHarness,
) -> None:
    field.row(5)
    field.row(-60)
    field.serve("w1", "default")
    field.timer.is_up = False
    field.sweep()
    assert [queue for queue, _, _ in field.timer.requested_drains] == ["default"]


def test_without_a_horizon_nothing_is_armed_by_sweeps(make: Make) -> None:
    field = make(horizon_s=None)
    field.row(5)
    assert field.sweep() == []
