"""`delaytasks up`: run database, broker, worker, beat, console and Flower with one log."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from delaytasks.attachment import file_broker_url
from delaytasks.cli.config import broker_url
from delaytasks.cli.console import PORT as CONSOLE_PORT
from delaytasks.cli.context import DEFAULT_APP, Cli, pass_cli
from delaytasks.cli.database import upgrade_all
from delaytasks.cli.supervisor import Spec, Supervisor
from delaytasks.core.private_files import make_folder
from delaytasks.runtime import runtime_of

FLOWER_PORT = 5555
#: The time that a worker may take to finish its running tasks when it is stopped.
WORKER_PATIENCE_S = 60.0
#: Lines of a worker about root, which `up` replaces by one line, and about a broker without a host.
_WORKER_NOISE = re.compile(
    "No hostname was supplied|"
    "SecurityWarning: You're running|absolutely not recommended!|Please specify a different user|"
    "User information: uid=|_warn_or_raise_security_error"
)


@click.command()
@click.option(
    "--concurrency", "-c", type=click.IntRange(1), help="Processes or threads of the worker [CPUs]."
)
@click.option(
    "--pool",
    "-P",
    type=click.Choice(["prefork", "threads", "solo"]),
    default="prefork",
    show_default=True,
    help="The pool of the worker.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Flower's port [{FLOWER_PORT}, or the next free one].",
)
@click.option("--no-flower", is_flag=True, help="Without Flower, even where it is installed.")
@click.option("--no-console", is_flag=True, help="Without the console, even where it is installed.")
@pass_cli
def up(
    cli: Cli,
    concurrency: int | None,
    pool: str,
    port: int | None,
    no_flower: bool,
    no_console: bool,
) -> None:
    """Start everything here: tables, broker, worker, beat, console and Flower, with one log.

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
    upgrade_all(cli)
    has_files = _use_files(cli.app, settings.data_dir)
    specs = _celery(cli.app_name, settings.data_dir, concurrency, pool, flower_port)
    if console_port:
        specs.append(_console(cli.app_name, console_port))
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
    app: str, data_dir: str, concurrency: int | None, pool: str, flower_port: int | None
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
        Spec(
            "worker",
            celery + worker,
            "cyan",
            1,
            WORKER_PATIENCE_S,
            ready_line=" ready.",
            noise=_WORKER_NOISE,
        ),
        Spec("beat", celery + beat, "magenta", stage=2, umask=0o077),
    ]
    if flower_port:
        # At WARNING, Flower would log that the starting worker does not answer yet.
        flower = ["flower", "--address=127.0.0.1", f"--port={flower_port}", "--logging=error"]
        specs.append(Spec("flower", celery + flower, "green", stage=2))
    return specs


def _console(app: str, port: int) -> Spec:
    command = [sys.executable, "-m", "delaytasks", "-A", app, "console", f"--port={port}"]
    return Spec("console", command, "blue", stage=2, umask=0o077)


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
    flower = "install Flower for a web page: pip install 'delaytasks[flower]'"
    if console_port:
        yield "console", f"http://127.0.0.1:{console_port} (more users: {cli.command} console-user)"
    else:
        yield "console", "install it: pip install 'delaytasks[console]'"
    yield "watch", f"http://127.0.0.1:{flower_port} (Flower)" if flower_port else flower
    tags = sorted(
        p.tag for p in runtime_of(cli.delays).registry if not p.tag.startswith("delaytasks.")
    )
    if not tags:
        yield (
            "processors",
            "none yet: put @delaytasks.processor functions into a module, say tasks.py,",
        )
        yield "", 'and into celeryconfig.py here: imports = ["tasks"]'
    tag = tags[0] if tags else "hello"
    body = '{"order": 7}' if tag == "order.close" else "{}"
    example = f"{cli.command} schedule {tag} '{body}' --delay 5"
    yield "try", f"in another shell like this one, in this folder: {example}"
    yield "", f"then: {cli.command} list"
    yield "stop", "Ctrl-C"
