"""A command in a folder without a database exits with an error and creates no files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

READING = [
    ["list"], ["stats"], ["check"], ["show", "7"], ["config"], ["db", "current"], ["audit"],
    ["policy", "list"], ["encryption", "status"], ["cancel", "7"], ["rerun", "7"],
    ["reschedule", "7", "--delay", "5"],
    ["schedule", "hello", "{}", "--delay", "5"], ["db", "downgrade", "--yes"],
]  # fmt: skip


def delaytasks(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DELAYTASKS_", "CELERY_"))
    }
    command = [sys.executable, "-m", "delaytasks", *words]
    return subprocess.run(
        command, cwd=folder, env={**kept, **environ}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_only_a_migration_makes_the_database(tmp_path: Path, words: list[str]) -> None:
    said = delaytasks(tmp_path, *words)
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in said.stderr
    if words[0] not in ("config",) and words != ["db", "current"]:
        assert said.returncode == 1
        assert f"there is no database {tmp_path}/.delaytasks/delays.sqlite3" in said.stderr
        assert "delaytasks -A APP" in said.stderr
        assert "delaytasks db upgrade" in said.stderr


def test_a_file_that_is_named_and_not_there_is_not_made_either(tmp_path: Path) -> None:
    said = delaytasks(tmp_path, "list", DELAYTASKS_DATABASE_URL="sqlite:///shop/typo.db")
    assert (said.returncode, list(tmp_path.iterdir())) == (1, [])
    assert f"there is no database {tmp_path}/shop/typo.db" in said.stderr
    made = delaytasks(tmp_path, "db", "upgrade", DELAYTASKS_DATABASE_URL="sqlite:///shop/typo.db")
    assert (made.returncode, made.stderr) == (0, "")
    assert (tmp_path / "shop" / "typo.db").stat().st_mode & 0o777 == 0o600
    assert (
        delaytasks(tmp_path, "list", DELAYTASKS_DATABASE_URL="sqlite:///shop/typo.db").returncode
        == 0
    )


def test_a_first_upgrade_of_the_default_database_says_how_to_choose_another(tmp_path: Path) -> None:
    made = delaytasks(tmp_path, "db", "upgrade")
    assert f"upgraded sqlite:///{tmp_path}/.delaytasks/delays.sqlite3" in made.stdout
    assert made.stderr.startswith("This is the default database of this folder. For the database")
    assert delaytasks(tmp_path, "db", "upgrade").stderr == ""
    (tmp_path / "manage.py").touch()
    assert "python manage.py migrate" in delaytasks(tmp_path, "db", "upgrade").stderr
