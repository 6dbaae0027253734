"""The API has the types that mypy reports for a user's code."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import delaytasks
from delaytasks import api
from delaytasks.core import errors

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


#: The public names, without the errors.
VALUES = """
Attempt AuditEntry BulkResult Cancel CancelResult DelayTask DelayTasks Done Fail LEVELS LogFormatter
NOTIFY NewTask Page Policy Processor Retry RetrySchedule Shards Snooze Status TouchResult
""".split()
FUNCTIONS = """
apply_async attempts audit cancel cancel_many clear_policy find get new_id pause policies
processor rerun rerun_many reschedule reschedule_many resume schedule_at schedule_callback
schedule_delay schedule_many schedule_message set_policy touch touch_many
using wait
""".split()


def test_the_public_names_are_these() -> None:
    public = set(delaytasks.__all__) - set(errors.__all__)
    twins = {name for name in api.__all__ if inspect.iscoroutinefunction(getattr(api, name))}
    assert sorted(public - twins) == [*VALUES, *FUNCTIONS]
    for name in delaytasks.__all__:
        assert getattr(delaytasks, name).__doc__, f"{name} is documented"
