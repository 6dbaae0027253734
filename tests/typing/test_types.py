"""The API has the types that mypy reports for a user's code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import delaytasks

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def test_a_users_code_has_the_types_it_was_promised(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    root = HERE.parents[1]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file",
        str(root / "pyproject.toml"),
    ]
    command += [
        "--warn-unused-ignores",
        "--cache-dir",
        str(root / ".mypy_cache"),
        str(HERE / "api_user.py"),
    ]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_public_names_are_these() -> None:
    assert sorted(delaytasks.__all__) == [
        "Attempt",
        "AuditEntry",
        "BulkResult",
        "Cancel",
        "CancelResult",
        "DelayTask",
        "DelayTaskError",
        "DelayTasks",
        "Done",
        "Fail",
        "LEVELS",
        "NOTIFY",
        "NewTask",
        "Page",
        "Policy",
        "Retry",
        "RetrySchedule",
        "Snooze",
        "Status",
        "attempts",
        "audit",
        "cancel",
        "cancel_many",
        "clear_policy",
        "find",
        "get",
        "new_id",
        "pause",
        "policies",
        "processor",
        "reschedule",
        "reschedule_many",
        "resume",
        "retry",
        "retry_many",
        "schedule_at",
        "schedule_callback",
        "schedule_delay",
        "schedule_many",
        "schedule_message",
        "set_policy",
        "shard_for",
        "touch",
        "touch_many",
    ]
    for name in delaytasks.__all__:
        assert getattr(delaytasks, name).__doc__, f"{name} is documented"
