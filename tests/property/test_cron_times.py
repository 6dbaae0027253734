"""Occurrences of cron expressions against a search of every minute with `zoneinfo`.

The search knows nothing of `cronsim`: it reads the fields itself, and asks for each minute what the
clocks of the zone show.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from zoneinfo import ZoneInfo, available_timezones

import pytest

from delaytasks.model.clock import UTC
from delaytasks.recurring.definition import parse_timing

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
ZONES = sorted(available_timezones() - {"localtime", "Factory"})
YEAR = datetime(2027, 1, 1, tzinfo=UTC)


@cache
def transitions(zone: str) -> list[datetime]:
    """Return the hours of 2027 and 2028 in which the zone changes its offset."""

    def differs(at: datetime, step: timedelta) -> bool:
        return at.astimezone(tz).utcoffset() != (at + step).astimezone(tz).utcoffset()

    tz = ZoneInfo(zone)
    days = [YEAR + n * DAY for n in range(2 * 366)]
    hours = [day + n * HOUR for day in days if differs(day, DAY) for n in range(24)]
    return [hour for hour in hours if differs(hour, HOUR)]


#: cronsim moves by whole hours. These clocks change by half an hour, or at 2:45.
PARTS_OF_HOURS = {"Australia/Lord_Howe", "Australia/LHI", "Pacific/Chatham", "NZ-CHAT"}
CHANGING = [zone for zone in ZONES if zone not in PARTS_OF_HOURS and transitions(zone)]


#: Expressions, each with its minutes and hours.
CRONS = {
    "30 2 * * *": ({30}, {2}),
    "0,45 0-3 * * *": ({0, 45}, {0, 1, 2, 3}),
    "*/20 * * * *": ({0, 20, 40}, {*range(24)}),
    "*/30 1-2 * * *": ({0, 30}, {1, 2}),
}


def expected(cron: str, zone: str, since: datetime, until: datetime) -> Iterator[datetime]:
    """Yield the occurrences after `since`, up to `until`, found minute by minute."""
    (minutes, hours), tz, is_fixed = CRONS[cron], ZoneInfo(zone), not cron.startswith("*")

    def wall(at: datetime) -> datetime:
        return at.astimezone(tz).replace(tzinfo=None, fold=0)

    # What the clocks have shown in the day before does not count again.
    shown = {wall(since - n * MINUTE) for n in range(24 * 60)} if is_fixed else set[datetime]()
    at, last = since, wall(since)
    while at < until:
        at += MINUTE
        times = [wall(at)]
        if is_fixed:
            skipped = int((times[0] - last) / MINUTE) - 1  # the clocks have not shown these times
            times += [last + n * MINUTE for n in range(1, skipped + 1)]
        if any(t.minute in minutes and t.hour in hours and t not in shown for t in times):
            yield at
        if is_fixed:
            shown.add(times[0])
            last = max(last, times[0])


def occurrences(expression: str, zone: str, since: datetime, until: datetime) -> list[datetime]:
    timing = parse_timing(expression, zone)
    found, at = list[datetime](), timing.after(since)
    while at is not None and at <= until:
        found.append(at)
        at = timing.after(at)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("zone", CHANGING)
@pytest.mark.parametrize("cron", CRONS)
def test_occurrences_at_each_change_of_each_zone(zone: str, cron: str) -> None:
    for change in transitions(zone):
        since, until = change - 6 * HOUR, change + 30 * HOUR
        found = occurrences(cron, zone, since, until)
        assert found == [*expected(cron, zone, since, until)], change


KNOWN = """
0 9 * * mon-fri | Asia/Tokyo | 2027-01-01T12:00Z | 2027-01-04T00:00Z 2027-01-05T00:00Z
0 0 l * * | UTC | 2028-02-01T00:00Z | 2028-02-29T00:00Z 2028-03-31T00:00Z
0 0 29 2 * | UTC | 2028-03-01T00:00Z | 2032-02-29T00:00Z 2036-02-29T00:00Z
*/20 0 9 * * * | UTC | 2027-01-01T09:00:05Z | 2027-01-01T09:00:20Z 2027-01-01T09:00:40Z
0 9 * * mon#1 | UTC | 2027-01-01T00:00Z | 2027-01-04T09:00Z 2027-02-01T09:00Z
30 2 * * * | Europe/Berlin | 2027-03-27T12:00Z | 2027-03-28T01:00Z 2027-03-29T00:30Z
30 2 * * * | Europe/Berlin | 2027-10-30T12:00Z | 2027-10-31T00:30Z 2027-11-01T01:30Z
30 * * * * | Europe/Berlin | 2027-03-28T00:00Z | 2027-03-28T00:30Z 2027-03-28T01:30Z
30 * * * * | Europe/Berlin | 2027-10-31T00:00Z | 2027-10-31T00:30Z 2027-10-31T01:30Z
"""


@pytest.mark.parametrize("known", KNOWN.strip().splitlines())
def test_known_occurrences(known: str) -> None:
    """Berlin's clocks go from 2:00 to 3:00 on 28 March, and from 3:00 to 2:00 on 31 October."""
    expression, zone, *texts = known.split(" | ")
    instants = " ".join(texts).replace("Z", "+00:00").split()
    since, *found = map(datetime.fromisoformat, instants)
    assert occurrences(expression, zone, since, found[-1]) == found
