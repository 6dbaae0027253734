"""`run` runs overdue tasks in this process; commands under Celery, in pipes and without tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from delaytasks import Status
from delaytasks.db.types import db_now_plus
from tests.integration.cli.conftest import RUN, Project
from tests.running import ROOT, clean_environment
from tests.services import free_port
from tests.world.recording import set_columns


def test_run_recovers_and_runs_overdue_tasks_without_a_broker_and_no_others(shop: Project) -> None:
    shop.patch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    lost = shop.schedule()
    shop.store.claims("dead", None).claim_due("default", [0], 1)
    set_columns(shop.store, "tasks", lease_until=db_now_plus(-1))
    # What a processor prints is not in the document.
    overdue = [lost] + [shop.schedule("noisy", priority=number % 3) for number in range(30)]
    mail, failed, unknown = (shop.schedule(tag) for tag in ("mail", "bad", "nobody's"))
    later = shop.schedule(delay=60)
    assert shop.json("run", "--queue", "letters")["succeeded"] == 1
    assert [task.id for task in shop.delays.find(status="DONE")] == [mail.id]
    answer = shop.json("run")
    assert answer.pop("seconds") >= 0
    ended = {"succeeded": 31, "failed": 1, "is_stopped": False}
    assert answer == {"claimed": 33, "failed_chunks": 0, **ended}
    assert {shop.status(task) for task in overdue} == {Status.DONE}
    assert shop.status(failed) is Status.FAILED
    assert shop.status(unknown) is shop.status(later) is Status.NOT_COMPLETE
    for tag in ("ok", "bad"):
        shop.schedule(tag)
    said = shop("run").stdout.splitlines()
    assert re.fullmatch(r"took 2 tasks in \S+: 1 DONE, 1 FAILED", said[0])


@pytest.mark.slow
def test_run_gives_up_a_database_that_refuses_claims(shop: Project) -> None:
    task = shop.schedule()
    refuse = f"""CREATE TRIGGER refuse BEFORE UPDATE ON {shop.store.schema.tasks.name}
        WHEN NEW.status = {Status.RUNNING:d} BEGIN SELECT RAISE(ABORT, 'not today'); END"""
    with shop.store.database.begin() as connection:
        connection.execute(text(refuse))
    assert shop.json("run", exit_code=1)["failed_chunks"] > 0
    with shop.store.database.begin() as connection:
        connection.execute(text("DROP TRIGGER refuse"))
    sys.modules.pop(shop.name).delays.close()
    assert shop.json("run")["succeeded"] == 1
    assert shop.status(task) is Status.DONE


def test_run_renews_the_lease_of_a_long_task(shop: Project) -> None:
    shop.patch.setenv("DELAYTASKS_LEASE", "0.9")
    sys.modules.pop(shop.name).delays.close()
    shop.schedule("long")
    assert shop.json("run")["succeeded"] == 1


def test_ctrl_c_stops_it_after_the_current_chunk(shop: Project) -> None:
    shop.patch.setenv("DELAYTASKS__CHUNK_MAX", "10")
    for _ in range(31):
        shop.schedule("stop")
    answer = shop.json("run", exit_code=1)
    assert answer["is_stopped"]
    assert 1 <= answer["succeeded"] <= 10
    assert len(shop.delays.find(status="NOT_COMPLETE")) == 31 - answer["succeeded"]
    assert shop.json("run")["succeeded"] == 31 - answer["succeeded"]


@pytest.mark.slow
def test_celery_has_the_same_commands_with_its_own_app(shop: Project) -> None:
    task = shop.schedule(delay=60)
    shown = shop.process("-m", "celery", "-A", shop.name, "delays", "show", str(task.id))
    out, err = shown.communicate(timeout=30)
    assert shown.returncode == 0, err
    assert f"Start a worker: celery -A {shop.name} worker" in out


def test_a_pipe_that_closes_early_causes_no_error_message(shop: Project) -> None:
    shop.delays.schedule_many(("ok", None, 60) for _ in range(100))
    with shop.process("-c", RUN, "-A", shop.name, "list") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""


# -- A command in a folder without a database exits with an error and creates no files ------------


READING = """list,status,check,show 7,check --settings,log,db upgrade --check,limit,cancel 7,
    rerun 7,reschedule 7 --delay 5,schedule hello {} --delay 5,db upgrade --to base --yes"""
#: Runs commands one after the other, since a process for each would take long to start.
SCRIPT = """
import json, sys
from click.testing import CliRunner
from delaytasks.cli.main import main
for command in sys.argv[1].split(","):
    said = CliRunner().invoke(main, command.split(), prog_name="delaytasks")
    print(json.dumps([command, said.exit_code, said.stderr]))
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    pipes: Any = {"capture_output": True, "text": True, "timeout": 60}
    own = clean_environment(PYTHONPATH=str(ROOT))
    return subprocess.run([sys.executable, *command], cwd=folder, env=own, **pipes)


@pytest.mark.slow
def test_only_a_migration_makes_the_database(tmp_path: Path) -> None:
    lines = run(tmp_path, "-c", SCRIPT, READING).stdout.splitlines()
    assert len(lines) == READING.count(",") + 1
    assert list(tmp_path.iterdir()) == []
    for command, exit_code, said in map(json.loads, lines):
        assert "Traceback" not in said
        if not command.endswith(("--settings", "--check")):
            assert exit_code == 1, command
            assert f"there is no database {tmp_path}/.delaytasks/delays.sqlite3" in said
            assert "delaytasks -A APP" in said
            assert "delaytasks db upgrade" in said
