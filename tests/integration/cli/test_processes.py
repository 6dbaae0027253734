"""Test the commands as processes: under Celery, and in shell pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli.project import ROOT, RUN, Project

pytestmark = pytest.mark.slow


def test_celery_has_the_same_commands_with_its_own_app(shop: Project) -> None:
    assert 'delays = "delaytasks.cli.main:delays"' in (ROOT / "pyproject.toml").read_text()
    ids = [str(shop.schedule(delay=60 + number).id) for number in range(3)]

    def said(*words: str, exit_code: int = 0) -> tuple[str, str]:
        running = shop.process("-m", "celery", "-A", shop.name, "delays", *words)
        out, err = running.communicate(timeout=30)
        assert running.returncode == exit_code, err
        return out, err

    listed, _ = said("list", "--oldest-first", "--json")
    assert [task["id"] for task in json.loads(listed)["tasks"]] == ids
    _, more = said("list", "--limit", "1")
    assert "--cursor " in more
    shown, _ = said("show", ids[0])
    assert f"Start a worker: celery -A {shop.name} worker" in shown
    out, err = said("show", "5", "--json", exit_code=1)
    assert (out, json.loads(err)["type"]) == ("", "TaskNotFoundError")


@pytest.mark.quick
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_pipe_that_closes_early_causes_no_error_message(shop: Project, option: list[str]) -> None:
    shop.delays.schedule_many(("ok", None, 60) for _ in range(100))
    with shop.process("-c", RUN, "-A", shop.name, "list", *option) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == ""


def test_with_json_the_log_is_not_written_to_stderr(shop: Project) -> None:
    for option in ([], ["--json"]):
        shop.schedule("bad")
        _, err = shop.process("-c", RUN, "-A", shop.name, "run", *option).communicate(timeout=30)
        assert ("task.failed" in err) is not bool(option), err


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
    ours = ("DELAYTASKS_", "CELERY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder, env=kept, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


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


def test_a_first_upgrade_of_the_default_database_says_how_to_choose_another(tmp_path: Path) -> None:
    upgrade = "-m delaytasks db upgrade".split()
    made = run(tmp_path, *upgrade)
    assert f"upgraded sqlite:///{tmp_path}/.delaytasks/delays.sqlite3" in made.stdout
    assert made.stderr.startswith("This is the default database of this folder. For the database")
    assert run(tmp_path, *upgrade).stderr == ""
    (tmp_path / "manage.py").touch()
    assert "python manage.py migrate" in run(tmp_path, *upgrade).stderr
