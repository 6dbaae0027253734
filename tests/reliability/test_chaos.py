"""A short run of chaos, on servers of its own. A longer one is `./dev chaos`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
#: Killed, frozen, emptied, restarted: about a minute of it.
FAULTS = "8"


@pytest.mark.parametrize(("database", "timer"), [("postgresql", "eta"), ("sqlite", "redis")])
def test_nothing_is_lost_early_or_run_twice_without_a_reason(database: str, timer: str, redis_url: str) -> None:
    command = [sys.executable, "-m", "chaos", "--tasks", "300", "--faults", FAULTS, "--every", "1.5"]
    command += ["--database", database, "--timer", timer]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    assert "nothing found" in ended.stdout
