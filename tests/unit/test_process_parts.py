"""Parts of a process whose effects are seen only under load, or after a fork."""

from __future__ import annotations

from math import inf

from delaytasks.db.sweep_queries import SweepQueries
from delaytasks.model.clock import monotonic
from delaytasks.model.inputs import MAX_SLOTS
from delaytasks.run.calls import ThreadSlots, WorkerMemory
from tests.waiting import in_child
from tests.world import World


def test_all_tags_together_have_at_most_max_slots_thread_slots() -> None:
    slots = ThreadSlots()
    assert all(slots.take(tag, MAX_SLOTS, 0) for tag in "ab" for _ in range(MAX_SLOTS // 2))
    assert not slots.take("c", 5, monotonic() + 0.01)
    assert slots.free("c", 5) == 0
    slots.give_back("a")
    assert slots.take("c", 5, 0)


def test_children_see_the_renewals_that_the_main_process_records() -> None:
    memory = WorkerMemory.shared()

    def renewal() -> tuple[float, float, float]:
        return memory.asked_at, memory.lost_if_claimed_before, memory.lost_at

    assert renewal() == (0, 0, inf)
    memory.record_renewal(asked_at=61.5, answered_at=61.5, lease_s=60)

    def see_and_record() -> bool:
        is_seen = renewal() == (61.5, 1.5, inf)
        memory.record_renewal(asked_at=62.5, answered_at=62.5, lease_s=60)
        return is_seen

    assert in_child(see_and_record)
    assert renewal() == (62.5, 1.5, inf)
    for asked_at, answered_at, last in (
        (80, 81, (80, 1.5)),  # no lease ended between the two renewals
        (100, 141, (100, 81)),  # leases ended before the answer
    ):
        memory.record_renewal(asked_at=asked_at, answered_at=answered_at, lease_s=60)
        assert renewal() == (*last, inf)


def test_reports_after_a_silence_say_that_rows_were_released() -> None:
    memory, found = WorkerMemory.shared(), []
    for asked_at, answered_at in ((100, 101), (110, 114.5), (124, 125), (139.5, 140)):
        memory.record_report(asked_at, answered_at, lost_s=15)
        found.append((memory.lost_if_claimed_before, memory.lost_at))
    assert found == [(0, 115), (0, 125), (0, 139), (140, 154.5)]


def test_sweeps_without_a_broker_do_not_replace_sweeps_with_one(world: World) -> None:
    sweeps, store = world.store.sweeps, world.store
    direct = SweepQueries(store.database, store.schema, "direct", "")
    assert direct.begin_sweep(0, 1, 4) is not None
    assert sweeps.stale_sweep_partitions(1, 10) == [0]
    assert sweeps.begin_sweep(0, 1, 4) is not None
    assert [each.stale_sweep_partitions(1, 10) for each in (sweeps, direct)] == [[], []]
    assert direct.begin_sweep(0, 1, 4) is None
