"""Waitlists of limited tags: rates, capacity, and the waitlist that a free process visits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaytasks.core.policies import WAITLIST_RECHECK_S, WaitlistState
from delaytasks.limits import tracked_waitlists
from delaytasks.limits.admission import UNLIMITED, Capacity, StartPace
from delaytasks.limits.tracked_waitlists import (
    PROBE_S,
    TrackedWaitlists,
    WaitlistName,
    WaitlistPhase,
    WaitlistVisit,
)
from tests.recording import ManualMonotonic

MAIL, SLOW = ("default", "mail"), ("slow", "mail")


@given(st.integers(1, 300), st.sampled_from([0.5, 1.0, 60.0]), st.integers(0, 2**32))
def test_no_period_has_more_starts_than_the_rate_allows(
    rate: int, period_s: float, seed: int
) -> None:
    """The limit holds at any time of a request and for any number of starts."""
    pace, chance = StartPace.of(rate, period_s), random.Random(seed)
    now, next_start, starts = 0.0, 0.0, list[float]()
    while now < 2.5 * period_s:
        now += chance.choice([pace.interval_s / 7, pace.interval_s, chance.random() * period_s / 3])
        ahead_s = max(next_start - now, 0.0)
        taken = chance.randint(0, pace.starts(ahead_s))
        starts += [now] * taken
        if taken:
            next_start = now + ahead_s + taken * pace.interval_s
    for since in starts:
        assert sum(since <= start < since + period_s for start in starts) <= rate


@pytest.mark.parametrize(("rate", "period_s"), [(100, 1.0), (5, 60.0), (1, 3600.0), (10_000, 1.0)])
def test_a_rate_is_reached_within_about_a_tenth(rate: int, period_s: float) -> None:
    pace = StartPace.of(rate, period_s)
    assert 0.86 * rate <= period_s / pace.interval_s <= rate
    assert pace.starts(0.0) == pace.burst >= 1
    assert pace.starts(pace.max_ahead_s) == 0
    assert pace.wait_s(0.0) == 0.0
    wait_s = pace.wait_s(pace.max_ahead_s)
    assert pace.starts(pace.max_ahead_s - wait_s) == 1
    assert pace.starts(pace.max_ahead_s - wait_s * 0.99) == 0


def test_one_process_takes_a_share_of_the_capacity() -> None:
    assert [Capacity(slots=places).share(100) for places in (0, 1, 2, 10, 1000)] == [
        0,
        1,
        1,
        1,
        100,
    ]
    assert Capacity().share(7) == 7
    capacity = Capacity(slots=8, key_limit=3, running={"a": 3, "b": 1, "": 5})
    assert (
        capacity.for_key("a"),
        capacity.for_key("b"),
        capacity.for_key("c"),
        capacity.for_key(""),
    ) == (0, 2, 3, UNLIMITED)
    assert capacity.full_keys == ["a"]
    capacity.limit_rate(StartPace(1.0, 2), 0.5)
    assert (capacity.free, capacity.share(100), capacity.recheck_s) == (1, 1, WAITLIST_RECHECK_S)
    capacity.limit_rate(StartPace(1.0, 2), 1.25)
    assert (capacity.free, capacity.share(100), capacity.recheck_s) == (0, 0, 0.25)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> ManualMonotonic:
    time = ManualMonotonic()
    monkeypatch.setattr(tracked_waitlists, "monotonic", time)
    return time


def visited(of: TrackedWaitlists) -> WaitlistName | None:
    """Return the waitlist to which a free process is sent."""
    visit = of.next_visit()
    return None if visit is None else visit.waitlist


def phase_of(found: TrackedWaitlists) -> WaitlistPhase:
    """Return the phase of the only waitlist, as far as it is visible from outside."""
    if not found:
        return WaitlistPhase.EMPTY
    if not found.is_active:
        return WaitlistPhase.FULL
    visit = found.next_visit()
    return WaitlistPhase.SERVED if visit is None or visit.is_probe else WaitlistPhase.OPEN


Step = Callable[[TrackedWaitlists, ManualMonotonic], object]


def seen(free: int | None) -> Step:
    """A claim, or a visit to another waitlist, reports this number of free slots."""
    return lambda found, time: found.update([WaitlistState(*MAIL, free)])


def ended(free: int, is_probe: bool = False) -> Step:
    """A process returns from the waitlist and reports this number of free slots."""
    return lambda found, time: found.update([WaitlistState(*MAIL, free)], MAIL, is_probe)


def sent(found: TrackedWaitlists, time: ManualMonotonic) -> None:
    assert visited(found) == MAIL


def sent_later(found: TrackedWaitlists, time: ManualMonotonic) -> None:
    time.at += WAITLIST_RECHECK_S
    assert visited(found) == MAIL


def ended_empty(found: TrackedWaitlists, time: ManualMonotonic) -> None:
    found.update([], MAIL)


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        ([], WaitlistPhase.EMPTY),
        ([seen(None)], WaitlistPhase.OPEN),
        ([seen(1)], WaitlistPhase.OPEN),
        ([seen(0)], WaitlistPhase.FULL),
        ([seen(1), sent], WaitlistPhase.SERVED),
        ([seen(2), sent], WaitlistPhase.OPEN),
        ([seen(1), seen(0)], WaitlistPhase.FULL),
        ([seen(2), sent, seen(0)], WaitlistPhase.SERVED),
        ([seen(0), sent_later], WaitlistPhase.SERVED),
        ([seen(0), seen(1)], WaitlistPhase.OPEN),
        ([seen(1), sent, sent_later], WaitlistPhase.SERVED),
        ([seen(1), sent, sent_later, ended(2, is_probe=True)], WaitlistPhase.OPEN),
        ([seen(1), sent, sent_later, ended(1, is_probe=True)], WaitlistPhase.SERVED),
        ([seen(1), sent, ended(1)], WaitlistPhase.OPEN),
        ([seen(1), sent, ended(0)], WaitlistPhase.FULL),
        ([seen(2), sent, sent, ended(0)], WaitlistPhase.SERVED),
        ([seen(1), sent, ended_empty], WaitlistPhase.EMPTY),
    ],
)
def test_a_waitlist_passes_through_the_phases_that_its_table_shows(
    time: ManualMonotonic, steps: Sequence[Step], phase: WaitlistPhase
) -> None:
    found = TrackedWaitlists()
    for step in steps:
        step(found, time)
    assert phase_of(found) is phase


def test_as_many_processes_visit_a_waitlist_as_would_find_a_task(time: ManualMonotonic) -> None:
    found = TrackedWaitlists()
    assert visited(found) is None
    assert found.update([WaitlistState(*MAIL, 2), WaitlistState(*SLOW, 1)]) == WAITLIST_RECHECK_S
    assert Counter([visited(found), visited(found), visited(found)]) == {MAIL: 2, SLOW: 1}
    assert visited(found) is None


def test_a_full_waitlist_is_checked_again_later(time: ManualMonotonic) -> None:
    found = TrackedWaitlists()
    assert found.update([WaitlistState(*MAIL, 0)]) == WAITLIST_RECHECK_S
    assert found.update([WaitlistState(*MAIL, 0)]) is None, "somebody will look already"
    assert found.update([WaitlistState(*MAIL, 0, 0.1)]) == 0.1
    assert visited(found) is None
    time.at += 0.2
    assert visited(found) == MAIL
    assert visited(found) is None
    waits = []
    for _ in range(8):
        waits.append(found.update([WaitlistState(*MAIL, 0)], MAIL))
        assert visited(found) is None
        time.at += WAITLIST_RECHECK_S
        assert visited(found) == MAIL
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, WAITLIST_RECHECK_S, WAITLIST_RECHECK_S], (
        "soon, then less and less often"
    )
    found.update([WaitlistState(*MAIL, 1)], MAIL)
    assert visited(found) == MAIL
    assert found.update([WaitlistState(*MAIL, 0)], MAIL) == 0.02


def test_while_processes_run_long_tasks_more_and_more_others_probe(time: ManualMonotonic) -> None:
    """A limit may have been raised, and a process that runs a long task reports nothing."""
    found = TrackedWaitlists()
    found.update([WaitlistState(*MAIL, 1)])
    assert found.next_visit() == WaitlistVisit(MAIL, is_probe=False)
    sent = []
    for _ in range(5):
        assert found.next_check_due_in_s == pytest.approx(PROBE_S)
        time.at += PROBE_S
        turns = [found.next_visit() for _ in range(40)]
        assert set(turns) <= {WaitlistVisit(MAIL, is_probe=True), None}
        sent.append(len(turns) - turns.count(None))
    assert sent == [2, 4, 8, 16, 32]


def test_probes_without_success_become_rarer_down_to_one_a_second(time: ManualMonotonic) -> None:
    found = TrackedWaitlists()
    found.update([WaitlistState(*MAIL, 1)])
    assert visited(found) == MAIL
    time.at += PROBE_S
    assert [visited(found), visited(found), visited(found)] == [MAIL, MAIL, None]
    found.update([WaitlistState(*MAIL, 0)], MAIL, is_probe=True)
    waits = []
    for _ in range(5):
        waits.append(found.update([WaitlistState(*MAIL, 0)], MAIL, is_probe=True))
        assert visited(found) is None
        time.at += waits[-1] or 0
        assert [visited(found), visited(found)] == [MAIL, None]
    assert waits == [0.4, 0.8, WAITLIST_RECHECK_S, WAITLIST_RECHECK_S, WAITLIST_RECHECK_S]


def test_a_probe_that_finds_many_free_slots_calls_as_many_processes(time: ManualMonotonic) -> None:
    found = TrackedWaitlists()
    found.update([WaitlistState(*MAIL, 1)])
    assert visited(found) == MAIL
    time.at += PROBE_S
    assert visited(found) == MAIL
    found.update([WaitlistState(*MAIL, 3)], MAIL, is_probe=True)
    assert [found.next_visit(), found.next_visit(), found.next_visit()] == [
        WaitlistVisit(MAIL, False),
        WaitlistVisit(MAIL, False),
        None,
    ]


def test_a_probe_that_took_the_last_slot_briefly_calls_no_process(time: ManualMonotonic) -> None:
    """One process is enough for quick rows of a tag with a rate. It waits for the next start."""
    found = TrackedWaitlists()
    found.update([WaitlistState(*MAIL, 1)])
    assert visited(found) == MAIL
    time.at += PROBE_S
    assert visited(found) == MAIL
    assert found.update([WaitlistState(*MAIL, 1)], MAIL, is_probe=True) == PROBE_S
    assert visited(found) is None


def test_a_waitlist_that_a_chunk_reports_is_visited_unless_it_is_known(
    time: ManualMonotonic,
) -> None:
    found, seen = TrackedWaitlists(), [WaitlistState(*MAIL, None)]
    assert found.update(seen) == WAITLIST_RECHECK_S
    assert visited(found) == MAIL
    assert found.update(seen) is None
    assert visited(found) is None, "somebody is at it"
    waits = []
    for _ in range(3):
        waits.append(found.update([WaitlistState(*MAIL, 0)], MAIL))
        assert found.update(seen) is None
        assert visited(found) is None, "somebody will look"
        time.at += WAITLIST_RECHECK_S
        assert visited(found) == MAIL
    assert waits == [0.02, 0.04, 0.08], "less and less often"


def test_a_waitlist_whose_process_failed_is_visited_again(time: ManualMonotonic) -> None:
    found = TrackedWaitlists()
    found.update([WaitlistState(*MAIL)])
    assert visited(found) == MAIL
    assert found.visit_failed(MAIL) == 0.02
    time.at += WAITLIST_RECHECK_S
    assert visited(found) == MAIL


def test_thousands_of_waitlists_are_checked_more_rarely_and_never_all_together(
    time: ManualMonotonic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_waitlists, "MAX_TRACKED_WAITLISTS", 30)
    monkeypatch.setattr(tracked_waitlists, "MAX_CHECKS_PER_S", 6)
    found, met, looks = TrackedWaitlists(), set[WaitlistName](), 0
    found.update([WaitlistState("default", f"t{number:05}", 0) for number in range(90)])
    for _ in range(100):
        time.at += WAITLIST_RECHECK_S / 2
        while (key := visited(found)) is not None:
            met.add(key)
            looks += 1
            found.update([WaitlistState(*key, 0)], key)
    assert len(met) == 30, "the sweep comes by the others"
    assert looks <= 6 * 50 + 5 * 30, "six a second, and the first ones sooner"
