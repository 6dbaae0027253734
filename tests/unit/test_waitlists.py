"""Waitlists of limited tags: rates, capacity, and the waitlist that a free process visits."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaytasks.core.policies import WAITLIST_RECHECK_S, WaitlistState
from delaytasks.limits import tracked_waitlists
from delaytasks.limits.admission import UNLIMITED, Capacity, StartPace
from delaytasks.limits.tracked_waitlists import TrackedWaitlists, WaitlistName, WaitlistPhase
from tests.world.recording import ManualMonotonic

MAIL, SLOW = ("default", "mail"), ("slow", "mail")


@given(st.integers(1, 300), st.sampled_from([0.5, 1.0, 60.0]), st.integers(0, 2**32))
def test_no_period_has_more_starts_than_its_rate(rate: int, period_s: float, seed: int) -> None:
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
    shares = [Capacity(slots=places).share(100) for places in (0, 1, 2, 10, 1000)]
    assert shares == [0, 1, 1, 1, 100]
    assert Capacity().share(7) == 7
    capacity = Capacity(slots=8, key_limit=3, running={"a": 3, "b": 1, "": 5})
    assert [capacity.for_key(key) for key in ("a", "b", "c", "")] == [0, 2, 3, UNLIMITED]
    assert capacity.full_keys == ["a"]
    capacity.limit_rate(StartPace(1.0, 2), 0.5)
    assert (capacity.free, capacity.share(100), capacity.recheck_s) == (1, 1, WAITLIST_RECHECK_S)
    capacity.limit_rate(StartPace(1.0, 2), 1.25)
    assert (capacity.free, capacity.share(100), capacity.recheck_s) == (0, 0, 0.25)


CLOCKED = [tracked_waitlists]


class Tracked(TrackedWaitlists):
    """The waitlists that a main process tracks, by a clock that stands still."""

    def __init__(self, time: ManualMonotonic) -> None:
        super().__init__()
        self.time = time

    def sees(self, free: int | None = None, recheck_s: float = WAITLIST_RECHECK_S) -> float | None:
        """A claim, or a visit to another waitlist, reports this number of free slots."""
        return self.update([WaitlistState(*MAIL, free, recheck_s)])

    def ends(self, free: int, is_probe: bool = False) -> float | None:
        """A process returns from the waitlist and reports this number of free slots."""
        return self.update([WaitlistState(*MAIL, free)], MAIL, is_probe)

    def visits(self, count: int = 1, after_s: float = 0) -> list[WaitlistName | None]:
        """Return the waitlists to which as many free processes are sent."""
        self.time.at += after_s
        visits = [self.next_visit() for _ in range(count)]
        return [None if visit is None else visit.waitlist for visit in visits]

    def phase(self) -> WaitlistPhase:
        """Return the phase of the only waitlist, as far as it is visible from outside."""
        if not self:
            return WaitlistPhase.EMPTY
        if not self.is_active:
            return WaitlistPhase.FULL
        visit = self.next_visit()
        return WaitlistPhase.SERVED if visit is None or visit.is_probe else WaitlistPhase.OPEN


@pytest.fixture
def found(time: ManualMonotonic) -> Tracked:
    return Tracked(time)


#: The steps by which a waitlist comes to a phase: `sees 2` and `ends 2` report 2 free slots, `sent`
#: sends a process, `later` sends one a second later, and `probe` and `empty` end a visit.
PHASES = {
    "": "EMPTY", "sees None": "OPEN", "sees 1": "OPEN", "sees 0": "FULL",
    "sees 1, sent": "SERVED", "sees 2, sent": "OPEN", "sees 1, sees 0": "FULL",
    "sees 2, sent, sees 0": "SERVED", "sees 0, later": "SERVED", "sees 0, sees 1": "OPEN",
    "sees 1, sent, later": "SERVED", "sees 1, sent, later, probe 2": "OPEN",
    "sees 1, sent, later, probe 1": "SERVED", "sees 1, sent, ends 1": "OPEN",
    "sees 1, sent, ends 0": "FULL", "sees 2, sent, sent, ends 0": "SERVED",
    "sees 1, sent, empty": "EMPTY",
}  # fmt: skip


@pytest.mark.parametrize(("steps", "phase"), PHASES.items())
def test_a_waitlist_has_the_phases_of_its_table(found: Tracked, steps: str, phase: str) -> None:
    for step in steps.split(", ") if steps else ():
        name, _, free = step.partition(" ")
        if name in ("sent", "later"):
            assert found.visits(1, WAITLIST_RECHECK_S * (name == "later")) == [MAIL]
        elif name == "sees":
            found.sees(None if free == "None" else int(free))
        elif name == "empty":
            found.update([], MAIL)
        else:
            found.ends(int(free), is_probe=name == "probe")
    assert found.phase() is WaitlistPhase[phase]


def test_as_many_processes_visit_a_waitlist_as_would_find_a_task(found: Tracked) -> None:
    assert found.visits() == [None]
    assert found.update([WaitlistState(*MAIL, 2), WaitlistState(*SLOW, 1)]) == WAITLIST_RECHECK_S
    assert Counter(found.visits(4)) == {MAIL: 2, SLOW: 1, None: 1}


def test_a_full_waitlist_is_checked_again_later(found: Tracked) -> None:
    assert found.sees(0) == WAITLIST_RECHECK_S
    assert found.sees(0) is None, "somebody will look already"
    assert found.sees(0, 0.1) == 0.1
    assert found.visits() == [None]
    assert found.visits(2, after_s=0.2) == [MAIL, None]
    waits = []
    for _ in range(8):
        waits.append(found.ends(0))
        assert found.visits() == [None]
        assert found.visits(1, WAITLIST_RECHECK_S) == [MAIL]
    # Soon, then less and less often.
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, WAITLIST_RECHECK_S, WAITLIST_RECHECK_S]
    found.ends(1)
    assert found.visits() == [MAIL]
    assert found.ends(0) == 0.02


def test_while_processes_run_long_tasks_more_and_more_others_probe(found: Tracked) -> None:
    """A limit may have been raised, and a process that runs a long task reports nothing."""
    found.sees(1)
    assert found.next_visit() == tracked_waitlists.WaitlistVisit(MAIL, is_probe=False)
    sent = []
    for _ in range(5):
        assert found.next_check_due_in_s == pytest.approx(tracked_waitlists.PROBE_S)
        found.time.at += tracked_waitlists.PROBE_S
        turns = [found.next_visit() for _ in range(40)]
        assert set(turns) <= {tracked_waitlists.WaitlistVisit(MAIL, is_probe=True), None}
        sent.append(len(turns) - turns.count(None))
    assert sent == [2, 4, 8, 16, 32]


def test_probes_without_success_become_rarer_down_to_one_a_second(found: Tracked) -> None:
    found.sees(1)
    assert found.visits() == [MAIL]
    assert found.visits(3, tracked_waitlists.PROBE_S) == [MAIL, MAIL, None]
    found.ends(0, is_probe=True)
    waits = []
    for _ in range(5):
        waits.append(found.ends(0, is_probe=True))
        assert found.visits() == [None]
        assert found.visits(2, waits[-1] or 0) == [MAIL, None]
    assert waits == [0.4, 0.8, WAITLIST_RECHECK_S, WAITLIST_RECHECK_S, WAITLIST_RECHECK_S]


def test_a_probe_that_finds_many_free_slots_calls_as_many_processes(found: Tracked) -> None:
    found.sees(1)
    assert [found.visits(), found.visits(1, tracked_waitlists.PROBE_S)] == [[MAIL], [MAIL]]
    found.ends(3, is_probe=True)
    no_probe = tracked_waitlists.WaitlistVisit(MAIL, is_probe=False)
    assert [found.next_visit() for _ in range(3)] == [no_probe, no_probe, None]


def test_a_probe_that_took_the_last_slot_briefly_calls_no_process(found: Tracked) -> None:
    """One process is enough for quick rows of a tag with a rate. It waits for the next start."""
    found.sees(1)
    assert [found.visits(), found.visits(1, tracked_waitlists.PROBE_S)] == [[MAIL], [MAIL]]
    assert found.ends(1, is_probe=True) == tracked_waitlists.PROBE_S
    assert found.visits() == [None]


def test_a_waitlist_that_a_chunk_reports_is_visited_unless_it_is_known(found: Tracked) -> None:
    assert found.sees() == WAITLIST_RECHECK_S
    assert found.visits() == [MAIL]
    assert found.sees() is None
    assert found.visits() == [None], "somebody is at it"
    waits = []
    for _ in range(3):
        waits.append(found.ends(0))
        assert found.sees() is None
        assert found.visits() == [None], "somebody will look"
        assert found.visits(1, WAITLIST_RECHECK_S) == [MAIL]
    assert waits == [0.02, 0.04, 0.08], "less and less often"


def test_a_waitlist_whose_process_failed_is_visited_again(found: Tracked) -> None:
    found.sees(1)
    assert found.visits() == [MAIL]
    assert found.visit_failed(MAIL) == 0.02
    assert found.visits(1, WAITLIST_RECHECK_S) == [MAIL]


def test_thousands_of_waitlists_are_checked_more_rarely_and_never_all_together(
    found: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_waitlists, "MAX_TRACKED_WAITLISTS", 30)
    monkeypatch.setattr(tracked_waitlists, "MAX_CHECKS_PER_S", 6)
    met, looks = set[WaitlistName](), 0
    found.update([WaitlistState("default", f"t{number:05}", 0) for number in range(90)])
    for _ in range(100):
        found.time.at += WAITLIST_RECHECK_S / 2
        while (key := found.visits()[0]) is not None:
            met.add(key)
            looks += 1
            found.update([WaitlistState(*key, 0)], key)
    assert len(met) == 30, "the sweep comes by the others"
    assert looks <= 6 * 50 + 5 * 30, "six a second, and the first ones sooner"
