"""The simulation of a forecast: totals are kept, and more processes never start a task later."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from delaytasks.forecast.simulation import Arrival, Served, Service, load_of, simulate

#: Rounding errors of a simulation that sums up some thousand numbers.
CLOSE_S = 1e-5
FREE, SLOW, LIMITED, NARROW = "free", "slow", "limited", "narrow"
SERVICES = {
    FREE: Service(0.05),
    SLOW: Service(1.5),
    LIMITED: Service(0.05, most_per_s=30),
    NARROW: Service(2.0, most_per_s=0.25),
}

arrivals = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 300).map(float),
        st.sampled_from(sorted(SERVICES)),
        st.integers(1, 2000) | st.floats(0.02, 5),
    ),
    max_size=25,
).map(lambda found: sorted(found, key=lambda each: each.at_s))
unlimited = arrivals.map(lambda found: [each for each in found if each.tag in (FREE, SLOW)])
processes = st.floats(0.5, 64)


def served(found: list[Arrival], number: float) -> list[Served]:
    """Return when the tasks of each arrival start."""
    load = load_of(found, SERVICES)
    times = simulate(load, number)
    return [times[index] for index in load.batch_of]


@settings(max_examples=150, deadline=None)
@given(arrivals, processes, processes)
def test_more_processes_never_start_a_task_later(
    found: list[Arrival], some: float, others: float
) -> None:
    few, many = sorted((some, others))
    slow, fast = served(found, few), served(found, many)
    for before, after in zip(slow, fast, strict=True):
        assert after.first_s <= before.first_s + CLOSE_S
        assert after.last_s <= before.last_s + CLOSE_S


@settings(max_examples=150, deadline=None)
@given(arrivals, processes)
def test_no_task_starts_early_and_the_order_of_a_tag_is_kept(
    found: list[Arrival], number: float
) -> None:
    last = dict.fromkeys(SERVICES, 0.0)
    for arrival, times in zip(found, served(found, number), strict=True):
        assert arrival.at_s <= times.first_s <= times.last_s < math.inf
        assert times.last_s >= last[arrival.tag] - CLOSE_S
        last[arrival.tag] = times.last_s


@settings(max_examples=150, deadline=None)
@given(unlimited, processes)
def test_without_limits_the_processes_do_all_the_work_and_are_never_idle(
    found: list[Arrival], number: float
) -> None:
    """Compare with the formula of a single waiting line, in which all work is done in order."""
    free_s = 0.0
    times = sorted({each.at_s for each in found})
    expected = {}
    for at in times:
        here = [each for each in found if each.at_s == at]
        work = sum(each.tasks * SERVICES[each.tag].seconds for each in here)
        tasks = sum(each.tasks for each in here)
        begins = max(free_s, at)
        expected[at] = begins + (work - work / max(tasks, 1)) / number
        free_s = begins + work / number
    # An order that comes much later lets the general rules compute the same.
    later = [*found, Arrival(1e6, LIMITED, 1)]
    more = served(later, number)[:-1]
    for arrival, one, other in zip(found, served(found, number), more, strict=True):
        assert math.isclose(one.last_s, expected[arrival.at_s], abs_tol=CLOSE_S)
        assert math.isclose(other.last_s, one.last_s, abs_tol=CLOSE_S)
        assert math.isclose(other.first_s, one.first_s, abs_tol=CLOSE_S)


@settings(max_examples=100, deadline=None)
@given(arrivals, processes)
def test_a_limited_tag_never_starts_more_than_its_limit_allows(
    found: list[Arrival], number: float
) -> None:
    all_times = served(found, number)
    for tag in (LIMITED, NARROW):
        most = SERVICES[tag].most_per_s
        assert most is not None
        mine = [(a, s) for a, s in zip(found, all_times, strict=True) if a.tag == tag]
        if mine:
            tasks = sum(arrival.tasks for arrival, _ in mine)
            took_s = max(s.last_s for _, s in mine) - min(a.at_s for a, _ in mine)
            # The last task counts when it starts, so one task more may have been started.
            assert tasks <= took_s * most + 1 + CLOSE_S


@given(processes)
def test_an_empty_forecast_is_on_time(number: float) -> None:
    assert served([], number) == []


@given(st.sampled_from(sorted(SERVICES)), processes)
def test_a_single_task_is_on_time(tag: str, number: float) -> None:
    [times] = served([Arrival(5.0, tag, 1)], number)
    assert times == (5.0, 5.0)


def test_without_processes_nothing_starts() -> None:
    [times] = served([Arrival(5.0, FREE, 1)], 0)
    assert times == (math.inf, math.inf)


def test_a_peak_takes_as_long_as_its_work() -> None:
    """40,000 tasks of 50 ms are 2,000 s of work, which 2 processes do in 1,000 s."""
    peak = [Arrival(60.0, FREE, 40_000)]
    [two], [four] = served(peak, 2), served(peak, 4)
    assert math.isclose(two.last_s - 60, 1000, rel_tol=1e-3)
    assert math.isclose(four.last_s - 60, 500, rel_tol=1e-3)


def test_a_limited_tag_uses_its_limit_and_leaves_the_rest_to_others() -> None:
    """30 limited tasks per second occupy 1.5 of 4 processes; the others do 50 tasks per second."""
    found = [Arrival(0.0, LIMITED, 3000), Arrival(0.0, FREE, 5000)]
    limited, free = served(found, 4)
    assert math.isclose(limited.last_s, 100, rel_tol=1e-2)
    assert math.isclose(free.last_s, 100, rel_tol=1e-2)
    [alone] = served(found[1:], 4)
    assert math.isclose(alone.last_s, 62.5, rel_tol=1e-2)
