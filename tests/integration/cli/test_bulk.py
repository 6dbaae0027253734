"""`cancel`, `reschedule` and `rerun` change many tasks, and `log` lists these operations."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from delaytasks.operate import task_calls as bulk
from tests.integration.cli.project import HOSTILE, RUN, Project
from tests.waiting import wait_until


def test_cancel_counts_first_and_cancels_with_yes(shop: Project) -> None:
    tasks = [shop.schedule(delay=60, key=f"eu-{n}") for n in range(3)]
    other = shop.schedule("mail", 60)
    counted = shop.json("cancel", "--tag", "ok", "--dry-run")
    dry = {"matched": 3, "changed": 0, "refused": 0, "runs": [], "state": "dry run"}
    assert counted == dry
    assert {shop.status(task) for task in tasks} == {Status.NOT_COMPLETE}
    said = shop("cancel", "--key", "eu-*", "--yes")
    assert (said.exit_code, said.stdout, said.stderr) == (0, "cancelled 3 tasks\n", "")
    assert {shop.status(task) for task in tasks} == {Status.CANCELLED}
    assert shop.status(other) is Status.NOT_COMPLETE


def test_running_tasks_are_left_and_reported_or_asked_to_stop(shop: Project) -> None:
    for _ in range(3):
        shop.schedule()
    [claimed] = shop.store.claims("w", None).claim_due("default", [0], 1)
    id = str(claimed.id)
    counted = shop("cancel", "--tag", "ok", "--dry-run")
    assert counted.stdout == "2 tasks would be cancelled\n"
    assert counted.stderr == "left as they are: 1 task (they run)\n"
    assert shop.error("cancel", id, exit_code=1)["type"] == "TaskStateError"
    assert shop.json("cancel", "--everything", "--yes")["refused"] == 1
    assert shop.json("cancel", id, "--running")["requested"] == [id]
    assert "runs, and is asked to stop" in shop("cancel", id, "--running").stdout
    assert shop.delays.get(claimed).cancel_request == 1


def test_ids_and_filters_that_are_given_together_must_both_match(shop: Project) -> None:
    first, second, other = (str(shop.schedule(delay=60 + n).id) for n in range(3))
    assert shop("cancel", first, second, "--dry-run").stdout == "2 tasks would be cancelled\n"
    for change in (("--jitter", "1m"), ("--by", "1m")):
        assert shop.json("reschedule", first, second, *change, "--yes")["changed"] == 2
    assert shop.json("cancel", other, "--tag", "mail", "--yes")["changed"] == 0
    assert shop.json("cancel", first, second, "--tag", "ok", "--yes")["changed"] == 2
    assert len(shop.json("list", first, second, "--tag", "ok")["tasks"]) == 2
    rerun = shop.json("rerun", first, second, "--status", "CANCELLED", "--yes")
    assert (rerun["changed"], shop.delays.get(other).version) == (2, 0)


def dues(shop: Project, tasks: Sequence[DelayedTask]) -> set[str]:
    return {shop.delays.get(task).expected_time.isoformat() for task in tasks}


def wait_for_a_later_time(shop: Project, tasks: Sequence[DelayedTask]) -> None:
    """Wait until the clock of the database is later than the last change of the tasks."""
    changed = max(found for task in tasks if (found := shop.delays.get(task).update_time))
    wait_until(lambda: shop.store.database.now() > changed, 5, "time")


def test_reschedule_sets_or_shifts_the_due_times_of_many_tasks(shop: Project) -> None:
    tasks = [shop.schedule(delay=delay, queue="reports") for delay in (60, 120)]
    shop.json("reschedule", "--queue", "reports", "--at", "2031-01-01T00:00:00Z", "--yes")
    assert dues(shop, tasks) == {"2031-01-01T00:00:00+00:00"}
    wait_for_a_later_time(shop, tasks)
    said = shop("reschedule", "--queue", "reports", "--by", "-1h30m", "--yes").stdout
    assert said == "rescheduled 2 tasks\n"
    assert dues(shop, tasks) == {"2030-12-31T22:30:00+00:00"}
    shop("reschedule", "--due", "2030-01-01T00:00:00Z..", "--jitter", "10m", "--yes")
    assert len(dues(shop, tasks)) == 2, "a peak is distributed"


def test_log_lists_the_actor_the_action_and_the_progress(shop: Project) -> None:
    assert shop("log").stderr == "No operations yet.\n"
    shop.patch.setenv("LOGNAME", f"ann{HOSTILE}")
    shop.schedule(delay=60)
    shop("cancel", "--tag", "ok", "--yes")
    shop.delays.bulk.cancel(ids=range(1, 51))
    newest, first = shop.json("log")
    shown = [first[name] for name in ("action", "state", "matched", "changed", "filter")]
    assert shown == ["cancel", "done", 1, 1, {"tag": "ok"}]
    assert len(newest["filter"]["ids"]) == 50
    said = shop("log").stdout
    assert all(line.isprintable() for line in said.splitlines()), said
    assert r"ann\x1b[31mred" in said
    assert '"1, 2, 3 and 47 more"' in said
    assert len(shop("log", "--limit", "1").stdout.splitlines()) == 2


# -- at a terminal --------------------------------------------------------------------------------


def at_terminal(name: str, *args: str) -> tuple[subprocess.Popen[bytes], Callable[[str], str], int]:
    """Start the command on a pseudo-terminal.

    Return the process, a function that waits for a text, and the file descriptor of its input.
    """
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, "-A", name, *args]
    path = os.pathsep.join([*sys.path, os.getcwd()])
    env = {**os.environ, "PYTHONPATH": path, "TERM": "xterm"}
    child = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    said = ""

    def until(text: str) -> str:
        nonlocal said
        while text not in said:
            try:
                said += os.read(ours, 4096).decode(errors="replace")
            except OSError:
                # Linux raises an error when the process has closed its terminal.
                raise AssertionError(f"ended without {text!r}: {said}") from None
        return said

    return child, until, ours


@pytest.mark.parametrize(("typed", "status"), [("n", Status.NOT_COMPLETE), ("y", Status.CANCELLED)])
def test_a_bulk_command_shows_the_count_and_asks(shop: Project, typed: str, status: Status) -> None:
    tasks = [shop.schedule(delay=60) for _ in range(3)]
    running, until, terminal = at_terminal(shop.name, "cancel", "--tag", "ok")
    assert "3 tasks would be cancelled. Go on? [y/N]" in until("[y/N]")
    os.write(terminal, f"{typed}\n".encode())
    out, _ = running.communicate(timeout=30)
    os.close(terminal)
    assert {shop.status(task) for task in tasks} == {status}
    assert (running.returncode, out) == ((0, b"cancelled 3 tasks\n") if typed == "y" else (1, b""))


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Interrupt each bulk command in its first step of two rows, until the patch is undone."""
    step: Any = bulk.BulkRun._step

    def stopped(run: Any, ids: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return step(run, ids)

    monkeypatch.setattr(bulk, "BULK_ROWS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(bulk.BulkRun, "_step", stopped)
        yield patch


def test_a_stopped_shift_prints_how_to_go_on(shop: Project, ctrl_c: pytest.MonkeyPatch) -> None:
    tasks = [shop.schedule(delay=3600 + n) for n in range(6)]
    wait_for_a_later_time(shop, tasks)
    said = shop("reschedule", "--tag", "ok", "--by", "1h", "--yes")
    assert said.exit_code == 1
    hint = "stopped: rescheduled 2 of 6 tasks; to go on run it again, with "
    more = said.stdout.removeprefix(hint).split()
    assert (said.stdout.startswith(hint), len(more)) == (True, 2), said.stdout
    ctrl_c.undo()
    rest = shop.json("reschedule", "--tag", "ok", "--by", "1h", "--yes", *more)
    assert rest["changed"] == 4
    shifts = {shop.delays.get(task).expected_time - task.expected_time for task in tasks}
    assert shifts == {timedelta(hours=1)}


def test_rerun_runs_the_tasks_of_a_cancel_again(shop: Project) -> None:
    tasks = [shop.schedule(delay=3600) for _ in range(2)]
    shop("cancel", "--tag", "ok", "--yes")
    again = ("rerun", "--entry", shop.json("log")[0]["id"])
    assert shop(*again, "--dry-run").stdout == "2 tasks would be rerun\n"
    assert shop.json(*again, "--yes")["changed"] == 2
    assert {shop.status(task) for task in tasks} == {Status.NOT_COMPLETE}
    said = shop(*again, "--yes")
    assert said.stdout == "rerun 0 tasks\n"
    assert "left as they are: 2 tasks" in said.stderr


def test_list_and_cancel_take_several_statuses_and_meta(shop: Project) -> None:
    for tenant in ("acme", "other"):
        shop.json("schedule", "ok", "--delay", "1h", "--meta", f"tenant={tenant}", "--meta", "a=b")
    shop.json("schedule", "ok", "--delay", "1h")
    found = shop.json("list", "--meta", "tenant=acme", "--meta", "a=b", "--queue", "default")
    assert [task["meta"] for task in found["tasks"]] == [{"tenant": "acme", "a": "b"}]
    assert shop.json("cancel", "--meta", "tenant=acme", "--yes")["changed"] == 1
    both = ["--status", "CANCELLED", "--status", "NOT_COMPLETE"]
    assert len(shop.json("list", *both)["tasks"]) == 3
    assert len(shop.json("list", *both, "--meta", "a=b")["tasks"]) == 2
