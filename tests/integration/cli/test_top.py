"""`status` shows what happens by queue, tag and worker."""

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

import pytest

from delaytasks.core.interfaces import Entry
from delaytasks.storage.types import db_now_plus
from tests.integration.cli.project import HOSTILE, ROOT, Project
from tests.recording import runner_of, set_columns


@pytest.fixture
def busy(shop: Project) -> Project:
    """Return a project with tasks of each kind, and a worker."""
    shop.store.workers.report("w1@host", ["default", "letters"], "prefork", 4, 0, ["ok", "bad"])
    done, failed = shop.schedule("ok"), shop.schedule("bad")
    runner_of(shop.delays).run([Entry(done.id, 0, 0), Entry(failed.id, 0, 0)])
    overdue, running = shop.schedule("mail"), shop.schedule("ok")
    shop.schedule("ok", delay=30)
    shop.schedule("ok", delay=3600)
    set_columns(shop.store, "tasks", {"id": overdue.id}, expected_time=db_now_plus(-90))
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
    assert (worker["name"], worker["running"], worker["is_alive"]) == ("w1@host", 1, True)


def test_a_paused_tag_is_marked(busy: Project) -> None:
    busy("pause", "--tag", "mail")
    assert "mail paused" in busy("status").stdout


def test_watch_renews_the_view_of_a_terminal_until_ctrl_c(busy: Project) -> None:
    output, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    command = [sys.executable, "-m", "delaytasks", "-A", busy.name, "status", "--watch"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    watch = subprocess.Popen(
        [*command, "--every", "100ms"], stdin=end, stdout=end, stderr=end, env=environment
    )
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


def test_only_the_first_groups_are_printed(shop: Project) -> None:
    for number in range(25):
        shop.schedule(f"tag-{number}", queue=f"queue-{number}")
    assert shop("status").stdout.count("and 5 more") == 2
    assert len(shop.json("status")["live"]["tags"]) == 25


def test_untrusted_names_are_escaped(shop: Project) -> None:
    shop.schedule("ok")
    set_columns(shop.store, "tasks", tag=HOSTILE[:100])
    said = shop("status").stdout
    assert "\x1b" not in said
    assert "[red]" in said, "markup is shown as it is"


def test_capped_counts_are_marked_as_minima(busy: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not busy.json("status")["live"]["is_capped"]
    monkeypatch.setattr("delaytasks.storage.state_queries.MOST_LIVE_ROWS", 1)
    assert "minima" in busy("status").stdout


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
    assert re.match(
        rf"{at} FAILED       bad +{task.id} k1  \S+ late, took \S+, ValueError: ", lines[-1]
    )
    assert not [line for line in lines if line.startswith("forged")]


def test_follow_on_a_terminal_colors_the_status_and_no_text_of_a_task(shop: Project) -> None:
    tasks = {name: shop.schedule(name) for name in ("ok", "bad")}
    runner_of(shop.delays).run([Entry(task.id, 0, 0) for task in tasks.values()])
    shop.delays.cancel(shop.schedule("mail", 60))
    shop.schedule("mail", 60)
    lines = shop("list", "--follow", "--for", "0", color=True).stdout.splitlines()
    styled = [re.sub(r"\d\d:.{9}|\d{6,}.*", "", line) for line in lines]
    dim, bold, end = "\x1b[2m", "\x1b[1m", "\x1b[0m"
    assert sorted(styled) == sorted(
        f"{dim}{end} {color}{status:12}{end} {bold}{tag:16}{end} "
        for color, status, tag in [
            ("\x1b[32m", "DONE", "ok"),
            ("\x1b[31m", "FAILED", "bad"),
            ("\x1b[90m", "CANCELLED", "mail"),
            ("", "NOT_COMPLETE", "mail"),
        ]
    )
    assert all(line.count("\x1b") == styled[at].count("\x1b") for at, line in enumerate(lines))
    assert shop("list", "--follow", "--for", "0").stdout.count("\x1b") == 0


def test_follow_in_json_has_a_document_in_each_line(shop: Project) -> None:
    def work() -> None:
        shop.schedule("ok", body={"secret": 1}, meta={"tenant": "acme"})
        shop.schedule("ok", meta={"tenant": "other"})

    lines = during(work, shop, "--json", "--meta", "tenant=acme").splitlines()
    [document] = [json.loads(line) for line in lines]
    assert (document["tag"], document["status"]) == ("ok", "NOT_COMPLETE")
    assert document["meta"] == {"tenant": "acme"}
    assert "secret" not in lines[0]
    assert "body" not in document


def test_follow_begins_with_the_last_changes_that_are_asked_for(shop: Project) -> None:
    tasks = [shop.schedule() for _ in range(5)]
    assert len(shop("list", "--follow", "--for", "0", "--limit", "3").stdout.splitlines()) == 3
    assert shop("list", "--follow", "--for", "0", "--limit", "0").stdout == ""
    assert str(tasks[-1].id) in shop("list", "--follow", "--for", "0").stdout


def test_follow_without_tables_is_an_error(bare: Project) -> None:
    assert "db upgrade" in bare.error("list", "--follow", "--for", "0", exit_code=1)["error"]
