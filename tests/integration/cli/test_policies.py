"""Test the commands `pause`, `resume` and `limit`."""

from __future__ import annotations

import re

from sqlalchemy import update

from delaytasks import DelayedTask, Status
from delaytasks.db.types import db_now_plus
from delaytasks.runtime import runtime_of
from tests.integration.cli.project import Project


def hold(shop: Project, *tasks: DelayedTask) -> None:
    """Let these tasks be held as the claim of a worker holds them."""
    t = shop.store.schema.tasks
    with shop.store.database.begin() as connection:
        held = update(t).where(t.c.id.in_([task.id for task in tasks]))
        connection.execute(held.values(status=int(Status.HELD)))


def test_pause_and_resume_report_their_effect_and_the_number_of_held_tasks(shop: Project) -> None:
    tasks = [shop.schedule("mail", 3600) for _ in range(3)]
    said = shop("pause", "--tag", "mail", "--actor", "ann: it burns").stdout
    first, _, row = said.splitlines()
    assert first == "paused tag mail"
    assert re.fullmatch("tag +mail +yes +- +0 .* ann: it burns", row)
    hold(shop, *tasks)
    for end in ([], ["--until", "2h"]):  # an end does not shorten the pause
        said = shop("pause", "--tag", "mail", *end).stdout
        assert re.search("^tag +mail +yes +- +3 ", said, re.MULTILINE)
    assert re.search("^- The tag mail is paused by .*, 3 held", shop("status").stdout, re.MULTILINE)
    resumed = shop("resume", "--tag", "mail").stdout
    assert resumed == "resumed tag mail\n"
    runtime_of(shop.delays).sweeper.release_resumed()
    assert "is paused" not in shop("status").stdout
    assert {shop.status(task) for task in tasks} == {Status.NOT_COMPLETE}


def test_a_pause_may_have_an_end(shop: Project) -> None:
    end = shop.json("pause", "--tag", "mail", "--until", "2030-01-31T18:00:00Z")["paused_until"]
    assert end == "2030-01-31T18:00:00+00:00"
    shown = shop("pause", "--tag", "mail", "--until", end).stdout
    for said in (shown, shop("limit").stdout):
        assert re.search("^tag +mail +yes +2030-01-31T18:00:00Z ", said, re.MULTILINE)
    assert shop.json("resume", "--tag", "mail")["paused_until"] is None


def test_limits_and_pauses_are_set_listed_with_their_authors_and_removed(shop: Project) -> None:
    assert shop.json("limit") == []
    assert "nothing is limited" in shop("limit").stderr
    shop("pause", "--queue", "letters", "--actor", "[red]ann[/red] :smile:")
    limits = ["--concurrency", "10", "--concurrency-per-key", "2", "--rate", "30/m"]
    shown = shop.json("limit", "--tag", "mail", *limits)
    assert (shown["concurrency"], shown["concurrency_per_key"], shown["rate"]) == (10, 2, "30/m")
    queue, tag = shop.json("limit")
    shown = (queue["kind"], queue["name"], queue["is_paused"], tag["name"])
    assert shown == ("queue", "letters", True, "mail")
    assert "@" in tag["updated_by"], "the user on the host, unless somebody says something else"
    assert [each["name"] for each in shop.json("limit", "--tag", "mail")] == ["mail"]
    assert shop.json("limit", "--queue", "mail") == []
    said = shop("limit").stdout
    assert "[red]ann[/red] :smile:" in said.splitlines()[1], "as it was typed"
    said = shop("limit", "--tag", "mail", "--rate", "none").stdout
    assert re.search(r"^tag +mail +- +- +0 +0 +10 +2 +- ", said, re.MULTILINE)
    assert shop.json("limit", "--tag", "mail", "--remove")["concurrency"] is None
    assert [each["name"] for each in shop.json("limit")] == ["letters"]


def test_limit_shows_the_running_and_held_tasks_of_a_limited_tag(shop: Project) -> None:
    shop("limit", "--tag", "mail", "--concurrency", "2")
    for status, tasks in ((Status.RUNNING, 2), (Status.HELD, 3)):
        for _ in range(tasks):
            shop.insert(tag="mail", status=int(status), lease_until=db_now_plus(60), worker="w")
    [mail] = shop.json("limit")
    assert (mail["running"], mail["held"]) == (2, 3)
    assert re.search(r"tag +mail +- +- +3 +2 +2 ", shop("limit").stdout)
    said = shop("limit", "--tag", "mail", "--concurrency", "4").stdout.splitlines()
    assert said[0] == "changed tag mail"
    assert re.match(r"tag +mail +- +- +3 +2 +4 ", said[2])
