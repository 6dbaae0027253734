"""Invalid delays and instants."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from decimal import Decimal
from typing import Any

import pytest

from delaytasks import NewTask, Status
from delaytasks.core import errors as e
from delaytasks.runtime import runtime_of
from tests.conformance.bad_input.refusing_client import UTC, RefusingClient, Unsayable

BAD_DELAYS = [
    -1,
    -0.001,
    float("nan"),
    float("inf"),
    float("-inf"),
    True,
    "5",
    1e20,
    10**400,
    -(10**5000),
    Decimal(5),
    timedelta(seconds=-1),
    timedelta.max,
    [5],
    Unsayable(),
]


def test_a_delay_that_is_no_delay_is_refused_by_every_call(place: RefusingClient) -> None:
    for delay in BAD_DELAYS:
        waits, failed = place.put(), place.put(Status.FAILED)
        with place.refuses(e.InvalidDelayError):
            place.delays.schedule_delay("mail", {}, delay)
        with place.refuses(e.InvalidDelayError):
            place.delays.schedule_many([("mail", {}, 5), ("mail", {}, delay)])  # type: ignore[list-item]
        with place.refuses(e.InvalidDelayError):
            place.delays.reschedule(waits, delay)
        with place.refuses(e.InvalidDelayError):
            place.delays.touch(waits, delay)
        with place.refuses(e.InvalidDelayError):
            place.delays.touch_many([waits], delay)  # type: ignore[call-overload]
        with place.refuses(e.InvalidDelayError):
            place.delays.rerun(failed, delay)


def test_a_spread_is_a_delay_and_not_zero(place: RefusingClient) -> None:
    waits = place.put(key="k")
    longest = place.delays.settings.max_delay_s
    for spread in [*BAD_DELAYS, 0, "0s", "soon"]:
        if spread == "5":
            continue  # the text "5" is a valid option: 5 seconds
        with place.refuses(e.InvalidDelayError):
            place.delays.schedule_delay("mail", {}, 5, spread=spread)
        with place.refuses(e.InvalidDelayError):
            place.delays.schedule_many([NewTask("mail", {}, 5, spread=spread)])
        with place.refuses(e.InvalidDelayError):
            place.delays.reschedule_many(spread=spread, tag="mail")
    with place.refuses(e.InvalidDelayError, "max_delay_s"):
        place.delays.schedule_delay("mail", {}, longest, spread=longest)
    with place.refuses(e.InvalidScheduleError, "spread"):
        place.delays.reschedule_many(60, spread=60, tag="mail")
    assert place.delays.get(waits).version == 0


def test_max_wait_is_a_delay_and_requires_a_replacement(place: RefusingClient) -> None:
    waits = place.put(key="k")
    at = datetime(2030, 1, 1, tzinfo=UTC)
    for max_wait in [*BAD_DELAYS, 0, "0s", "soon"]:
        if max_wait == "5":
            continue  # the text "5" is a valid option: 5 seconds
        for call in (
            lambda **more: place.delays.schedule_delay("mail", {}, 5, key="k", **more),
            lambda **more: place.delays.schedule_at("mail", {}, at, key="k", **more),
        ):
            with place.refuses(e.InvalidDelayError, "soon" if max_wait == "soon" else "max_wait"):
                call(on_conflict="replace", max_wait=max_wait)
        with place.refuses(e.InvalidDelayError):
            place.delays.schedule_many(
                [NewTask("mail", {}, 5), NewTask("mail", {}, 5, key="k", max_wait=max_wait)],
                on_conflict="replace",
            )
    for options in (
        {},
        {"key": "k"},
        {"key": "k", "on_conflict": "keep"},
        {"on_conflict": "replace"},
    ):
        with place.refuses(e.InvalidScheduleError, "max_wait", "key", "replace"):
            place.delays.schedule_delay("mail", {}, 5, max_wait=30, **options)
    with place.refuses(e.InvalidScheduleError):
        place.delays.schedule_many([NewTask("mail", {}, 5, max_wait=30)], on_conflict="replace")
    assert place.delays.get(waits).version == 0


def test_a_delay_above_the_setting_is_refused_and_one_at_it_is_not(
    make: Callable[..., RefusingClient],
) -> None:
    place = make(max_delay_s=100)
    place.delays.schedule_delay("mail", {}, 100)
    with place.refuses(e.InvalidDelayError, "100 s (setting max_delay_s)"):
        place.delays.schedule_delay("mail", {}, 100.001)
    with place.refuses(e.InvalidDelayError):
        place.delays.schedule_at("mail", {}, datetime.max.replace(tzinfo=UTC))


def test_a_datetime_without_a_zone_is_refused_by_every_call(place: RefusingClient) -> None:
    waits, naive = place.put(), datetime(2030, 1, 1)
    with place.refuses(e.NaiveDatetimeError, "2030"):
        place.delays.schedule_at("mail", {}, naive)
    with place.refuses(e.NaiveDatetimeError):
        place.delays.schedule_many([("mail", {}, naive)])
    with place.refuses(e.NaiveDatetimeError):
        place.delays.reschedule(waits, at=naive)
    for where in ("since", "until"):
        with place.refuses(e.NaiveDatetimeError):
            place.delays.find(**{where: naive})


def test_an_instant_that_is_no_datetime_is_refused(place: RefusingClient) -> None:
    for when in ["2030-01-01T00:00:00Z", 1893456000, None, object()]:
        with place.refuses(e.InvalidScheduleError):
            place.delays.schedule_at("mail", {}, when)


class FarEast(tzinfo):
    def utcoffset(self, _: Any) -> timedelta:
        return timedelta(hours=14)


def test_an_instant_outside_of_the_range_of_utc_is_refused(place: RefusingClient) -> None:
    with place.refuses(e.InvalidScheduleError):
        place.delays.schedule_at("mail", {}, datetime(1, 1, 1, tzinfo=FarEast()))  # type: ignore[abstract]


@pytest.mark.parametrize("year", [1, 1500, 1969, 2001])
def test_the_past_is_accepted_and_runs_now(place: RefusingClient, year: int) -> None:
    ran: list[Any] = []
    place.delays.processor("mail")(ran.append)
    before = runtime_of(place.delays).clock.now()
    task = place.delays.schedule_at("mail", year, datetime(year, 1, 1, tzinfo=UTC))
    assert before <= place.delays.get(task).expected_time <= runtime_of(place.delays).clock.now()
    moved = place.delays.reschedule(task, at=datetime(year, 1, 1, tzinfo=UTC))
    assert [entry.id for entry in place.timer.armed] == [task.id, task.id]
    place.delays.runner().run([place.timer.armed[-1]])
    assert ran == [year]
    assert place.delays.get(moved).status is Status.DONE


def test_a_delay_and_an_instant_together_or_neither_are_refused(place: RefusingClient) -> None:
    waits, when = place.put(), datetime(2030, 1, 1, tzinfo=UTC)
    for delay, instant in ((5, when), (None, None)):
        with place.refuses(e.InvalidScheduleError):
            place.delays.schedule_many([NewTask("mail", {}, delay=delay, at=instant)])
        with place.refuses(e.InvalidScheduleError):
            place.delays.reschedule(waits, delay, at=instant)


def test_schedule_many_refuses_an_item_that_is_not_a_task(place: RefusingClient) -> None:
    wrong: list[Any] = [None, "mail", ("mail", {}), ("mail", {}, 1, 2), ["mail", {}, 1]]
    for item in [*wrong, Unsayable()]:
        with place.refuses(e.InvalidScheduleError):
            place.delays.schedule_many([("mail", {}, 5), item])
