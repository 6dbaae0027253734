"""Test the commands `recurring …` and `import`."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery.schedules import crontab, schedule
from redis import Redis
from sqlalchemy import update

from delaytasks.runtime import runtime_of
from tests.integration.cli.project import HOSTILE, ROOT, Project

DAILY = ("--cron", "0 9 * * mon-fri", "--tz", "Europe/Berlin")


def names(shop: Project) -> list[str]:
    return [schedule["name"] for schedule in shop.json("recurring", "list")]


def test_a_schedule_is_stored_shown_and_removed(shop: Project) -> None:
    assert "No recurring schedules" in shop("recurring", "list").stderr
    said = shop("recurring", "set", "nightly", "mail", '{"to": "ann"}', *DAILY).stdout
    assert said.startswith("stored recurring schedule nightly (mail); next occurrence ")
    [shown] = shop.json("recurring", "list")
    assert (shown["timing"], shown["tz"], shown["body"], shown["queue"]) == (
        "0 9 * * mon-fri",
        "Europe/Berlin",
        {"to": "ann"},
        "letters",
    )
    assert "0 9 * * mon-fri" in shop("recurring", "list").stdout
    assert "removed recurring schedule nightly" in shop("recurring", "remove", "nightly").stdout
    assert names(shop) == []


def test_the_next_occurrence_is_shown_although_it_has_its_task(shop: Project) -> None:
    """The tasks of short intervals are made many occurrences ahead."""
    made = shop.delays.recurring.set("r", "ok", every="5m")
    assert made.next_at is not None
    ahead = made.next_at + timedelta(minutes=10)
    store = runtime_of(shop.delays).store
    with store.database.begin() as connection:
        connection.execute(update(store.schema.recurring).values(next_at=ahead))
    header, row = shop("recurring", "list").stdout.splitlines()[:2]
    assert "next occurrence" in header
    assert "every 5m" in row
    assert f"{made.next_at:%H:%M:%S}" in row
    assert f"{ahead:%H:%M:%S}" not in row


def test_meta_is_given_as_pairs(shop: Project) -> None:
    pairs = ("--meta", "tenant=acme", "--meta", "trace=1")
    shop("recurring", "set", "r", "ok", "--every", "1h", *pairs)
    [shown] = shop.json("recurring", "list")
    assert (shown["meta"], shown["headers_json"]) == ({"tenant": "acme", "trace": "1"}, None)
    assert shop.delays.get(shop.json("recurring", "run", "r")["id"]).meta == shown["meta"]


def test_pause_resume_and_run(shop: Project) -> None:
    shop("recurring", "set", "r", "ok", "--every", "1h", "--overlap", "skip", "--jitter", "5m")
    assert shop.json("pause", "--recurring", "r", "--actor", "ann")["is_paused"]
    assert "paused" in shop("recurring", "list").stdout
    assert not shop.json("resume", "--recurring", "r")["is_paused"]
    task = shop.json("recurring", "run", "r")
    assert task["key"].startswith("r@")
    assert shop.delays.get(task["id"]).tag == "ok"


def test_schedules_are_found_by_name_and_by_the_beginning_of_their_names(shop: Project) -> None:
    for name in ("eu-1", "eu-2", "us-1"):
        shop("recurring", "set", name, "ok", "--every", "1h")
    found = shop.json("recurring", "list", "eu-*")
    assert [schedule["name"] for schedule in found] == ["eu-1", "eu-2"]
    [one] = shop.json("recurring", "list", "us-1")
    assert one["name"] == "us-1"


def test_the_next_occurrences_are_shown_in_utc_and_in_the_zone(shop: Project) -> None:
    shop("recurring", "set", "r", "ok", "--cron", "30 2 * * *", "--tz", "Asia/Tokyo")
    shown = shop("recurring", "list", "r", "--next", "3").stdout.splitlines()
    assert all(re.fullmatch(r"\S+T17:30:00Z  \w{3} \S+ 02:30:00 JST", line) for line in shown)
    instants = shop.json("recurring", "list", "r", "--next", "3")
    assert instants == [line.split()[0] for line in shown]
    assert len({*instants}) == 3


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("set", "r", "ok"), "cron"),
        (("set", "r", "ok", "--cron", "61 * * * *"), "cron"),
        (("set", "r", "ok", "--every", "5 apples"), "every"),
        (("set", "r", "ok", "--every", "5m", "--missed", "never"), "missed"),
        (("set", "r", "ok", "{", "--every", "5m"), "body"),
        (("list", "--next", "3"), "UsageError"),
        (("list", "r*", "--next", "3"), "UsageError"),
    ],
)
def test_wrong_usage_is_refused(shop: Project, arguments: Any, kind: str) -> None:
    assert shop.wrong("recurring", *arguments) == kind
    assert names(shop) == []


def test_an_unknown_name_is_an_error(shop: Project) -> None:
    commands = [["recurring", name, "nobody"] for name in ("list", "run", "remove")]
    for command in [*commands, *([name, "--recurring", "nobody"] for name in ("pause", "resume"))]:
        found = shop.error(*command, exit_code=1)
        assert found["type"] == "TaskNotFoundError"


def test_hostile_names_are_shown_as_one_line(shop: Project) -> None:
    shop("recurring", "set", "[red]a[/red]", "ok", json.dumps(HOSTILE), "--every", "5m")
    assert "[red]a[/red]" in shop("recurring", "list").stdout


# -- import ---------------------------------------------------------------------------------------


BEAT = {
    "every 30 s": {"task": "shop.poll", "schedule": 30.0},
    "delta": {"task": "shop.poll", "schedule": timedelta(minutes=5), "args": (1, "two")},
    "interval": {"task": "shop.poll", "schedule": schedule(60), "kwargs": {"a": 1}},
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
    dry = {entry["name"]: entry for entry in shop.json("import", "beat", "--dry-run")}
    assert names(shop) == []
    done = {entry["name"]: entry for entry in shop.json("import", "beat")}
    assert done == dry
    refused = {name for name, entry in done.items() if entry["result"] == "refused"}
    assert refused == {"bad args", "fraction"}
    stored = {entry["name"]: entry for entry in shop.json("recurring", "list")}
    assert stored.keys() == BEAT.keys() - {*refused, "sweep"}
    assert {name: entry["timing"] for name, entry in stored.items()} == {
        "every 30 s": "every 30",
        "delta": "every 300",
        "interval": "every 60",
        "daily": "0 9 * * mon-fri",
        "friday 13": "crontab 0 0 13 * 5",
    }
    assert stored["delta"]["tag"] == "celery:shop.poll"
    assert stored["delta"]["body"] == {
        "task": "shop.poll",
        "args": [1, "two"],
        "kwargs": {},
        "options": {},
    }
    assert stored["daily"]["body"]["options"] == {"queue": "reports", "expires": 60}
    again = shop.json("import", "beat")
    assert {entry["result"] for entry in again} == {"unchanged", "refused"}
    assert "5 schedules are stored, and 2 refused" in shop("import", "beat").stderr


def test_redbeats_keys_are_imported(shop: Project, redis_url: str) -> None:
    redbeat = pytest.importorskip("redbeat")
    app = shop.delays._celery
    prefix = f"redbeat_{secrets.token_hex(4)}:"
    app.conf.update(redbeat_redis_url=redis_url, redbeat_key_prefix=prefix)
    rule = redbeat.schedules.rrule("HOURLY", app=app)
    entries = [
        redbeat.RedBeatSchedulerEntry("a", "shop.poll", schedule(30, app=app), args=[1], app=app),
        redbeat.RedBeatSchedulerEntry(
            "b", "shop.poll", crontab(minute="*/5", app=app), enabled=False, app=app
        ),
        redbeat.RedBeatSchedulerEntry("c", "shop.poll", rule, app=app),
    ]
    for entry in entries:
        entry.save()
    try:
        done = {entry["name"]: entry for entry in shop.json("import", "redbeat")}
    finally:
        with Redis.from_url(redis_url) as redis:
            redis.delete(*redis.keys(f"{prefix}*"))
        redbeat.schedulers.get_redis(app).close()
    assert {name: entry["result"] for name, entry in done.items()} == {
        "a": "added",
        "b": "added",
        "c": "refused",
    }
    stored = {entry["name"]: entry for entry in shop.json("recurring", "list")}
    assert (stored["a"]["timing"], stored["a"]["body"]["args"]) == ("every 30", [1])
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


def test_the_tables_of_django_celery_beat_are_imported(shop: Project, tmp_path: Path) -> None:
    pytest.importorskip("django_celery_beat")
    run = subprocess.run(
        [sys.executable, "-c", DJANGO],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    results = {entry["name"]: entry for entry in json.loads(run.stdout)}
    assert results["once"]["problem"].startswith("it runs once")
    stored = {entry["name"]: entry for entry in shop.json("recurring", "list")}
    assert stored.keys() == {"each", "night"}
    assert (stored["each"]["timing"], stored["each"]["body"]) == (
        "every 600",
        {"task": "shop.poll", "args": [1], "kwargs": {"a": 2}, "options": {"queue": "q"}},
    )
    assert (stored["night"]["timing"], stored["night"]["tz"], stored["night"]["is_paused"]) == (
        "30 2 * * *",
        "Europe/Berlin",
        True,
    )
