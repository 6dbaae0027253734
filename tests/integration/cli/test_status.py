"""`status` shows what happens and why tasks have not run; `--probe` tells healthy from others."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text

from delaytasks import StoreUnavailableError
from delaytasks.cli import tasks
from delaytasks.db import migrations
from delaytasks.db.sweep_queries import ServiceTimes
from delaytasks.db.types import db_now_plus
from delaytasks.model.task import Entry
from delaytasks.operate import health
from delaytasks.operate.health import HealthChecks
from delaytasks.operate.statistics import write_counts
from delaytasks.run.observers import Counted, RunCounts
from delaytasks.settings import Settings
from tests.doc_pages import block_beginning
from tests.integration.cli.conftest import HOSTILE, Project, read_until
from tests.world.recording import runner_of, set_columns


@pytest.fixture
def busy(shop: Project) -> Project:
    """Return a project with tasks of each kind, and a worker."""
    shop.store.workers.report("w1@host", ["default", "letters"], "prefork", 4, 0, ["ok", "bad"])
    done, failed = shop.schedule("ok"), shop.schedule("bad")
    runner_of(shop.delays).run([Entry(done.id, 0, 0), Entry(failed.id, 0, 0)])
    shop.overdue("mail")
    running = shop.schedule("ok")
    shop.schedule("ok", delay=30)
    shop.schedule("ok", delay=3600)
    lease = {"worker": "w1@host/77-ab", "lease_until": db_now_plus(60)}
    started = {"status": 3, "execution_time": db_now_plus(0), **lease}
    set_columns(shop.store, "tasks", {"id": running.id}, **started)
    counted: Counted = {("bad", ""): RunCounts({"lateness_0": 1, "failed": 1})}
    now = shop.store.database.now()
    with shop.store.database.begin() as connection:
        write_counts(shop.store, connection, counted, now)
    return shop


def test_queues_tags_and_workers_are_counted_and_shown(busy: Project) -> None:
    document = busy.json("status")
    found = document["live"]
    tags = {tag["name"]: tag for tag in found["tags"]}
    assert next(iter(tags)) == "mail", "the overdue tag is the first"
    assert 89 < tags["mail"]["oldest_overdue_s"] < 120
    assert (tags["ok"]["running"], tags["ok"]["workers"], tags["mail"]["workers"]) == (1, 1, 0)
    assert (tags["bad"]["runs"], tags["bad"]["failed"]) == (1, 1)
    assert 0 <= tags["bad"]["lateness_p99_s"] < 60
    queues = {queue["name"]: queue for queue in found["queues"]}
    assert (queues["letters"]["overdue"], queues["letters"]["workers"]) == (1, 1)
    [worker] = document["workers"]
    assert (worker["name"], worker["is_alive"]) == ("w1@host", True)
    busy("pause", "--tag", "mail")
    assert re.search("^mail +yes ", busy("status").stdout, re.MULTILINE)
    for number in range(25):
        task = busy.schedule(f"tag-{number}", queue=f"queue-{number}")
        lease = {"worker": "w1@host/77-ab", "lease_until": db_now_plus(60)}
        set_columns(busy.store, "tasks", {"id": task.id}, status=3, **lease)
    assert re.findall(r"and \d more", busy("status").stdout) == ["and 7 more", "and 8 more"]
    set_columns(busy.store, "tasks", tag=HOSTILE[:100])
    said = busy("status").stdout
    assert "\x1b" not in said
    assert "[red]" in said, "markup is shown as it is"


def test_watch_renews_the_view_of_a_terminal_until_ctrl_c(busy: Project) -> None:
    watch, terminal = busy.at_terminal("status", "--watch")
    read_until(terminal, "NOT_COMPLETE", times=2)  # the second view
    watch.send_signal(signal.SIGINT)
    with suppress(OSError):  # Linux reports the end of a terminal without a process as an error
        while os.read(terminal, 65536):
            pass
    assert watch.wait(30) == 0
    os.close(terminal)


# -- `list --follow` prints the changes of tasks as they happen ----------------------------------


def during(work: Callable[[], object], shop: Project, *options: str) -> str:
    """Return what the command prints while another thread works, until Ctrl-C."""
    threads = [threading.Timer(0.3, work), threading.Timer(1.5, ctrl_c)]
    for thread in threads:
        thread.start()
    result = shop("list", "--follow", *options)
    for thread in threads:
        thread.join()
    assert result.exit_code == 0, result.output
    return result.stdout


def ctrl_c(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


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


def test_follow_in_json_has_a_document_in_each_line(shop: Project) -> None:
    def work() -> None:
        shop.schedule("ok", body={"secret": 1}, meta={"tenant": "acme"})
        shop.schedule("ok", meta={"tenant": "other"})

    lines = during(work, shop, "--json", "--meta", "tenant=acme").splitlines()
    [document] = [json.loads(line) for line in lines]
    shown = (document["tag"], document["status"], document["meta"])
    assert shown == ("ok", "NOT_COMPLETE", {"tenant": "acme"})
    assert "secret" not in lines[0]


# -- `show`, `status` and `check` explain why tasks have not run ----------------------------------


def test_a_deferred_task_has_its_first_due_time_and_late_tasks_have_their_cause(
    shop: Project,
) -> None:
    shop.store.workers.report("w", ["default"], "prefork", 2, 0, ["ok"])
    shop.store.sweeps.begin_sweep(0, 1, 1)
    task = shop.overdue("gone")
    runner_of(shop.delays).run([Entry(task.id, 0, 0)])
    shown = shop.json("show", str(task.id))
    assert shown["due_time"] < shown["expected_time"]
    assert [each["code"] for each in shown["why"]] == ["no_processor"]
    said = shop("show", str(task.id)).stdout
    tried = "No worker could run the tag gone when it was tried"
    assert re.search(f"(?m)^{tried}: no such proc", said)
    assert re.search(rf"(?m)^{task.id} .* 1m3\ds ago", shop("list").stdout), "not its next try"
    shop.overdue("mail")
    shop.overdue("ok")
    late = [(each["queue"], each["tag"], each["reason"]) for each in shop.json("status")["late"]]
    names = [("letters", "mail", "no_worker"), ("default", "gone", "no_processor")]
    assert sorted(late) == sorted([*names, ("default", "ok", "due")])
    said = shop("status").stdout
    for pattern in (
        r"1 task of mail is overdue by up to 1m3\ds\. No live worker serves the queue letters",
        rf"1 task of gone is overdue by up to 1m3\ds\. {tried}: no such proc",
    ):
        assert re.search(f"(?m)^- {pattern}", said)
    warnings = str(shop.json("check", exit_code=1)["warnings"])
    warned = re.findall(r"late task of the tag (\w+)", warnings)
    assert warned == [tag for _, tag, code in late if code != "due"]


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


def test_only_the_busiest_hours_are_printed_and_names_have_no_effect(shop: Project) -> None:
    shop.insert(tag=HOSTILE[:100], expected_time=datetime.now(timezone.utc), delay_time=0)
    shop.store.workers.report("w", ["default", "letters"], "prefork", 2, 0)
    for hour in range(20):
        shop.schedule("mail", hour * 3600 + 1800)
    said = shop("status", "--ahead", "7d")
    assert re.search("The processes suffice. The busiest .* 2 processes busy for", said.stdout)
    assert re.search(r"and \d hours more; --json has them", said.stdout)
    assert r"without measurements: \x1b[31mred" in said.stderr
    assert not set("\x1b\x9b\u202e\r") & set(said.stdout + said.stderr)
    assert len(shop.json("status", "--ahead", "7d")["hours"]) >= 20


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


def detail(shop: Project, check: str, *arguments: str) -> str:
    """Return what the check of this name says."""
    found = json.loads(shop("status", "--probe", *arguments, "--json").stdout)["checks"]
    text: str = next(each["detail"] for each in found if each["name"] == check)
    return text


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
    assert failed(healthy, "worker") == []
    assert re.search(r"^database +ok +answers$", healthy("status", "--probe").stdout, re.MULTILINE)
    report(healthy, f"run7-ab@{HOST}", "direct/prefork")
    healthy.patch.setattr(health, "ask_broker", lambda _: "refused")
    assert failed(healthy, "worker") == ["broker"]
    assert failed(healthy, "worker", "--live") == failed(healthy, "run") == [], "it needs none"


@pytest.mark.parametrize(
    ("check", "damage"),
    [
        ("worker", lambda shop: age(shop, "workers", seen_at=60)),
        ("sweep", lambda shop: age(shop, "sweeps", swept_at=16)),
    ],
)
def test_each_fault_fails_its_own_check(
    healthy: Project, check: str, damage: Callable[[Project], None]
) -> None:
    damage(healthy)
    assert failed(healthy) == [check]


@pytest.mark.parametrize(("head", "expected"), [("9999", ["tables"]), ("0001", [])])
def test_tables_are_of_this_version_or_newer(bare: Project, head: str, expected: list[str]) -> None:
    bare("db", "upgrade")
    report(bare)
    bare.store.sweeps.begin_sweep(0, 1, 1)
    bare.patch.setattr(migrations, "head", lambda: head)
    assert failed(bare) == expected
    remedy = f"this version has {head}; run: delaytasks -A {bare.name} db upgrade\n"
    assert (remedy in bare("status", "--probe").stdout) == bool(expected)


def test_only_the_workers_of_this_host_or_of_the_name_count(healthy: Project) -> None:
    report(healthy, "w1@elsewhere")
    report(healthy, f"run7-ab@{HOST}", "direct/prefork")
    age(healthy, "workers", seen_at=60)
    report(healthy)
    assert failed(healthy, "worker", "--live") == []
    assert failed(healthy, "worker", "--live", "--name", "w1@elsewhere") == ["worker"]
    assert failed(healthy, "worker", "--live", "--name", "w2@elsewhere") == ["worker"]
    assert failed(healthy, "run", "--live") == ["worker"]
    age(healthy, "workers", seen_at=60)
    assert len(healthy.store.workers.expire(15)) == 3, "a lost one counts as a missing one"
    assert failed(healthy) == failed(healthy, "worker", "--live") == ["worker"]
    assert detail(healthy, "worker") == "none is registered"
    report(healthy, f"w2@{HOST}")
    assert failed(healthy) == failed(healthy, "worker") == []


def test_beat_is_healthy_as_long_as_its_messages_reach_a_worker(healthy: Project) -> None:
    assert failed(healthy, "beat") == failed(healthy, "beat", "--live") == []
    report(healthy, beat_s=1.0)
    found = healthy.json("status", "--probe", "beat")["checks"]
    assert [check["name"] for check in found] == ["database", "tables", "beat", "broker"]
    age(healthy, "workers", beat_at=300)
    assert failed(healthy, "beat") == failed(healthy, "beat", "--live") == ["beat"]
    report(healthy, broker_down_s=9, beat_s=300)
    assert failed(healthy, "beat", "--live") == [], "without the broker it is unknown"


def test_a_queue_with_late_tasks_and_no_worker_fails_only_the_deployment(healthy: Project) -> None:
    healthy.schedule("mail")  # its queue is letters
    healthy.schedule("ok")
    assert failed(healthy) == []
    age(healthy, "tasks", expected_time=10)
    assert failed(healthy) == [], "a worker may be restarting"
    age(healthy, "tasks", expected_time=20)
    assert failed(healthy) == ["queues"]
    assert detail(healthy, "queues") == "no live worker serves letters, where tasks are late"
    healthy.delays.policies.pause(queue="letters")
    assert failed(healthy) == []
    healthy.delays.policies.resume(queue="letters")
    assert failed(healthy, "worker") == failed(healthy, "worker", "--live") == []
    healthy.store.workers.report("w", ["*"], "prefork", 2, 0)
    assert failed(healthy) == []


def test_no_restart_is_needed_while_no_database_answers(healthy: Project, tmp_path: Path) -> None:
    healthy.delays.close()
    (tmp_path / "shop.sqlite3").write_text("no database any more")
    assert failed(healthy, "worker", "--live") == []
    assert failed(healthy, "worker") == ["database"]


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
