"""`delaytasks up` in an empty folder without configuration."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.user_folder import UserFolder
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
    ),
]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UserFolder]:
    started = UserFolder(tmp_path)
    yield started
    started.end()


def test_up_serves_the_console_with_a_login(up: UserFolder) -> None:
    pytest.importorskip("waitress")
    up.up("--no-flower")
    wait_until(lambda: "/ ready." in up.log(), 30, "the console", every_s=0.05)
    assert re.search(r"first user is admin with the password \S+", up.log())
    address = re.search(r"console at (http://127\.0\.0\.1:\d+)/ ready", up.log())
    assert address is not None
    with urllib.request.urlopen(address[1], timeout=10) as answer:
        assert answer.url == f"{address[1]}/login"
    assert up.stop() == 0
    assert up.processes() == {}


def test_up_runs_tasks_restarts_a_killed_worker_and_stops_cleanly(up: UserFolder) -> None:
    up.up("--no-flower", "--no-console")
    first = up.schedule("note", 1, text="first")
    wait_until(up.is_done(first), 20, "the first task")

    worker = up.pid_of(" worker ")
    os.kill(worker, signal.SIGKILL)
    up.wait_for("worker was killed by SIGKILL; it is started again in 1 s")
    wait_until(lambda: up.log().count(" ready.") == 2, 30, "the new worker", every_s=0.05)
    assert up.pid_of(" worker ") != worker
    second = up.schedule("note", 0, text="second")
    wait_until(up.is_done(second), 20, "the task after the kill")

    assert up.stop() == 0
    assert up.processes() == {}
    assert up.notes() == ["first", "second"]
    stops = re.findall(r"(\w+) stopped$", up.log(), re.MULTILINE)
    assert stops == ["beat", "worker", "all"]


def test_scheduled_tasks_survive_a_restart_of_up(up: UserFolder) -> None:
    up.up("--no-flower")
    far = up.schedule("note", 3600, text="far")
    near = up.schedule("note", 8, text="near")
    assert up.stop(signal.SIGTERM) == 0
    assert up.notes() == []

    up.up("--no-flower")
    wait_until(up.is_done(near), 30, "the task that fell due meanwhile")
    assert up.run("show", far)["status"] == "NOT_COMPLETE"
    assert up.stop() == 0


@pytest.mark.quick
def test_killing_up_itself_leaves_no_process(up: UserFolder) -> None:
    up.up("--no-flower")
    assert len(up.processes()) >= 4
    up.stop(signal.SIGKILL)
    wait_until(
        lambda: not up.processes(), 20, lambda: f"{up.processes()} to end; {up.log()}", every_s=0.05
    )


def test_the_second_ctrl_c_does_not_wait_for_a_running_task(up: UserFolder) -> None:
    up.up("--no-flower")
    id = up.schedule("slow", 0, seconds=120, text="slow")
    wait_until(lambda: up.run("show", id)["status"] == "RUNNING", 20, "the slow task to run")
    assert up.process is not None
    up.process.send_signal(signal.SIGINT)
    up.wait_for("Warm shutdown")
    assert up.stop() == 0
    assert up.processes() == {}


SHOP = """
from celery import Celery
from delaytasks import DelayTasks

app = Celery("shop")
delays = DelayTasks(app)

@delays.processor("note")
def note(body):
    with open("notes.txt", "a") as file:
        file.write(body["text"] + "\\n")
"""


@pytest.mark.quick
def test_up_runs_an_app_that_has_no_broker(up: UserFolder) -> None:
    (up.folder / "shop.py").write_text(SHOP)
    up.up("--no-flower", "--no-console", app="shop")
    export = re.search(r"in other shells: export (CELERY_BROKER_URL)=(\S+)", up.log())
    assert export is not None
    up.environ[export[1]] = export[2]
    id = up.run("-A", "shop", "schedule", "note", '{"text": "noted"}', "--delay", "1")["id"]
    wait_until(lambda: up.run("-A", "shop", "show", str(id))["status"] == "DONE", 20, "the task")
    assert up.stop() == 0
    assert up.notes() == ["noted"]


def test_flower_shows_the_tasks_that_up_runs(up: UserFolder) -> None:
    pytest.importorskip("flower")
    up.environ["FLOWER_UNAUTHENTICATED_API"] = "true"
    up.up()
    url = re.search(r"flower +(http://127\.0\.0\.1:\d+)", up.log())
    assert url is not None
    up.schedule("note", 0, text="seen")

    def seen() -> bool:
        try:
            with urllib.request.urlopen(f"{url[1]}/api/tasks", timeout=5) as answer:
                return any(task["name"] == "note" for task in json.load(answer).values())
        except urllib.error.URLError:
            return False  # it is still starting

    wait_until(seen, 30, "the task in Flower", every_s=0.2)
    assert up.stop() == 0
    assert up.processes() == {}
