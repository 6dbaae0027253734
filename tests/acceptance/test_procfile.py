"""The Procfile, as `honcho start` runs it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.user_folder import ROOT, UserFolder
from tests.waiting import wait_until

pytest.importorskip("honcho")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[UserFolder]:
    made = UserFolder(tmp_path)
    shutil.copy(ROOT / "Procfile", tmp_path)
    made.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    yield made
    made.end()


def test_the_procfile_has_a_line_for_each_process() -> None:
    lines = dict(line.split(": ", 1) for line in (ROOT / "Procfile").read_text().splitlines())
    assert list(lines) == ["worker", "beat", "flower"]
    assert all(
        f"celery -A delaytasks {name}" in lines[name] for name in ("worker", "beat", "flower")
    )


@pytest.mark.slow
def test_honcho_runs_worker_and_beat_without_configuration(folder: UserFolder) -> None:
    folder.run("db", "upgrade")
    # Without Flower, since its port may be in use on this machine.
    folder.start([sys.executable, "-m", "honcho", "start", "worker", "beat"], " ready[.]")
    id = folder.schedule("note", 1, text="noted")
    wait_until(folder.is_done(id), 30, "the task")
    folder.wait_for("beat: Starting...", 30)
    folder.stop()
    wait_until(lambda: not folder.processes(), 10, "all processes to end", every_s=0.05)
    assert folder.notes() == ["noted"]
