"""Both type checkers find in the modules `*_user.py` the types that users were promised.

A method whose types are plain annotations needs no line there: mypy in strict mode requires them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODULES = sorted(HERE.glob("*_user.py"))


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
