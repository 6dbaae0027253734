"""The modules `*_user.py` use every public name, and both type checkers agree about their types."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import delaytasks
from delaytasks import DelayTasks, Processor, RetrySchedule, Shards, callbacks, testing

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = sorted(HERE.glob("*_user.py"))
#: The parts of a `DelayTasks` whose methods are public as well.
PARTS = ("bulk", "policies", "callbacks", "recurring")


def public(owner: object) -> list[str]:
    """Return the public names of a class, without the twins, whose types follow from the others."""
    names = [name for name in dir(owner) if not name.startswith("_")]
    return [name for name in names if not (name[0] == "a" and name[1:] in names)]


def test_each_public_name_is_used() -> None:
    text = "\n".join(module.read_text() for module in MODULES)
    names = [f"\\b{name}" for name in delaytasks.__all__ + testing.__all__ + callbacks.__all__]
    for owner in (DelayTasks, Processor, RetrySchedule, Shards, testing.DelaysTester):
        names += [f"\\.{name}" for name in public(owner)]
    delays = DelayTasks.__new__(DelayTasks)
    for part in PARTS:
        names += [f"\\.{part}\\.{name}" for name in public(type(getattr(delays, part)))]
    assert [name for name in dict.fromkeys(names) if not re.search(rf"{name}\b", text)] == []


def test_mypy_infers_the_types_that_users_were_promised() -> None:
    pytest.importorskip("mypy")
    command = ["mypy", "--strict", "--config-file", "pyproject.toml", "--warn-unused-ignores"]
    _check([sys.executable, "-m", *command, *map(str, MODULES)])


def test_pyright_in_strict_mode_infers_the_same_types(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    settings = {
        "include": [*map(str, MODULES)],
        "typeCheckingMode": "strict",
        "reportMissingTypeStubs": "none",  # Celery has none
        "reportUnnecessaryTypeIgnoreComment": "error",
        "enableTypeIgnoreComments": True,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    python = ["--pythonpath", sys.executable]
    _check([sys.executable, "-m", "basedpyright", "--project", str(tmp_path), *python])


def _check(command: list[str]) -> None:
    checked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
