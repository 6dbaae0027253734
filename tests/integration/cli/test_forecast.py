"""Test the command `forecast`."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from delaytasks import NewTask
from delaytasks.runtime import runtime_of
from tests.integration.cli.project import Project


def put_peak(shop: Project, tasks: int) -> datetime:
    at = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0) + timedelta(days=2)
    shop.delays.schedule_many(NewTask("mail", n, at=at) for n in range(tasks))
    return at


def test_an_empty_forecast_says_so(shop: Project) -> None:
    lines = shop("forecast").stdout.splitlines()
    assert lines[0].startswith("0 tasks become due until ")
    assert lines[1:] == ["Nothing becomes due."]
    document = shop.json("forecast")
    assert (document["due"], document["first_full"], document["hours"]) == (0, None, [])


def test_the_busiest_hour_is_shown_with_its_share_of_the_hour(shop: Project) -> None:
    at = put_peak(shop, 1200)
    shop.schedule("report", 60, queue="lost")
    runtime_of(shop.delays).store.workers.report("w", ["default", "letters"], "prefork", 2, 0)
    said = shop("forecast")
    assert (
        f"The processes suffice. The busiest hour is {at:%a %Y-%m-%dT%H:%M:%SZ}: 1,200 tasks of "
        "mail keep 2 processes busy for 30s.\n"
    ) in said.stdout
    assert "No worker serves the queues lost." in said.stderr
    document = shop.json("forecast", "--processes", "1")
    *_, hour = document["hours"]
    assert (hour["due"], hour["start"], hour["busy_s"]) == (1200, at.isoformat(), 60.0)


def test_only_the_busiest_hours_are_shown_without_all(shop: Project) -> None:
    for hour in range(20):
        shop.schedule("mail", hour * 3600 + 1800)
    shop.delays.pause(tag="mail")
    said = shop("forecast").stdout
    assert "20 of them paused" in said
    assert "and 8 hours more; --all prints them" in said
    assert "--all" not in shop("forecast", "--all").stdout


def test_wrong_options_are_refused(shop: Project) -> None:
    for options in (("--days", "0"), ("--processes", "0")):
        assert shop("forecast", *options).exit_code == 2, options
