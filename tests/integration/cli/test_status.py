"""`status` shows what happens and why tasks have not run; `--probe` tells healthy from others."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import text

from delaytasks import Status, StoreUnavailableError
from delaytasks.cli import status as cli_status
from delaytasks.cli import tasks
from delaytasks.db import migrations
from delaytasks.db.sweep_queries import ServiceTimes
from delaytasks.db.types import db_now_plus
from delaytasks.model.task import Entry, Settlement
from delaytasks.model.text import installed_version
from delaytasks.operate import health
from delaytasks.operate.health import HealthChecks
from delaytasks.settings import Settings
from tests.doc_pages import block_beginning
from tests.integration.cli.conftest import Project
from tests.world.recording import runner_of, set_columns


def test_status_shows_tasks_queues_tags_workers_sweeps_and_the_broker(shop: Project) -> None:
    store = shop.store
    shop("db", "upgrade")
    assert shop.json("status")["sweeps"][0]["is_late"], "there was none"
    store.sweeps.begin_sweep(0, 1, 1)
    for name, busy in (("fresh", 1), ("silent", None), ("lost", None)):
        store.workers.report(name, ["default", "letters"], "prefork", 2, 1500, ["ok"], busy=busy)
    set_columns(store, "workers", {"name": "lost"}, seen_at=db_now_plus(-90))
    assert store.workers.expire(80) == ["lost"]
    set_columns(store, "workers", {"name": "silent"}, seen_at=db_now_plus(-60))
    shop.schedule("ok")
    store.claims("dead", None).claim_due("default", [0], 1)
    set_columns(store, "tasks", lease_until=db_now_plus(-1))
    shop.overdue("mail")
    shop.delays.cancel(shop.schedule("ok", 60))
    found = shop.json("status")
    counts = {"NOT_COMPLETE": 1, "CANCELLED": 1, "RUNNING": 1}
    assert found["counts"] == {status.name: 0 for status in Status} | counts
    assert (found["expired_leases"], found["overdue"]["count"]) == (1, 1)
    mail, ok = found["live"]["tags"]
    assert (mail["name"], 89 < mail["oldest_overdue_s"] < 120, mail["workers"]) == ("mail", True, 0)
    assert (ok["name"], ok["running"], ok["workers"]) == ("ok", 1, 1)
    [letters] = [each for each in found["live"]["queues"] if each["name"] == "letters"]
    assert (letters["overdue"], letters["workers"]) == (1, 1)
    shown = ("name", "is_alive", "busy", "clock_offset_s", "version", "queues")
    version, queues = installed_version(), ["default", "letters"]
    assert [[worker[name] for name in shown] for worker in found["workers"]] == [
        ["fresh", True, 1, 0.0015, version, queues],
        ["silent", False, None, 0.0015, version, queues],
    ]
    assert [worker["name"] for worker in found["lost_workers"]] == ["lost"]
    assert not found["sweeps"][0]["is_late"]
    assert found["broker"] == {"url": "memory://", "is_up": True, "error": None}
    assert found["timer"] == {"name": "eta", "is_up": True}
    assert found["database"]["revision"] == found["database"]["head"]
    said = shop("status").stdout
    for pattern in (
        r"NOT_COMPLETE +1$",
        r"overdue +1, the oldest since \S+Z, 1m3\ds ago$",
        r"fresh +yes .* 1 +2 +default, letters +\+2ms +\S+$",
        ".*Worker lost was lost at",
        "- 1 task of mail is overdue by up to 1m3",
    ):
        assert re.search(f"(?m)^{pattern}", said), pattern
    shop("pause", "--tag", "mail")
    assert re.search("(?m)^mail +yes ", shop("status").stdout)
    lease = {"worker": "fresh/77-ab", "lease_until": db_now_plus(60)}
    for number in range(25):
        task = shop.schedule(f"tag-{number}", queue=f"queue-{number}")
        set_columns(store, "tasks", {"id": task.id}, status=3, **lease)
    assert re.findall(r"and \d more", shop("status").stdout) == ["and 7 more", "and 7 more"]


def test_watch_renews_the_view_of_a_terminal_until_ctrl_c(shop: Project) -> None:
    shop.is_at_terminal()
    shop.patch.setattr(cli_status, "time", Mock(sleep=Mock(side_effect=[None, KeyboardInterrupt])))
    said = shop("status", "--watch")
    assert (said.exit_code, said.stdout.count("NOT_COMPLETE") >= 2) == (0, True)


# -- `list --follow` prints the changes of tasks as they happen ----------------------------------


def during(work: Callable[[], object], shop: Project, *options: str) -> str:
    """Return what the command prints while another thread works, until Ctrl-C.

    It is no signal, which a background job of a shell ignores.
    """
    thread, reads_after = threading.Timer(0.3, work), 0

    def sleep(seconds: float) -> None:
        nonlocal reads_after
        reads_after += not thread.is_alive()
        if reads_after > 2:
            ctrl_c()
        time.sleep(seconds)

    thread.start()
    with shop.patch.context() as patch:
        patch.setattr(tasks, "time", SimpleNamespace(sleep=sleep))
        result = shop("list", "--follow", *options)
    thread.join()
    assert result.exit_code == 0, result.output
    return result.stdout


def ctrl_c(*_: object) -> None:
    raise KeyboardInterrupt


def test_follow_prints_a_line_for_each_change(shop: Project) -> None:
    task = shop.schedule("bad", key="k1")
    lines = during(lambda: runner_of(shop.delays).run([Entry(task.id, 0, 0)]), shop).splitlines()
    at = r"[0-9:]{8}\.[0-9]{3}"
    assert re.fullmatch(rf"{at} NOT_COMPLETE bad +{task.id} k1  due now", lines[0])
    failed = rf"{at} FAILED       bad +{task.id} k1  \S+ late, took \S+, ValueError: "
    assert re.match(failed, lines[-1])
    assert not [line for line in lines if line.startswith("forged")]
    shop.patch.setattr(tasks, "time", SimpleNamespace(sleep=ctrl_c))
    on_a_terminal = shop("list", "--follow", color=True).stdout
    styled = re.sub(r"\d\d:.{9}|\d{6,}.*\n", "", on_a_terminal)
    dim, bold, red, end = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"
    assert styled == f"{dim}{end} {red}FAILED      {end} {bold}bad             {end} "
    assert on_a_terminal.count("\x1b") == styled.count("\x1b"), "no text of a task has a color"


def test_follow_shows_how_a_late_task_that_runs_ends(shop: Project) -> None:
    shop.overdue("ok")
    claims = shop.store.claims("worker", None)
    [task] = claims.claim_due("default", [0], 1)
    lines = during(
        lambda: claims.settle([Settlement(task, "succeed")]), shop, "--tag", "ok"
    ).splitlines()
    assert [line.split()[1:4] for line in lines] == [
        [status, "ok", str(task.id)] for status in ("RUNNING", "DONE")
    ]


def test_follow_finds_named_tasks_and_a_range_of_due_times(shop: Project) -> None:
    shop.patch.setattr(tasks, "MOST_FOLLOWED", 2)
    later = shop.schedule("ok", 600)
    recent = [shop.overdue("ok", key=f"k{n}") for n in range(3)]
    cancel = partial(shop.delays.cancel, later)
    lines = during(cancel, shop, str(later.id)).splitlines()
    assert [line.split()[1] for line in lines] == ["NOT_COMPLETE", "CANCELLED"]
    lines = during(lambda: None, shop, "--due", "10m..").splitlines()
    assert [line.split()[3] for line in lines] == [str(task.id) for task in recent[1:]]
    assert during(lambda: None, shop) == "", "they were due more than a minute ago"


def test_follow_in_json_has_a_document_in_each_line(shop: Project) -> None:
    def work() -> None:
        for tenant in ("acme", "other"):
            shop.schedule("ok", body={"secret": 1}, meta={"tenant": tenant})

    [line] = during(work, shop, "--json", "--meta", "tenant=acme").splitlines()
    assert json.loads(line)["meta"] == {"tenant": "acme"}
    assert "secret" not in line


# -- what docs/scale.md and docs/fix-a-problem.md show, apart from the times -----------------------


def shown(page: str, beginning: str) -> tuple[list[str], list[str]]:
    """Return the words of the documented command, and the lines that it prints."""
    command, *lines = block_beginning(page, beginning).text.splitlines()
    return command.split()[2:], [without_times(line) for line in lines]


def without_times(line: str) -> str:
    line = re.sub(r"\b[A-Z][a-z]{2} (?=\d{4}-)", "DAY ", line)
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ( \(\w+\))?", "INSTANT", line).rstrip()


def printed(shop: Project, words: list[str]) -> list[str]:
    said = shop(*words)
    assert said.exit_code == 0, said.output
    own = said.stdout.replace(f"delaytasks -A {shop.name}", "delaytasks")
    return [without_times(line) for line in own.splitlines()]


@pytest.mark.slow
def test_the_forecast_of_a_peak(shop: Project) -> None:
    shop.patch.setenv("COLUMNS", "200")
    shop.store.workers.report("w", ["*"], "prefork", 2, 0)
    at = datetime.now(timezone.utc).replace(hour=9, minute=0) + timedelta(days=2)
    rows = """
        INSERT INTO yb_delay_task_message (tag, message_body, delay_time, expected_time)
        WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :n)
        SELECT 'newsletter.send', '{}', 0, :due FROM numbers
    """
    with shop.store.database.begin() as connection:
        due = f"{at:%Y-%m-%d %H:%M:00.000000}"
        connection.execute(text(rows), {"n": 240_000, "due": due})
    words, lines = shown("docs/scale.md", "$ delaytasks status --ahead 7d")
    assert printed(shop, words) == lines


def test_the_reason_why_a_task_has_not_run(shop: Project) -> None:
    words, lines = shown("docs/fix-a-problem.md", "$ delaytasks show")
    shop.store.workers.report("w", ["default"], "prefork", 2, 0)
    task = shop.schedule("mail.send", id=int(words[-1]))
    shop("pause", "--tag", "mail.send", "--actor", "ann@shop")
    shop.hold(task)
    assert printed(shop, words)[: len(lines) + 1] == [*lines, ""], "the fields follow"
    assert [each["code"] for each in shop.json(*words)["why"]] == ["paused"]


# -- `--probe` tells healthy deployments and workers from others, also in outages ----------------


HOST = socket.gethostname()


def report(
    shop: Project, name: str = f"celery@{HOST}", pool: str = "prefork", **services: float
) -> None:
    times = ServiceTimes(**services)
    shop.store.workers.report(name, ["default"], pool, 2, 0, services=times)


def age(shop: Project, table: str, **columns: float) -> None:
    """Set the times of a table's rows to this many seconds ago."""
    values = {name: db_now_plus(-ago_s) for name, ago_s in columns.items()}
    set_columns(shop.store, table, **values)


def failed(shop: Project, *arguments: str) -> list[str]:
    """Return the names of the failed checks, with which the exit code agrees."""
    result = shop("status", "--probe", *arguments, "--json")
    found = shop.json("status", "--probe", *arguments, exit_code=result.exit_code)
    names = [check["name"] for check in found["checks"] if not check["is_ok"]]
    assert (found["is_healthy"], result.exit_code) == (not names, int(bool(names)))
    return names


@pytest.fixture
def healthy(shop: Project) -> Project:
    """Return a project with a worker on this host, whose tables were just swept."""
    report(shop)
    shop.store.sweeps.begin_sweep(0, 1, 1)
    return shop


def test_a_deployment_is_healthy_if_all_of_its_parts_are(healthy: Project) -> None:
    found = healthy.json("status", "--probe")
    assert (found["component"], found["probe"]) == ("deployment", "ready")
    names = [check["name"] for check in found["checks"]]
    assert names == ["database", "tables", "worker", "queues", "sweep", "broker"]
    assert re.search(r"^database +ok +answers$", healthy("status", "--probe").stdout, re.MULTILINE)
    report(healthy, beat_s=1.0)
    found = healthy.json("status", "--probe", "beat")["checks"]
    assert [check["name"] for check in found] == ["database", "tables", "beat", "broker"]


def has_head(shop: Project, head: str) -> None:
    shop("db", "upgrade")
    shop.patch.setattr(migrations, "head", lambda: head)


def only_others_live(shop: Project) -> None:
    report(shop, "w1@elsewhere")
    age(shop, "workers", seen_at=60)
    report(shop, "w2@elsewhere")
    report(shop, f"run7-ab@{HOST}", "direct/prefork")


def is_overdue(shop: Project, late_s: float, *queues: str) -> None:
    """Let two tasks be overdue in the queues `letters`, which no worker serves, and `default`."""
    shop.schedule("mail")
    shop.schedule("ok")
    age(shop, "tasks", expected_time=late_s)
    for queue in queues:
        shop.delays.policies.pause(queue=queue)


def lose_broker(shop: Project) -> None:
    report(shop, f"run7-ab@{HOST}", "direct/prefork")
    shop.patch.setattr(health, "ask_broker", lambda _: "refused")


def break_database(shop: Project) -> None:
    shop.delays.close()
    Path("shop.sqlite3").write_text("no database any more")


LIVE, OF_W1 = "worker --live", "worker --live --name w1@elsewhere"
#: What has happened, and the check that fails in the probe of each component.
FAULTS: dict[str, tuple[Callable[[Project], object], dict[str, str]]] = {
    "none": (bool, dict.fromkeys(("", "worker", LIVE, "beat", "beat --live"), "")),
    "the worker is silent": (
        lambda shop: age(shop, "workers", seen_at=60), {"": "worker", LIVE: "worker"}),
    "the worker is lost": (
        lambda shop: [age(shop, "workers", seen_at=60), shop.store.workers.expire(15)],
        {"": "worker", LIVE: "worker"}),
    "workers of other hosts and names live": (
        only_others_live, {"": "", LIVE: "worker", OF_W1: "worker", "run --live": ""}),
    "no sweep": (lambda shop: age(shop, "sweeps", swept_at=16), {"": "sweep"}),
    "no broker": (lose_broker, {"": "broker", "worker": "broker", LIVE: "", "run": ""}),
    "no messages of beat": (
        lambda shop: report(shop, beat_s=300), {"beat": "beat", "beat --live": "beat"}),
    "beat without a broker": (
        lambda shop: report(shop, broker_down_s=9, beat_s=300), {"beat --live": ""}),
    "a worker may be restarting": (lambda shop: is_overdue(shop, 10), {"": ""}),
    "a queue without a worker": (
        lambda shop: is_overdue(shop, 20), {"": "queues", "worker": "", LIVE: ""}),
    "a paused queue": (lambda shop: is_overdue(shop, 20, "letters"), {"": ""}),
    "old tables": (lambda shop: has_head(shop, "9999"), {"": "tables"}),
    "newer tables": (lambda shop: has_head(shop, "0001"), {"": ""}),
    "no database": (break_database, {LIVE: "", "worker": "database"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_own_check_of_the_components_that_it_concerns(
    healthy: Project, fault: str
) -> None:
    happen, found = FAULTS[fault]
    happen(healthy)
    expected = {words: [check] if check else [] for words, check in found.items()}
    assert {words: failed(healthy, *words.split()) for words in found} == expected


def test_a_database_that_hangs_is_given_up_in_time() -> None:
    may_end = threading.Event()

    class Hanging:
        @property
        def tasks(self) -> Any:
            may_end.wait()
            raise StoreUnavailableError("too late")

    hanging: Any = SimpleNamespace(store=Hanging(), settings=Settings(), direct_timer=True)
    [live] = HealthChecks(hanging, "worker", HOST, timeout_s=0.05).live()
    assert live.is_ok
    database, broker = HealthChecks(hanging, timeout_s=0.05).ready()
    assert not database.is_ok
    assert database.detail == "no answer within 50ms"
    assert broker.is_ok
    may_end.set()
