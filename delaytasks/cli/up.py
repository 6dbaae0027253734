"""`delaytasks up`: makes the tables, starts worker, beat, Flower and console, and restarts them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click
from rich.console import Console
from rich.text import Text

from delaytasks.attachment import file_broker_url
from delaytasks.cli.context import DEFAULT_APP, Cli, pass_cli
from delaytasks.cli.servers import CONSOLE_PORT
from delaytasks.cli.setup import broker_url
from delaytasks.db import migrations
from delaytasks.settings import make_folder

# -- Run a group of child processes with one log --------------------------------------------------

# A child that dies is started again. At the end the children are stopped in order, and no process
# is left behind. Honcho cannot be used for this: its manager stops all processes as soon as one
# ends.


#: Seconds before a dead child is started again. The time doubles each time it dies soon again.
FIRST_REST_S, LONGEST_REST_S = 1.0, 30.0
#: A child that lived for this time started well.
SETTLED_S = 20.0
#: The longest wait for the last lines of a child that has ended.
LAST_WORDS_S = 2.0
#: Seconds between two checks of the children.
LOOK_S = 0.1

_LEVELS = {"D": "dim", "W": "yellow", "E": "bold red", "C": "bold red"}
#: The heads of the log lines of Celery and Flower. Only the level is kept, because each line gets
#: our own time.
_HEADS = re.compile(
    r"\[[\d-]+ [\d:,]+: (?P<celery>[A-Z])[A-Z]*/\S+\] |"
    r"\[(?P<flower>[A-Z]) \d+ [\d:]+ \S+\] "
)
_CONTROLS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0a-\x1f\x7f]")


@dataclass(frozen=True)
class Spec:
    """The command of a child, and how to start and stop it."""

    name: str
    command: Sequence[str]
    color: str
    #: The children of one stage are stopped together, and those of a higher stage first.
    stage: int
    #: The time that it may take to stop after SIGTERM.
    patience_s: float = 10.0
    #: Part of the line that it logs when it is ready.
    ready_line: str | None = None
    #: Lines that are left out of the log.
    noise: re.Pattern[str] | None = None
    #: The umask of the child; -1: ours, because a worker's processors may make files for others.
    umask: int = -1


@dataclass
class Child:
    spec: Spec
    process: subprocess.Popen[bytes] | None = None
    reader: threading.Thread | None = None
    started_at: float = 0.0
    start_at: float | None = None
    rest_s: float = FIRST_REST_S
    #: Whether it has logged its `ready_line`, if it has one.
    has_logged_ready: bool = False

    def __post_init__(self) -> None:
        self.has_logged_ready = self.spec.ready_line is None


class CombinedLog:
    """Prints each line of the children with the time and the name of the child."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._width = max(map(len, names))

    def say(self, text: str, style: str = "bold") -> None:
        self._line("up", "bold white", text, style)

    def line(self, spec: Spec, text: str) -> None:
        if spec.noise is not None and spec.noise.search(text):
            return
        head = _HEADS.match(text)
        style = "" if head is None else _LEVELS.get(head["celery"] or head["flower"] or "", "")
        self._line(spec.name, spec.color, text if head is None else text[head.end() :], style)

    def _line(self, name: str, color: str, text: str, style: str) -> None:
        # A log line must not move the cursor or imitate another line.
        text = _CONTROLS.sub("", text.rstrip())
        if text:
            prefix = (f"{time.strftime('%H:%M:%S')} ", "dim"), (f"{name:<{self._width}} │ ", color)
            self._console.print(Text.assemble(*prefix, (text, style)), soft_wrap=True)


class Supervisor:
    """Starts, restarts and stops the children, in the main thread."""

    def __init__(self, specs: Sequence[Spec], console: Console) -> None:
        self.log = CombinedLog(console, ["up", *(spec.name for spec in specs)])
        self._stages: dict[int, list[Child]] = {}
        for spec in sorted(specs, key=lambda spec: spec.stage):
            self._stages.setdefault(spec.stage, []).append(Child(spec))
        self._children = [child for stage in self._stages.values() for child in stage]
        self._signals = 0

    def run(self, on_ready: Callable[[], None]) -> None:
        """Run the children until SIGINT, SIGTERM or SIGHUP.

        `on_ready` is called when every child with a `ready_line` has logged it.
        """
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        is_announced = False
        try:
            for child in self._children:
                self._start(child)
            while not self._signals:
                self._look()
                if not is_announced and all(child.has_logged_ready for child in self._children):
                    is_announced = True
                    on_ready()
                time.sleep(LOOK_S)
        finally:
            self._stop()
            for number, handler in before.items():
                signal.signal(number, handler)

    # -- start ------------------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        child.started_at, child.start_at = time.monotonic(), None
        child.process = subprocess.Popen(
            child.spec.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            umask=child.spec.umask,
            # Ctrl-C in a terminal reaches only this process, which stops the children in order.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        child.reader = threading.Thread(
            target=self._read, args=(child, child.process.stdout), daemon=True
        )
        child.reader.start()

    def _read(self, child: Child, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                text = line.decode(errors="replace")
                self.log.line(child.spec, text)
                if not child.has_logged_ready and str(child.spec.ready_line) in text:
                    child.has_logged_ready = True

    # -- look after -------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                self._schedule_restart(child, now)
            if child.start_at is not None and now >= child.start_at:
                self._start(child)

    def _schedule_restart(self, child: Child, now: float) -> None:
        """Kill the processes that a dead child left behind, such as a worker's pool."""
        assert child.process is not None
        _kill_group(child.process)
        if now - child.started_at > SETTLED_S:
            child.rest_s = FIRST_REST_S
        how = _how_it_ended(child.process.returncode)
        self.log.say(
            f"{child.spec.name} {how}; it is started again in {child.rest_s:g} s", "bold red"
        )
        child.process, child.start_at = None, now + child.rest_s
        child.rest_s = min(child.rest_s * 2, LONGEST_REST_S)

    # -- stop -------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _frame: Any) -> None:
        self._signals += 1

    def _stop(self) -> None:
        self.log.say("stopping; a second Ctrl-C does not wait for running tasks")
        self._signals = 0
        for stage in reversed(self._stages.values()):
            for child in stage:
                if child.process is not None:
                    child.process.terminate()
            for child in stage:
                self._await_end(child)
        self.log.say("all stopped")

    def _await_end(self, child: Child) -> None:
        process = child.process
        if process is None:
            return
        deadline = child.spec.patience_s + time.monotonic()
        while process.poll() is None and time.monotonic() < deadline and not self._signals:
            time.sleep(LOOK_S / 4)
        if process.poll() is None:
            late = f"it did not stop within {child.spec.patience_s:g} s"
            why = "asked to" if self._signals else late
            self.log.say(f"killing {child.spec.name}: {why}", "bold red")
        _kill_group(process)
        process.wait()
        child.process = None
        if child.reader is not None:
            child.reader.join(LAST_WORDS_S)  # a grandchild may keep the pipe open for longer
        self.log.say(f"{child.spec.name} stopped", "")


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the group has no process any more


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with_parent() -> None:
    """In the child: have the kernel send SIGTERM when the parent dies, even by SIGKILL."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


FLOWER_PORT = 5555
_POOL = click.Choice(["prefork", "threads", "solo"])
#: The time that a worker may take to finish its running tasks when it is stopped.
WORKER_PATIENCE_S = 60.0
#: Lines of a worker about root, which `up` replaces by one line, and about a broker without a host.
_WORKER_NOISE = re.compile(
    "No hostname was supplied|"
    "SecurityWarning: You're running|absolutely not recommended!|Please specify a different user|"
    "User information: uid=|_warn_or_raise_security_error"
)


@click.command()
@click.option("--concurrency", "-c", type=click.IntRange(1), help="That of the worker. [CPUs]")
@click.option("--pool", "-P", type=_POOL, default="prefork", help="That of the worker. [prefork]")
@click.option("--port", type=click.IntRange(1, 65535), help=f"That of Flower. [from {FLOWER_PORT}]")
@click.option("--no-flower", is_flag=True, help="Without Flower, even where it is installed.")
@click.option("--no-console", is_flag=True, help="Without the console, even where it is installed.")
@pass_cli
def up(cli: Cli, port: int | None, no_flower: bool, no_console: bool, **worker: Any) -> None:
    """Make the tables, and start a worker, beat, the console and Flower here, with one log.

    \b
    delaytasks up
    delaytasks -A shop up --concurrency 2 --no-flower

    If no database or broker is configured, SQLite and message files are used, kept in
    .delaytasks/. A process that dies is started again. Ctrl-C stops everything.
    """
    if os.name != "posix":
        raise click.UsageError(
            "up requires Linux or macOS; on Windows use WSL, or run the commands of the Procfile"
        )
    if cli.app_origin == "flask":
        raise click.UsageError(
            "up starts `celery -A`, which takes no Flask app; name the module with the Celery app, "
            "as delaytasks -A shop.celery up"
        )
    has_flower = not no_flower and importlib.util.find_spec("flower") is not None
    flower_port = _free_port(port) if has_flower else None
    has_console = not no_console and all(map(importlib.util.find_spec, ("flask", "waitress")))
    console_port = _free_port(None, CONSOLE_PORT) if has_console else None
    cli.import_processors()
    settings = cli.delays.settings
    migrations.upgrade(*cli.tables)
    has_files = _use_files(cli.app, settings.data_dir)
    specs = _celery(cli.app_name, settings.data_dir, flower_port, **worker)
    if console_port:
        serve = ["-m", "delaytasks", "-A", cli.app_name, "serve", f"--console={console_port}"]
        specs.append(Spec("console", [sys.executable, *serve], "blue", stage=2, umask=0o077))
    console = Console(highlight=False, emoji=False)
    supervisor = Supervisor(specs, console)
    if os.geteuid() == 0:
        supervisor.log.say("running as root; a separate user is safer", "yellow")
    cli.store.close()  # the children make their own connections

    def announce() -> None:
        for name, text in _what_to_open(cli, has_files, console_port, flower_port):
            console.print(Text.assemble((f"  {name:12}", "bold"), text), soft_wrap=True)

    supervisor.run(announce)


def _use_files(app: Any, data_dir: str) -> bool:
    """Let the child processes use message files if the app has no broker of its own."""
    files = file_broker_url(data_dir)
    if app.conf.broker_url not in (None, files):
        return False
    os.environ["CELERY_BROKER_URL"] = files
    # Messages and bindings of an earlier run are for processes that have ended.
    shutil.rmtree(Path(data_dir) / "broker", ignore_errors=True)
    return True


def _celery(
    app: str, data_dir: str, flower_port: int | None, concurrency: int | None, pool: str
) -> list[Spec]:
    celery = [sys.executable, "-m", "celery", "--quiet", "-A", app]
    # With one worker, mingle and gossip would only cost a second at the start.
    worker = ["worker", "--loglevel=INFO", f"--pool={pool}", "--without-mingle", "--without-gossip"]
    worker += [f"--concurrency={concurrency}"] if concurrency else []
    worker += ["--task-events"] if flower_port else []
    folder = Path(data_dir).absolute()
    make_folder(folder)
    # At INFO, beat would log each sweep.
    beat = ["beat", "--loglevel=WARNING", f"--schedule={folder / 'celerybeat-schedule'}"]
    specs = [
        Spec("worker", celery + worker, "cyan", 1, WORKER_PATIENCE_S, " ready.", _WORKER_NOISE),
        Spec("beat", celery + beat, "magenta", stage=2, umask=0o077),
    ]
    if flower_port:
        # At WARNING, Flower would log that the starting worker does not answer yet.
        flower = ["flower", "--address=127.0.0.1", f"--port={flower_port}", "--logging=error"]
        specs.append(Spec("flower", celery + flower, "green", stage=2))
    return specs


def _free_port(wanted: int | None, first: int = FLOWER_PORT) -> int:
    for port in [wanted] if wanted else range(first, first + 50):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise click.UsageError(
        f"port {wanted or first} is in use; choose another with --port, or use --no-flower"
    )


def _what_to_open(
    cli: Cli, has_files: bool, console_port: int | None, flower_port: int | None
) -> Iterator[tuple[str, str]]:
    yield "delaytasks", "is up"
    yield "database", cli.database_url
    yield "broker", broker_url(cli.app)
    if has_files and cli.app_name != DEFAULT_APP:
        yield "", f"in other shells: export CELERY_BROKER_URL={broker_url(cli.app)}"
    for name, port in {"console": console_port, "flower": flower_port}.items():
        install = f"install it: pip install 'delaytasks[{name}]'"
        yield name, f"http://127.0.0.1:{port}" if port else install
    if console_port:
        yield "", f"more users of the console: {cli.command} access console NAME"
    tags = [p.tag for p in cli.runtime.registry if not p.tag.startswith("delaytasks.")]
    if not tags:
        yield "processors", "none yet: put @delaytasks.processor functions into, say, tasks.py,"
        yield "", 'and into celeryconfig.py here: imports = ["tasks"]'
    tag = min(tags, default="hello")
    body = '{"order": 7}' if tag == "order.close" else "{}"
    example = f"{cli.command} schedule {tag} '{body}' --delay 5"
    yield "try", f"in another shell like this one, in this folder: {example}"
    yield "", f"then: {cli.command} list"
    yield "stop", "Ctrl-C"
