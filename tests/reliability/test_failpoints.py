"""Each failpoint once, in real processes. `./dev failpoints` runs all of them many times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.failpoints.catalogue import FAILPOINTS
from tests.running import marked
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
#: Failpoints that kill a whole worker, whose restart takes a second or two.
OF_MAIN = {
    "received",
    "in the pool",
    "sending back",
    "handing on",
    "near rows armed",
    "renewed",
    "occurrences written",
    "occurrences committed",
}


def test_tasks_recover_at_whatever_step_a_process_is_killed(redis_url: str) -> None:
    names = [
        failpoint.name
        for failpoint in FAILPOINTS
        if failpoint.process_kind != "main" or failpoint.name in OF_MAIN
    ]
    command = [
        sys.executable,
        "-m",
        "chaos.failpoints",
        "--seeds",
        "1",
        "--worlds",
        "2",
        "--slack",
        "10",
    ]
    command += [word for name in names for word in ("--only", name)]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=450, check=False
    )
    assert ended.returncode == 0, ended.stdout[-9000:] + ended.stderr[-3000:]
    assert f"{len(names)} faults" in ended.stdout
    assert "all within their bounds, no findings" in ended.stdout


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_a_terminated_run_ends_all_processes_that_it_started(
    tmp_path: Path, redis_url: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "chaos.failpoints",
        "--seeds",
        "10",
        "--worlds",
        "1",
        "--database",
        "sqlite",
    ]
    run = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True
    )
    try:
        wait_until(
            lambda: " ready." in "".join(log.read_text() for log in tmp_path.glob("*/*-w*.log")),
            30,
            "a worker",
        )
        run.terminate()
        assert run.wait(30) == 128 + 15
        wait_until(lambda: not marked(str(tmp_path)), 5, "a producer to make its last call")
    finally:
        run.kill()
