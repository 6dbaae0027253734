"""`delaytasks up` and `run`: start all processes here with one log, or run tasks without a broker.

As with `honcho start`, the processes of `up` are stopped together: after Ctrl-C, and if one of them
ends. Unlike it, `up` waits for running tasks, and leaves no process behind, not even when it is
killed.
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
from delaytasks.cli.context import DEFAULT_APP, Cli, Command, pass_cli, signals_to
from delaytasks.cli.output import BAD, LONGEST, NOTED, Part
from delaytasks.cli.servers import CONSOLE_PORT
from delaytasks.cli.status import broker_url
from delaytasks.db import migrations
from delaytasks.model.clock import monotonic
from delaytasks.model.inputs import serves, show_duration
from delaytasks.model.text import count, one_line
from delaytasks.settings import MESSAGE_FOLDER, make_folder
from delaytasks.worker.worker_runtime import StandaloneWorker

# -- `up` -----------------------------------------------------------------------------------------


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
    if cli.app_name is None:
        raise click.UsageError(
            "up starts `celery -A`, which takes no Flask app; name the module with the Celery app, "
            "as delaytasks -A shop.celery up"
        )
    ports: dict[str, int] = {}
    if not no_console and all(map(importlib.util.find_spec, ("flask", "waitress"))):
        ports["console"] = _free_port(CONSOLE_PORT)
    if not no_flower and importlib.util.find_spec("flower"):
        ports["flower"] = _free_port(FLOWER_PORT)
    cli.import_processors()
    data_dir = cli.delays.settings.data_dir
    migrations.upgrade(*cli.tables)
    has_files = _use_files(cli.app, data_dir)
    commands = _commands(cli.app_name, data_dir, ports, concurrency)
    cli.store.close()  # the processes make their own connections

    def announce() -> None:
        for name, text in _what_to_open(cli, has_files, ports):
            click.echo(f"  {click.style(f'{name:12}', bold=True)}{text}")

    is_done = run_together(commands, announce)
    if has_files:
        _delete_files(data_dir)
    if not is_done:
        sys.exit(1)


def _use_files(app: Any, data_dir: str) -> bool:
    """Let the processes use message files if the app has no broker of its own."""
    files = file_broker_url(data_dir)
    if app.conf.broker_url not in (None, files):
        return False
    os.environ["CELERY_BROKER_URL"] = files
    _delete_files(data_dir)
    return True


def _delete_files(data_dir: str) -> None:
    """Delete messages and bindings, which are for processes that have ended."""
    shutil.rmtree(Path(data_dir) / MESSAGE_FOLDER, ignore_errors=True)


def _commands(
    app: str, data_dir: str, ports: Mapping[str, int], concurrency: int | None
) -> dict[str, list[str]]:
    folder = Path(data_dir).absolute()
    make_folder(folder)
    celery = [sys.executable, "-m", "celery", "--quiet", "-A", app]
    # With one worker, mingle and gossip would only cost a second at the start.
    worker = ["worker", "--loglevel=INFO", "--without-mingle", "--without-gossip"]
    worker += [f"--concurrency={concurrency}"] if concurrency else []
    worker += ["--task-events"] if "flower" in ports else []
    # At INFO, beat would log each sweep.
    beat = ["beat", "--loglevel=WARNING", f"--schedule={folder / 'celerybeat-schedule'}"]
    commands = {"worker": celery + worker, "beat": celery + beat}
    if port := ports.get("flower"):
        # At WARNING, Flower would log that the starting worker does not answer yet.
        flower = ["flower", "--address=127.0.0.1", f"--port={port}", "--logging=error"]
        commands["flower"] = celery + flower
    if port := ports.get("console"):
        serve = ["-m", "delaytasks", "-A", app, "serve", f"--console={port}"]
        commands["console"] = [sys.executable, *serve]
    return commands


def _free_port(usual: int) -> int:
    """Return the usual port, or if it is in use any free one."""
    try:
        probe = socket.create_server(("127.0.0.1", usual))
    except OSError:
        probe = socket.create_server(("127.0.0.1", 0))
    with probe:
        return int(probe.getsockname()[1])


def _what_to_open(cli: Cli, has_files: bool, ports: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    yield "delaytasks", "is up"
    yield "database", cli.store.database.shown_url
    yield "broker", broker_url(cli.app)
    if has_files and cli.app_name != DEFAULT_APP:
        yield "", f"for your own programs: export CELERY_BROKER_URL={broker_url(cli.app)}"
    for name, port in ports.items():
        yield name, f"http://127.0.0.1:{port}"
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


def run_together(commands: Mapping[str, Sequence[str]], announce: Callable[[], None]) -> bool:
    """Run the processes until SIGINT, SIGTERM, SIGHUP or the end of one of them.

    `announce` is called when the worker has logged that it is ready. Return whether a signal was
    the reason for the end.
    """
    signals: list[int] = []
    children: dict[str, subprocess.Popen[bytes]] = {}
    readers: list[threading.Thread] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with signals_to(lambda number, _: signals.append(number), *numbers):
        try:
            for name, command in commands.items():
                child = children[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "PYTHONUNBUFFERED": "1"},
                    # Ctrl-C in a terminal reaches only this process. The group of a child has its
                    # pool too.
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
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
    return is_asked


def _copy(name: str, child: subprocess.Popen[bytes], on_ready: Callable[[], None] | None) -> None:
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


# -- `run`, without a broker ----------------------------------------------------------------------


#: Chunks that may fail as a whole before the command gives up.
MOST_FAILED_CHUNKS = 10
STOPS = (signal.SIGINT, signal.SIGTERM)


@click.command(cls=Command)
@click.option(
    "--queue", "queues", multiple=True, metavar="QUEUE", help="Only this queue. Repeatable."
)
@click.option(
    "--forever", is_flag=True, help="Run tasks as they fall due, like a worker, until stopped."
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(min=1),
    help="Processes that run tasks [with --forever the CPUs; else tasks run in this process].",
)
@pass_cli
def run(cli: Cli, queues: tuple[str, ...], forever: bool, concurrency: int | None) -> None:
    """Run overdue tasks here, without a broker.

    \b
    delaytasks run
    celery -A proj delays run --queue mail
    delaytasks run --forever

    Ends when no task is overdue, or with --forever when it is stopped. Workers and other calls may
    run at the same time. A task that fails becomes FAILED, which is no error of this command. After
    Ctrl-C or SIGTERM, tasks that have not begun are given back, and running tasks end (exit code 1
    if there may be more tasks). A second signal ends the command immediately, as if it was killed.
    """
    cli.import_processors()
    processes = concurrency or ((os.cpu_count() or 1) if forever else None)
    if processes is not None and cli.is_json:
        cli.app.log.already_setup = True  # stderr is for one JSON document
    elif processes is not None:  # also for the processes that are forked later
        cli.app.log.setup(loglevel="INFO" if forever else "WARNING", redirect_stdouts=False)
    began_at = monotonic()
    alone = StandaloneWorker(cli.delays, queues, processes, may_detach=forever)
    if forever:
        limit = alone.pool.limit
        cli.note(f"Runs tasks as they fall due, with concurrency {limit}; Ctrl-C ends it.")
    else:
        cli.delays._runtime.sweeper.sweep()  # the tasks of dead workers are overdue too
    is_stopped = _run_alone(alone, cli, (lambda: False) if forever else _nothing_overdue(alone))
    if not forever:
        found = {**_counts(alone), "seconds": monotonic() - began_at, "is_stopped": is_stopped}
        cli.answer(found, *_parts(found))
        if is_stopped or found["failed_chunks"]:
            raise SystemExit(1)


def _nothing_overdue(alone: StandaloneWorker) -> Callable[[], bool]:
    """Return a function that drains the overdue tasks again until a pass claims none of them."""
    runtime, progress = alone.runtime, -1

    def is_over() -> bool:
        nonlocal progress
        dispatcher, failed = runtime.dispatcher, runtime.events.counts["chunk.failed"]
        if dispatcher.is_busy:
            return False
        before, progress = progress, dispatcher.claimed + failed
        if progress == before or failed > MOST_FAILED_CHUNKS:
            return True
        late = runtime.store.sweeps.levels(0)
        levels = [level for level in late if serves(runtime.processes.queues, level.queue)]
        for level in levels:
            dispatcher.start_drain(level.queue, [level.priority])
        return not levels

    return is_over


def _counts(alone: StandaloneWorker) -> dict[str, Any]:
    runtime = alone.runtime
    counted = {} if runtime.statistics is None else runtime.statistics.totals()
    return {
        "claimed": runtime.dispatcher.claimed,
        "succeeded": sum(counts["done"] for counts in counted.values()),
        "failed": sum(counts["failed"] + counts["worker_lost"] for counts in counted.values()),
        "failed_chunks": runtime.events.counts["chunk.failed"],
    }


def _parts(found: dict[str, Any]) -> Iterator[Part]:
    claimed, took = count(found["claimed"], "task"), show_duration(found["seconds"])
    yield f"took {claimed} in {took}: {found['succeeded']:,} DONE, {found['failed']:,} FAILED"
    if found["failed_chunks"]:
        yield f"{count(found['failed_chunks'], 'chunk')} failed as a whole: see the log", NOTED
    if found["is_stopped"]:
        yield "stopped; there may be more", NOTED


def _run_alone(alone: StandaloneWorker, cli: Cli, is_over: Callable[[], bool]) -> bool:
    """Run the worker until `is_over` or a signal; return whether there was one."""
    is_stopped = False

    def stop(*_: object) -> None:
        nonlocal is_stopped
        is_stopped = True
        for number in STOPS:
            signal.signal(number, signal.SIG_DFL)  # a second signal ends the process
        alone.stop_soon()
        cli.note("Waiting for running tasks; once more to end immediately.")

    with signals_to(stop, *STOPS):
        try:
            alone.start()
            alone.run(is_over)
        finally:
            alone.stop()
    return is_stopped
