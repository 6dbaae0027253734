"""Test the commands `recurring …` and `import`."""

from __future__ import annotations

import json
import secrets
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from celery.schedules import crontab, schedule
from redis import Redis

from tests.integration.cli.conftest import HOSTILE, Project
from tests.world.recording import set_columns

DAILY = ("--cron", "0 9 * * mon-fri", "--tz", "Europe/Berlin")


def schedules(shop: Project) -> dict[str, dict[str, Any]]:
    return {schedule["name"]: schedule for schedule in shop.json("recurring", "list")}


def test_schedules_are_printed_and_found_by_the_beginning_of_their_names(shop: Project) -> None:
    assert "No recurring schedules" in shop("recurring", "list").stderr
    said = shop("recurring", "set", "[red]a[/red]", "mail", json.dumps(HOSTILE), *DAILY).stdout
    assert said.startswith("stored recurring schedule [red]a[/red] (mail); next occurrence ")
    assert "[red]a[/red]" in (text := shop("recurring", "list").stdout)
    assert "0 9 * * mon-fri" in text
    said = shop("recurring", "remove", "[red]a[/red]").stdout
    assert "removed recurring schedule [red]a[/red]" in said
    for name in ("eu-1", "eu-2", "us-1"):
        shop("recurring", "set", name, "ok", "--every", "1h")
    for pattern, found in (("eu-*", ["eu-1", "eu-2"]), ("us-1", ["us-1"])):
        assert [each["name"] for each in shop.json("recurring", "list", pattern)] == found
    shop("pause", "--recurring", "us-1")
    assert "paused" in shop("recurring", "list", "us-1").stdout


def test_the_next_occurrences_are_shown_although_they_have_their_tasks(shop: Project) -> None:
    """The tasks of short intervals are made many occurrences ahead."""
    made = shop.delays.recurring.set("r", "ok", every="5m")
    assert made.next_at is not None
    ahead = made.next_at + timedelta(minutes=10)
    set_columns(shop.store, "recurring", next_at=ahead)
    header, row = shop("recurring", "list").stdout.splitlines()[:2]
    assert "next occurrence" in header
    assert "every 5m" in row
    assert f"{made.next_at:%H:%M:%S}" in row
    assert f"{ahead:%H:%M:%S}" not in row
    shop("recurring", "set", "r", "ok", "--cron", "30 2 * * *", "--tz", "Asia/Tokyo")
    assert "T17:30:00Z" in shop("recurring", "list", "r").stdout


# -- import ---------------------------------------------------------------------------------------


BEAT = {
    "delta": {"task": "shop.poll", "schedule": timedelta(minutes=5), "args": (1, "two")},
    "daily": {
        "task": "shop.report",
        "schedule": crontab(minute="0", hour="9", day_of_week="mon-fri"),
        "options": {"queue": "reports", "expires": 60},
    },
    "friday 13": {"task": "shop.poll", "schedule": crontab("0", "0", "5", "13", "*")},
    "sweep": {"task": "delaytasks.sweep", "schedule": 5},
    "bad args": {"task": "shop.poll", "schedule": 30, "args": (object(),)},
    "fraction": {"task": "shop.poll", "schedule": 0.5},
}


def test_beats_schedule_is_imported_and_again_without_effect(shop: Project) -> None:
    shop.delays._celery.conf.beat_schedule = BEAT
    dry = shop.json("import", "beat", "--dry-run")
    assert not schedules(shop)
    done = shop.json("import", "beat")
    assert done == dry
    refused = {entry["name"] for entry in done if entry["result"] == "refused"}
    assert refused == {"bad args", "fraction", "friday 13"}
    stored = schedules(shop)
    assert {name: entry["timing"] for name, entry in stored.items()} == {
        "delta": "every 5m",
        "daily": "0 9 * * 1,2,3,4,5",
    }
    assert stored["delta"]["tag"] == "celery:shop.poll"
    call = {"task": "shop.poll", "args": [1, "two"], "kwargs": {}, "options": {}}
    assert stored["delta"]["body"] == call
    assert stored["daily"]["body"]["options"] == {"queue": "reports", "expires": 60}
    again = shop.json("import", "beat")
    assert {entry["result"] for entry in again} == {"unchanged", "refused"}
    assert "2 schedules are stored, and 3 refused" in shop("import", "beat").stderr


def test_redbeats_keys_are_imported(shop: Project, redis_url: str) -> None:
    redbeat = pytest.importorskip("redbeat")
    app = shop.delays._celery
    prefix = f"redbeat_{secrets.token_hex(4)}:"
    app.conf.update(redbeat_redis_url=redis_url, redbeat_key_prefix=prefix)
    rule = redbeat.schedules.rrule("HOURLY", app=app)
    each, cron = schedule(30, app=app), crontab(minute="*/5", app=app)
    entry = partial(redbeat.RedBeatSchedulerEntry, task="shop.poll", app=app)
    entry("a", schedule=each, args=[1]).save()
    entry("b", schedule=cron, enabled=False).save()
    entry("c", schedule=rule).save()
    try:
        done = {entry["name"]: entry["result"] for entry in shop.json("import", "redbeat")}
    finally:
        with Redis.from_url(redis_url) as redis:
            redis.delete(*redis.keys(f"{prefix}*"))
        redbeat.schedulers.get_redis(app).close()
    assert done == {"a": "added", "b": "added", "c": "refused"}
    stored = schedules(shop)
    assert (stored["a"]["timing"], stored["a"]["body"]["args"]) == ("every 30s", [1])
    assert (stored["b"]["timing"], stored["b"]["is_paused"]) == ("*/5 * * * *", True)


DJANGO = """
import os, sys, json
import django
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "django.sqlite3"}},
    INSTALLED_APPS=["django_celery_beat"], USE_TZ=True, SECRET_KEY="x",
)
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from datetime import datetime, timezone
from django_celery_beat import models as m
interval, _ = m.IntervalSchedule.objects.get_or_create(every=10, period="minutes")
cron = m.CrontabSchedule.objects.create(minute="30", hour="2", timezone="Europe/Berlin")
clocked = m.ClockedSchedule.objects.create(clocked_time=datetime(2030, 1, 1, tzinfo=timezone.utc))
new = m.PeriodicTask.objects.create
new(name="each", task="shop.poll", interval=interval, args="[1]", kwargs='{"a": 2}', queue="q")
new(name="night", task="shop.poll", crontab=cron, enabled=False)
new(name="once", task="shop.poll", clocked=clocked, one_off=True)
from delaytasks.cli.main import main
main(["-A", "shop_of_cli_tests", "import", "django", "--json"], prog_name="delaytasks")
"""


def test_the_tables_of_django_celery_beat_are_imported(shop: Project) -> None:
    pytest.importorskip("django_celery_beat")
    imported, error = shop.process("-c", DJANGO).communicate(timeout=120)
    assert imported, error
    results = {entry["name"]: entry for entry in json.loads(imported)}
    assert results["once"]["problem"].startswith("it runs once")
    stored = schedules(shop)
    assert stored.keys() == {"each", "night"}
    call = {"task": "shop.poll", "args": [1], "kwargs": {"a": 2}, "options": {"queue": "q"}}
    assert (stored["each"]["timing"], stored["each"]["body"]) == ("every 10m", call)
    assert (stored["night"]["timing"], stored["night"]["tz"]) == ("30 2 * * *", "Europe/Berlin")
    assert stored["night"]["is_paused"]
