"""Failpoints, each once, in real processes. All of them, many times: `./dev failpoints`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from chaos.failpoints.places import PLACES

ROOT = Path(__file__).parent.parent.parent
#: Of those that end a whole worker, which takes a second or two to start again.
OF_MAIN = {"received", "in the pool", "sending back", "handing on", "near ones armed", "renewed"}


def test_all_is_well_again_wherever_a_process_is_killed(redis_url: str) -> None:
    names = [place.name for place in PLACES if place.who != "main" or place.name in OF_MAIN]
    command = [sys.executable, "-m", "chaos.failpoints", "--seeds", "1", "--worlds", "2", "--slack", "10"]
    command += [word for name in names for word in ("--only", name)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-9000:] + ended.stderr[-3000:]
    assert f"{len(names)} faults" in ended.stdout
    assert "all inside their bounds, and nothing found" in ended.stdout
