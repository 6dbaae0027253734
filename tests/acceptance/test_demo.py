"""The first command of a newcomer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.name != "posix", reason="it kills processes")
def test_the_demo_loses_nothing_and_says_so_within_a_minute(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    environ = {**os.environ, "COLUMNS": "100", "CELERY_BROKER_URL": "redis://nobody:1/0"}
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--svg", str(picture)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9 of worker" in done.stdout
    assert "at the second attempt" in done.stdout
    assert "Nothing was lost, nothing ran early." in done.stdout
    svg = picture.read_text()
    assert svg.startswith("<svg")
    assert "@font-face" not in svg, "the picture loads nothing from another host"
