"""`delaytasks up`: makes the tables, and runs worker, beat, console and Flower with one log.

As with `honcho start`, the processes are stopped together: after Ctrl-C, and if one of them ends.
Unlike it, `up` waits for running tasks, and leaves no process behind, not even when it is killed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from delaytasks.attachment import file_broker_url
from delaytasks.cli.context import DEFAULT_APP, Cli, pass_cli
from delaytasks.cli.output import BAD, LONGEST, NOTED
from delaytasks.cli.servers import CONSOLE_PORT
from delaytasks.cli.setup import broker_url
from delaytasks.db import migrations
from delaytasks.model.text import one_line
from delaytasks.settings import make_folder

#: The time that the processes may take to end; the worker finishes its running tasks.
PATIENCE_S = 60.0
#: Seconds between two checks of the processes, and the longest wait for their last lines.
LOOK_S, LAST_WORDS_S = 0.1, 2.0
FLOWER_PORT = 5555
_COLOURS = {"up": "bright_white", "worker": "cyan", "beat": "magenta", "console": "blue"}


@click.command()
@click.option("--concurrency", "-c", type=click.IntRange(1), help="That of the worker. [CPUs]")
@click.option("--no-flower", is_flag=True, help="Without Flower, even where it is installed.")
@click.option("--no-console", is_flag=True, help="Without the console, even where it is installed.")
@pass_cli
def up(cli: Cli, concurrency: int | None, no_flower: bool, no_console: bool) -> None:
    """Make the tables, and start a worker, beat, the console and Flower here, with one log.

    \b
    delaytasks up
    delaytasks -A shop up --concurrency 2 --no-flower

    If no database or broker is configured, SQLite and message files are used, kept in
    .delaytasks/. Ctrl-C stops everything, and so does the end of one of the processes.
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
    has_console = not no_console and all(map(importlib.util.find_spec, ("flask", "waitress")))
    ports = {
        "console": _free_port(CONSOLE_PORT) if has_console else None,
        "flower": _free_port(FLOWER_PORT) if has_flower else None,
    }
    cli.import_processors()
    data_dir = cli.delays.settings.data_dir
    migrations.upgrade(*cli.tables)
    has_files = _use_files(cli.app, data_dir)
    commands = _commands(cli.app_name, data_dir, ports, concurrency)
    cli.store.close()  # the processes make their own connections

    def announce() -> None:
        for name, text in _what_to_open(cli, has_files, ports):
            click.echo(f"  {click.style(f'{name:12}', bold=True)}{text}")

    if not _run(commands, announce):
        sys.exit(1)


def _use_files(app: Any, data_dir: str) -> bool:
    """Let the processes use message files if the app has no broker of its own."""
    files = file_broker_url(data_dir)
    if app.conf.broker_url not in (None, files):
        return False
    os.environ["CELERY_BROKER_URL"] = files
    # Messages and bindings of an earlier run are for processes that have ended.
    shutil.rmtree(Path(data_dir) / "broker", ignore_errors=True)
    return True


def _commands(
    app: str, data_dir: str, ports: Mapping[str, int | None], concurrency: int | None
) -> dict[str, list[str]]:
    folder = Path(data_dir).absolute()
    make_folder(folder)
    celery = [sys.executable, "-m", "celery", "--quiet", "-A", app]
    # With one worker, mingle and gossip would only cost a second at the start.
    worker = ["worker", "--loglevel=INFO", "--without-mingle", "--without-gossip"]
    worker += [f"--concurrency={concurrency}"] if concurrency else []
    worker += ["--task-events"] if ports["flower"] else []
    # At INFO, beat would log each sweep.
    beat = ["beat", "--loglevel=WARNING", f"--schedule={folder / 'celerybeat-schedule'}"]
    commands = {"worker": celery + worker, "beat": celery + beat}
    if port := ports["flower"]:
        # At WARNING, Flower would log that the starting worker does not answer yet.
        flower = ["flower", "--address=127.0.0.1", f"--port={port}", "--logging=error"]
        commands["flower"] = celery + flower
    if port := ports["console"]:
        serve = ["-m", "delaytasks", "-A", app, "serve", f"--console={port}"]
        commands["console"] = [sys.executable, *serve]
    return commands


def _free_port(first: int) -> int:
    for port in range(first, first + 50):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise click.UsageError(f"the ports from {first} are in use; use --no-flower and --no-console")


def _what_to_open(
    cli: Cli, has_files: bool, ports: Mapping[str, int | None]
) -> Iterator[tuple[str, str]]:
    yield "delaytasks", "is up"
    yield "database", cli.store.database.shown_url
    yield "broker", broker_url(cli.app)
    if has_files and cli.app_name != DEFAULT_APP:
        yield "", f"in other shells: export CELERY_BROKER_URL={broker_url(cli.app)}"
    for name, port in ports.items():
        install = f"install it: pip install 'delaytasks[{name}]'"
        yield name, f"http://127.0.0.1:{port}" if port else install
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


# -- Runs processes with one log ------------------------------------------------------------------


def _run(commands: Mapping[str, Sequence[str]], announce: Callable[[], None]) -> bool:
    """Run the processes until SIGINT, SIGTERM, SIGHUP or the end of one of them.

    `announce` is called when the worker has logged that it is ready. Return whether a signal was
    the reason for the end.
    """
    signals: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: signals.append(n)) for number in numbers}
    children: dict[str, subprocess.Popen[bytes]] = {}
    readers: list[threading.Thread] = []
    try:
        for name, command in commands.items():
            child = children[name] = _start(command)
            on_ready = announce if name == "worker" else None
            reader = threading.Thread(target=_copy, args=(name, child, on_ready), daemon=True)
            reader.start()
            readers.append(reader)
        while not signals and all(child.poll() is None for child in children.values()):
            time.sleep(LOOK_S)
    finally:
        is_asked = bool(signals)
        for name, child in children.items():
            if child.poll() is not None:
                _say("up", f"{name} has ended with {_how(child.returncode)}", BAD)
        _stop(children, signals)
        for reader in readers:
            reader.join(LAST_WORDS_S)  # a grandchild may keep the pipe open for longer
        _say("up", "all stopped")
        for number, handler in before.items():
            signal.signal(number, handler)
    return is_asked


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Ctrl-C in a terminal reaches only this process. The group of a child has its pool too.
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def _copy(
    name: str, child: subprocess.Popen[bytes], on_ready: Callable[[], None] | None = None
) -> None:
    """Print the lines of a process."""
    assert child.stdout is not None
    with child.stdout as lines:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            _say(name, text)
            if on_ready is not None and text.endswith(" ready."):
                on_ready()


def _stop(children: Mapping[str, subprocess.Popen[bytes]], signals: list[int]) -> None:
    """End all processes. They have some time for it, unless there is another signal."""
    _say("up", "stopping; a second Ctrl-C does not wait for running tasks", NOTED)
    signals.clear()
    for child in children.values():
        child.terminate()
    deadline = time.monotonic() + PATIENCE_S
    while any(child.poll() is None for child in children.values()):
        if signals or time.monotonic() > deadline:
            break
        time.sleep(LOOK_S)
    for child in children.values():
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # the group has no process any more
        child.wait()


def _say(name: str, text: str, colour: str | None = None) -> None:
    # A log line must not move the cursor or imitate another line.
    head = click.style(f"{name:<7} │", fg=_COLOURS.get(name, "green"))
    click.echo(f"{head} {click.style(one_line(text, LONGEST), fg=colour)}")


def _how(code: int) -> str:
    return f"the signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with_parent() -> None:
    """In the child: have the kernel send SIGTERM when the parent dies, even by SIGKILL."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
