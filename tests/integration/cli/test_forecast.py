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
    said = shop("forecast")
    assert said.exit_code == 0
    assert said.stdout.startswith("0 tasks become due until ")
    document = shop.json("forecast")
    assert (document["due"], document["late_s"], document["steps"]) == (0, 0, [])


def test_a_peak_is_shown_with_the_workers_that_it_needs(shop: Project) -> None:
    at = put_peak(shop, 1200)
    options = ("--workers", "2", "--processes", "1", "--rate", "2")
    said = shop("forecast", *options)
    day = f"{at:%a %Y-%m-%dT%H:%M:%SZ}"
    assert (
        f"from {day} on: 1,200 tasks of mail, which 2 workers would start up to 5m late, "
        "and 4 workers up to 2m30s late\n"
    ) in said.stdout
    assert "10 workers would start each task at most 1m late\n" in said.stdout
    assert "given rate: 'mail'" in said.stderr
    document = shop.json("forecast", *options, "--target", "2m30s")
    assert document["needed_workers"] == 4
    [step] = document["steps"]
    assert (step["due"], step["start"], step["due_by_tag"]) == (
        1200,
        at.isoformat(),
        {"mail": 1200},
    )


def test_only_the_most_important_steps_are_shown_without_all(shop: Project) -> None:
    for hour in range(20):
        shop.schedule("mail", hour * 3600 + 1800)
    assert "and 8 steps more; --all prints them" in shop("forecast").stdout
    assert "--all" not in shop("forecast", "--all").stdout


def test_queues_without_workers_and_paused_tags_are_named(shop: Project) -> None:
    shop.schedule("mail", 60, queue="lost")
    shop.schedule("report", 60)
    runtime_of(shop.delays).store.workers.report("w", ["default"], "prefork", 2, 0)
    shop.delays.pause(tag="report")
    said = shop("forecast")
    assert "2 tasks become due" in said.stdout
    assert "1 of them paused" in said.stdout
    assert "never starts" in said.stdout
    assert "queues lost: no worker serves them;" in said.stdout
    assert "No worker serves the queues 'lost'." in said.stderr


def test_wrong_options_are_refused(shop: Project) -> None:
    for options in (("--days", "0"), ("--workers", "0"), ("--rate", "-1"), ("--step", "0s")):
        assert shop("forecast", *options).exit_code == 2, options
