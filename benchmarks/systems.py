"""The measured systems, their configuration and their installation.

Each is configured as its own documentation recommends for throughput, with workers of two
processes. Polling intervals are 0.1 s if they can be set. The other systems are installed into
.bench-peers/ in the repository, isolated from the project's dependencies.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.processes import PYTHON, ROOT
from benchmarks.servers import BROKER, DATABASE, POSTGRESQL, RABBITMQ, REDIS

_FOLDER = ROOT / ".bench-peers"
_VENV, _NODE = _FOLDER / "venv", _FOLDER / "node"
_PYTHON = _VENV / "bin" / "python"
INSTALL_S = 600.0


@dataclass(frozen=True)
class System:
    """A system. In its commands, `{name}` is the name of the worker, `{processes}` the number of
    its processes, and `{tasks}` how many tasks an event loop runs at a time.
    """

    name: str
    title: str
    #: The servers that store and transport tasks.
    servers: tuple[str, ...]
    producer: str
    #: The commands of one worker.
    worker: tuple[str, ...]
    #: What is installed, each version pinned; the constraints of all systems bind each other.
    packages: str = ""
    #: The runtime: the project's own Python, the peers' Python, or Node.
    runs_on: Literal["own", "python", "node"] = "python"
    #: A command that is started once, whatever the number of workers.
    beat: str = ""
    timer: str = ""
    has_bulk: bool = True
    #: The tasks that an event loop of a worker runs at a time.
    concurrency: int = 1

    @property
    def launcher(self) -> tuple[str, ...]:
        """The command prefix of its programs."""
        if self.runs_on == "node":
            return ("node", str(ROOT / "benchmarks" / "programs" / "bullmq.mjs"))
        return PYTHON if self.runs_on == "own" else (str(_PYTHON), "-m")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of its processes, except the URLs of servers."""
        if self.runs_on == "own":
            return {"BENCH_TIMER": self.timer or "eta"}
        # Its processes must not find packages of this project's environment.
        return {"PYTHONPATH": str(ROOT), "VIRTUAL_ENV": str(_VENV), "BENCH_NODE_FOLDER": str(_NODE)}

    def install(self, say: Callable[[str], None]) -> str:
        """Install the system unless it is. Return why it cannot be measured, or an empty string."""
        stamp = hashlib.sha256(f"{sys.version} {self.packages}".encode()).hexdigest()[:16]
        installed = _FOLDER / f"{self.name}-{stamp}"
        if self.runs_on == "own" or installed.exists():
            return ""
        say(f"installing {self.title} into {_FOLDER}")
        _FOLDER.mkdir(exist_ok=True)
        if self.runs_on == "node":
            quiet = ["--no-audit", "--no-fund", "--silent"]
            commands = [["npm", "install", *quiet, "--prefix", str(_NODE), *self.packages.split()]]
        else:
            constraints = _FOLDER / "constraints.txt"
            pins = [
                one for each in SYSTEMS.values() for one in each.packages.split() if "==" in one
            ]
            # In a constraint, extras are not allowed.
            constraints.write_text("\n".join(re.sub(r"\[\w+\]", "", pin) for pin in pins))
            pip = [str(_PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            commands = [] if _PYTHON.exists() else [[sys.executable, "-m", "venv", str(_VENV)]]
            commands.append([*pip, "--constraint", str(constraints), *self.packages.split()])
        reason = next(filter(None, map(_refusal, commands)), "")
        if not reason:
            installed.touch()
        return reason


def _refusal(command: list[str]) -> str:
    """Run a command of an installation, and return why it failed, or an empty string."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is required"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, env=clean)
    words = (done.stderr or done.stdout).splitlines()[-2:] or [f"status {done.returncode}"]
    return f"{command[0]}: {' '.join(words)}" if done.returncode else ""


_CELERY = "celery -A {app} worker -P prefork -c {{processes}} -n {{name}}@%h --loglevel WARNING"
_OURS = _CELERY.format(app="benchmarks.ours")
_BARE = _CELERY.format(app="benchmarks.bare")
_BEAT = "celery -A benchmarks.ours beat -s {folder}/beat --loglevel WARNING"
_PROGRAMS = "benchmarks.programs"


def _ours(name: str, title: str, *servers: str, program: str = "ours", **more: Any) -> System:
    """delaytasks with its default settings."""
    producer = f"{_PROGRAMS}.ours produce {program}"
    found = {"worker": (_OURS,), "beat": _BEAT, "timer": "eta", **more}
    return System(name, title, servers, producer, runs_on="own", **found)


def _celery(name: str, title: str, broker: str) -> System:
    producer = f"{_PROGRAMS}.ours produce celery"
    return System(name, title, (broker,), producer, (_BARE,), runs_on="own", has_bulk=False)


def _python(name: str, title: str, server: str, *worker: str, packages: str, **more: Any) -> System:
    producer = f"{_PROGRAMS}.{name} produce"
    return System(name, title, (server,), producer, worker, packages, **more)


_ALL = [
    _ours("delaytasks", "delaytasks", DATABASE, BROKER),
    _ours("ours_redis", "delaytasks, timer redis", DATABASE, REDIS, timer="redis"),
    _ours(
        "ours_direct",
        "delaytasks, no broker",
        DATABASE,
        worker=("delaytasks -A benchmarks.ours run --forever -c {processes}",),
        beat="",
        timer="direct",
    ),
    _ours("ours_rabbitmq", "delaytasks, RabbitMQ", DATABASE, RABBITMQ),
    _ours("ours_eta", "durable Celery eta", DATABASE, BROKER, program="durable_eta"),
    _celery("celery", "Celery eta", BROKER),
    _celery("celery_rabbitmq", "Celery eta, RabbitMQ", RABBITMQ),
    # asyncpg on a direct connection, uvloop, `batch_size=200` since jobs are short, and its
    # autovacuum settings: pgqueuer/docs/guides/performance-tuning.md. It accepts relative delays
    # only.
    _python(
        "pgqueuer",
        "PgQueuer",
        POSTGRESQL,
        *[f"{_PROGRAMS}.pgqueuer work"] * 2,
        packages="pgqueuer==1.6.0 asyncpg==0.32.0 uvloop==0.23.0",
    ),
    # It polls for delayed tasks every 0.1 s instead of 5 s:
    # https://procrastinate.readthedocs.io/en/stable/howto/production/concurrency.html
    _python(
        "procrastinate",
        "Procrastinate",
        POSTGRESQL,
        *[
            f"procrastinate --app {_PROGRAMS}.procrastinate.app worker --concurrency {{tasks}} "
            "--fetch-job-polling-interval 0.1"
        ]
        * 2,
        packages="procrastinate==3.10.0 psycopg[binary]==3.3.9",
        concurrency=30,
    ),
    # `concurrency: 100`, finished jobs removed: https://docs.bullmq.io/guide/
    # parallelism-and-concurrency. Its due times are whole milliseconds.
    System(
        "bullmq",
        "BullMQ",
        (REDIS,),
        "produce",
        ("work", "work"),
        "bullmq@6.7.0 ioredis@5.8.2",
        "node",
    ),
    # One process per core with 8 threads, the default of its command:
    # https://dramatiq.io/guide.html. Its due times are whole milliseconds.
    _python(
        "dramatiq",
        "Dramatiq",
        REDIS,
        f"dramatiq {_PROGRAMS}.dramatiq --processes {{processes}} --threads 8",
        packages="dramatiq==2.2.1 redis[hiredis]==5.3.1",
        has_bulk=False,
    ),
]
SYSTEMS = {system.name: system for system in _ALL}
#: Those of other projects, and the variants that belong into the comparison with them.
PEERS = [name for name in SYSTEMS if name != "ours_eta"]
