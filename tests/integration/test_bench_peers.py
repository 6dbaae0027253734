"""Test `./dev bench --peers` with the installed peers; the tests install nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import environment
from benchmarks.peers.catalogue import SYSTEMS
from benchmarks.processes import ROOT
from tests.services import redis_program

pytestmark = pytest.mark.slow


def _one() -> str:
    installed = [
        s.name for s in SYSTEMS.values() if s.runs_on != "own" and environment.is_installed(s)
    ]
    if not installed:
        pytest.skip("no peer is installed: ./dev bench --peers installs them")
    return installed[0]


def test_a_peer_is_measured_together_with_this_project(tmp_path: Path, postgresql_url: str) -> None:
    if redis_program() is None:
        pytest.skip("there is no Redis to start")
    name, file = _one(), tmp_path / "found.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "call",
        "burst",
        "--quick",
        "--json",
        str(file),
        "--peers",
        name,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**_plain(), "DELAYTASKS_BENCH_DATABASE_URL": postgresql_url},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["failures"] == []
    values = {figure["name"]: figure["values"] for figure in found["figures"]}
    for measure in ("call", "burst"):
        assert set(values[measure]) == {"delaytasks", name}
        assert all(value > 0 for rounds in values[measure].values() for value in rounds)


def test_each_peer_has_pinned_versions_and_a_program() -> None:
    for system in SYSTEMS.values():
        if system.runs_on == "python":
            lines = environment.requirements(system.name)
            assert lines, system.name
            assert all("==" in line for line in lines), system.name
            assert environment.version(system), system.name
            assert (ROOT / "benchmarks" / "peers" / "programs" / f"{system.name}.py").exists()
        if system.runs_on == "node":
            assert environment.version(system)[0].isdigit()
            assert environment.BULLMQ.exists()


def test_a_peer_that_cannot_be_installed_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "FOLDER", tmp_path)
    monkeypatch.setattr(environment, "_stamps", tmp_path / "installed.json")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(environment.NotInstalledError, match="Node is required"):
        environment.install(SYSTEMS["bullmq"], print)
    with pytest.raises(environment.NotInstalledError, match=r"pip install: .*no_such_package"):
        environment._call(
            [sys.executable, "-m", "pip", "install", "--no-index", "no_such_package==1"],
            "pip install",
        )


def test_the_error_about_an_unknown_peer_names_the_known_ones() -> None:
    command = [sys.executable, "-m", "benchmarks", "--peers", "sidekiq"]
    done = subprocess.run(
        command, cwd=ROOT, env=_plain(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "sidekiq" in done.stderr
    assert "pgqueuer" in done.stderr


def _plain() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DELAYTASKS_", "BENCH_"))
    }
