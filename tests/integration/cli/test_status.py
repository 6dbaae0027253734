"""`status` shows what happens by queue, tag and worker, and why tasks have not run."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import text

from delaytasks import NewTask
from delaytasks.db.types import db_now_plus
from delaytasks.model.task import Entry
from tests.doc_pages import block_beginning
from tests.integration.cli.project import HOSTILE, ROOT, Project
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
    return shop


def test_the_document_counts_by_queue_tag_and_worker(busy: Project) -> None:
    document = busy.json("status")
    found = document["live"]
    assert (found["running"], found["overdue"], found["soon"], found["ended"]) == (1, 1, 1, 2)
    assert found["failed"] == 1
    tags = {tag["name"]: tag for tag in found["tags"]}
    assert next(iter(tags)) == "mail", "the overdue tag is the first"
    assert 89 < tags["mail"]["oldest_overdue_s"] < 120
    assert (tags["ok"]["running"], tags["ok"]["workers"], tags["mail"]["workers"]) == (1, 1, 0)
    assert 0 <= tags["bad"]["lateness_p99_s"] < 60
    queues = {queue["name"]: queue for queue in found["queues"]}
    assert (queues["letters"]["overdue"], queues["letters"]["workers"]) == (1, 1)
    [worker] = document["workers"]
    assert (worker["name"], worker["is_alive"]) == ("w1@host", True)


def test_watch_renews_the_view_of_a_terminal_until_ctrl_c(busy: Project) -> None:
    output, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    code = "from delaytasks.cli import status; status.EVERY_S = 0.1; "
    code += "from delaytasks.cli.main import main; main()"
    command = [sys.executable, "-c", code, "-A", busy.name, "status", "--watch"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    watch = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    said = b""
    while said.count(b" lines more") < 2:  # the second view
        said += os.read(output, 65536)
    watch.send_signal(signal.SIGINT)
    with suppress(OSError):  # Linux reports the end of a terminal without a process as an error
        while os.read(output, 65536):
            pass
    assert watch.wait(30) == 0
    os.close(output)
    assert b"NOT_COMPLETE" in said


def test_paused_tags_cuts_and_untrusted_names_are_shown(busy: Project) -> None:
    assert not busy.json("status")["live"]["is_capped"]
    busy("pause", "--tag", "mail")
    assert re.search("^mail +yes ", busy("status").stdout, re.MULTILINE)
    for number in range(25):
        busy.schedule(f"tag-{number}", queue=f"queue-{number}")
    assert re.findall(r"and \d more", busy("status").stdout) == ["and 7 more", "and 8 more"]
    busy.patch.setattr("delaytasks.operate.state.MOST_ROWS", 1)
    assert "minima" in busy("status").stdout
    set_columns(busy.store, "tasks", tag=HOSTILE[:100])
    said = busy("status").stdout
    assert "\x1b" not in said
    assert "[red]" in said, "markup is shown as it is"


# -- `list --follow` prints the changes of tasks as they happen ----------------------------------


def during(work: Callable[[], object], shop: Project, *options: str) -> str:
    """Return what the command prints while another thread works."""
    thread = threading.Timer(0.3, work)
    thread.start()
    result = shop("list", "--follow", "--for", "1500ms", *options)
    thread.join()
    assert result.exit_code == 0, result.output
    return result.stdout


def test_follow_prints_a_line_for_each_change(shop: Project) -> None:
    task = shop.schedule("bad", key="k1")
    lines = during(lambda: runner_of(shop.delays).run([Entry(task.id, 0, 0)]), shop).splitlines()
    at = r"[0-9:]{8}\.[0-9]{3}"
    assert re.fullmatch(rf"{at} NOT_COMPLETE bad +{task.id} k1  due now", lines[0])
    failed = rf"{at} FAILED       bad +{task.id} k1  \S+ late, took \S+, ValueError: "
    assert re.match(failed, lines[-1])
    assert not [line for line in lines if line.startswith("forged")]
    on_a_terminal = shop("list", "--follow", "--for", "0", color=True).stdout
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


def test_show_begins_with_each_reason_and_its_remedy(shop: Project) -> None:
    task = shop.overdue(key="k1")
    shop("pause", "--tag", "ok", "--actor", "ann")
    said = shop("show", str(task.id)).stdout.splitlines()
    assert said[0] == f"task {task.id} (ok): NOT_COMPLETE"
    assert said[1].startswith("The tag ok is paused by ann since 20")
    assert said[2] == f"  → To resume it: delaytasks -A {shop.name} resume --tag ok"
    assert said[3].startswith("No live worker serves the queue default")
    reasons = shop.json("show", "--tag", "ok", "--key", "k1")["why"]
    assert [each["code"] for each in reasons] == ["paused", "no_worker"]


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


def test_the_busiest_hour_is_shown_with_its_share_of_the_hour(shop: Project) -> None:
    at = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0) + timedelta(days=2)
    shop.delays.schedule_many(NewTask("mail", n, at=at) for n in range(1200))
    shop.store.workers.report("w", ["default", "letters"], "prefork", 2, 0)
    said = shop("status", "--ahead", "7d")
    busy = f"{at:%a %Y-%m-%dT%H:%M:%SZ}: 1,200 tasks of mail keep 2 processes busy for 30s.\n"
    assert f"The processes suffice. The busiest hour is {busy}" in said.stdout
    document = shop.json("status", "--ahead", "7d", "--processes", "1")
    *_, hour = document["hours"]
    assert (hour["due"], hour["start"], hour["busy_s"]) == (1200, at.isoformat(), 60.0)


def test_only_the_busiest_hours_are_printed_and_names_have_no_effect(shop: Project) -> None:
    shop.insert(tag=HOSTILE[:100], expected_time=datetime.now(timezone.utc), delay_time=0)
    for hour in range(20):
        shop.schedule("mail", hour * 3600 + 1800)
    said = shop("status", "--ahead", "7d")
    assert re.search(r"and \d hours more; --json has them", said.stdout)
    assert r"without measurements: \x1b[31mred" in said.stderr
    assert not set("\x1b\x9b\u202e\r") & set(said.stdout + said.stderr)
    assert len(shop.json("status", "--ahead", "7d")["hours"]) >= 20
