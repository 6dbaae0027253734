"""Run `./dev bench work` and `./dev bench networks` with one short row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import ROOT
from tests.services import redis_program

pytestmark = pytest.mark.slow


def bench(file: Path, database_url: str, *words: str) -> dict[str, dict[str, Any]]:
    """Return the values of the only row by figure and system."""
    if redis_program() is None:
        pytest.skip("there is no Redis to start")
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DELAYTASKS_", "BENCH_"))
    }
    options = ["--quick", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words, *options],
        cwd=ROOT,
        env={**others, "DELAYTASKS_BENCH_DATABASE_URL": database_url},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["failures"] == []
    assert len({figure["row"] for figure in found["figures"]}) == 1
    return {figure["figure"]: figure["values"] for figure in found["figures"]}


def test_a_row_of_work_compares_with_bare_celery(tmp_path: Path, postgresql_url: str) -> None:
    words = ["work", "--processors", "sleep:5", "--loads", "burst"]
    figures = bench(tmp_path / "found.json", postgresql_url, *words)
    assert set(figures) == {
        "drained/s",
        "share of the ideal",
        "CPU of the workers, ms per task",
        "CPU of the servers, ms per task",
        "CPU of both, ms per task",
    }
    for values in figures.values():
        assert set(values) == {"delaytasks", "celery"}
    for [share] in figures["share of the ideal"].values():
        assert 0.1 < share <= 1


def test_a_row_of_networks_has_the_round_trip_in_each_call(
    tmp_path: Path, postgresql_url: str
) -> None:
    words = ["networks", "--database", "20", "--broker", "--loads", "call"]
    figures = bench(tmp_path / "found.json", postgresql_url, *words)
    for where in ("beyond", "within"):
        values = figures[f"a call {where} the horizon, ms"]
        assert set(values) == {"delaytasks"}, "bare Celery needs no database"
        assert 20 <= values["delaytasks"][0] < 60
