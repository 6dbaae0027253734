"""Short chaos runs on private servers.

Every change has to pass `./dev chaos` without options (2,000 tasks, more than 20 kills, two
minutes). Three such runs would take too long for the tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
#: All kinds of faults in less than a minute.
SHORT = ["--tasks", "300", "--faults", "8", "--kills", "4", "--every", "1.5"]
#: The exit status of a run if a server is not available.
MISSING = 3
SITES = [("postgresql", "redis", "redis"), ("mariadb", "rabbitmq", "eta")]
SITES += [("sqlite", "redis", "eta")]


def chaos(site: Sequence[str], *options: str) -> list[str]:
    pairs = zip(("database", "broker", "timer"), site, strict=True)
    names = (word for pair in pairs for word in pair)
    named = (f"--{w}" if n % 2 == 0 else w for n, w in enumerate(names))
    return [sys.executable, "-m", "chaos", "chaos", *options, *named]


@pytest.mark.parametrize("site", SITES, ids="-".join)
def test_nothing_is_lost_early_or_run_twice_without_a_reason(site: tuple[str, str, str]) -> None:
    run = subprocess.run(chaos(site, *SHORT), cwd=ROOT, capture_output=True, text=True, timeout=300)
    if run.returncode == MISSING:
        pytest.skip(run.stdout.splitlines()[-1])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-3000:]
    assert "nothing found" in run.stdout
