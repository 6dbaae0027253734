"""The environment of the peers, .bench-peers/ in the repository, isolated from the project's
dependencies.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from benchmarks.peers.catalogue import System
from benchmarks.processes import ROOT

FOLDER = ROOT / ".bench-peers"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PACKAGE_JSON = Path(__file__).with_name("package.json")
BULLMQ = Path(__file__).parent / "programs" / "bullmq.mjs"
INSTALL_S = 600.0

_venv = FOLDER / "venv"
_node = FOLDER / "node"
_stamps = FOLDER / "installed.json"
_python = _venv / ("Scripts" if os.name == "nt" else "bin") / "python"


class NotInstalledError(Exception):
    """A peer cannot be measured on this machine; the text has the reason."""


def launcher(system: System) -> tuple[str, ...]:
    """Return the command prefix of the system's programs."""
    if system.runs_on == "node":
        return (shutil.which("node") or "node", str(BULLMQ))
    return (sys.executable if system.runs_on == "own" else str(_python), "-m")


def variables(system: System) -> dict[str, str]:
    """Return the environment variables of its processes, except the URLs of servers."""
    if system.runs_on == "own":
        return {}
    # Its processes must not find packages of this project's environment.
    return {"PYTHONPATH": str(ROOT), "VIRTUAL_ENV": str(_venv), "BENCH_NODE_FOLDER": str(_node)}


def is_installed(system: System) -> bool:
    return system.runs_on == "own" or _read_stamps().get(system.name) == _stamp(system)


def install(system: System, say: Callable[[str], None]) -> None:
    """Install a system once, and again after its pinned versions have changed."""
    if is_installed(system):
        return
    FOLDER.mkdir(exist_ok=True)
    if system.runs_on == "node":
        _install_node(say)
    else:
        _install_python(system, say)
    _stamps.write_text(json.dumps({**_read_stamps(), system.name: _stamp(system)}, indent=1))


def version(system: System) -> str:
    """Return the version of its package: the installed one, or the one that is pinned for the
    peers.
    """
    if system.runs_on == "own":
        return metadata.version(system.package)
    if system.runs_on == "node":
        return str(json.loads(PACKAGE_JSON.read_text())["dependencies"][system.package])
    pins = dict(line.split("==") for line in requirements(system.name) if "==" in line)
    return next((pin for name, pin in pins.items() if name.partition("[")[0] == system.package), "")


def requirements(name: str) -> list[str]:
    """Return the requirement lines below the system's name."""
    found = re.search(
        rf"^# \[{re.escape(name)}\]\n(.*?)(?=^# \[|\Z)", REQUIREMENTS.read_text(), re.M | re.S
    )
    lines = found[1].splitlines() if found else []
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]


def _install_python(system: System, say: Callable[[str], None]) -> None:
    if not _python.exists():
        say(f"making {_venv} with Python {sys.version.split()[0]}")
        _call([sys.executable, "-m", "venv", str(_venv)], "python -m venv")
    say(f"installing {system.title} into {_venv.relative_to(ROOT)}")
    constraints = FOLDER / "constraints.txt"
    # In a constraint, extras are not allowed.
    constraints.write_text(re.sub(r"\[[\w,]+\](?===)", "", REQUIREMENTS.read_text()))
    quiet = ["--quiet", "--disable-pip-version-check", "--constraint", str(constraints)]
    _call([str(_python), "-m", "pip", "install", *quiet, *requirements(system.name)], "pip install")


def _install_node(say: Callable[[str], None]) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotInstalledError("Node is required (node and npm on the PATH)")
    _node.mkdir(exist_ok=True)
    shutil.copy(PACKAGE_JSON, _node)
    say(f"npm install in {_node.relative_to(ROOT)}")
    _call(
        ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(_node)],
        "npm install",
    )


def _call(command: list[str], what: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, env=clean)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalledError(f"{what}: {error}") from error
    if done.returncode:
        words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotInstalledError(
            f"{what}: {' '.join(words[-2:]) or f'exited with status {done.returncode}'}"
        )


def _read_stamps() -> dict[str, str]:
    if not (_python if _stamps.exists() else _stamps).exists():
        return {}
    found: dict[str, str] = json.loads(_stamps.read_text())
    return found


def _stamp(system: System) -> str:
    text = (
        PACKAGE_JSON.read_text()
        if system.runs_on == "node"
        else "\n".join(requirements(system.name))
    )
    return hashlib.sha256(f"{sys.version}\n{text}".encode()).hexdigest()[:16]
