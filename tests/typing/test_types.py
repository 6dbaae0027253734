"""The API has the types that mypy reports for a user's code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("module", ["api_user.py", "async_user.py", "handle_user.py"])
def test_a_users_code_has_the_types_it_was_promised(module: str) -> None:
    pytest.importorskip("mypy")
    command = ["mypy", "--strict", "--config-file", "pyproject.toml", "--warn-unused-ignores"]
    _check([sys.executable, "-m", *command, str(HERE / module)])


@pytest.mark.parametrize("module", ["async_user.py", "handle_user.py"])
def test_pyright_infers_the_same_types(module: str, tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    settings = {
        "include": [str(HERE / module)],
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "enableTypeIgnoreComments": True,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    python = ["--pythonpath", sys.executable]
    _check([sys.executable, "-m", "basedpyright", "--project", str(tmp_path), *python])


def _check(command: list[str]) -> None:
    checked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
