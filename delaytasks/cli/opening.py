"""Prepare a call of the command line: by itself, under `celery`, or under `flask`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import Any

import click
from click.core import ParameterSource

from delaytasks.cli.celery_app import find_app
from delaytasks.cli.context import DEFAULT_APP, Cli
from delaytasks.core.errors import ConfigError

_ORIGINS: dict[ParameterSource | None, str] = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
}


def _program() -> str:
    """Return this program's name, or its path if the shell would not find the name on the PATH."""
    path = sys.argv[0]
    if path.endswith(os.path.join("delaytasks", "__main__.py")):
        return "python -m delaytasks"
    if os.path.basename(path) != "delaytasks":  # a test
        return "delaytasks"
    found = shutil.which("delaytasks")
    is_on_path = found is not None and os.path.samefile(found, path)
    return "delaytasks" if is_on_path else shlex.quote(path)


def open_cli(ctx: click.Context, app: str) -> None:
    """Prepare `delaytasks -A app …`."""
    origin = _ORIGINS.get(ctx.get_parameter_source("app"), "default")
    command = f"{_program()} -A {shlex.quote(app)}" if origin == "command line" else _program()
    ctx.obj = Cli(ctx, lambda: find_app(app), command, app, origin)


def open_cli_under_celery(ctx: click.Context) -> None:
    """Prepare `celery -A proj delays …`, for which Celery has found the app."""
    if ctx.obj.no_color:
        ctx.color = False
    app = ctx.obj.app
    name = ctx.parent.params.get("app") if ctx.parent is not None else None
    command = f"celery -A {shlex.quote(name)} delays" if isinstance(name, str) else "celery delays"
    app_name = name if isinstance(name, str) else DEFAULT_APP
    ctx.obj = Cli(ctx, lambda: app, command, app_name, "celery")


def open_cli_under_flask(ctx: click.Context) -> None:
    """Prepare `flask --app proj delays …`. No application context surrounds the command.

    In an application context, calls would be part of the transaction of `db.session`.
    """
    info = ctx.obj
    path = info.app_import_path
    command = f"flask --app {shlex.quote(path)} delays" if path else "flask delays"
    ctx.obj = Cli(ctx, lambda: _celery_of_flask(info.load_app()), command, DEFAULT_APP, "flask")


def _celery_of_flask(app: Any) -> Any:
    delays = app.extensions.get("delaytasks")
    if delays is None:
        raise ConfigError(
            f"the Flask app {app.name!r} has no delayed tasks; call init_app(app) of a FlaskDelays "
            "where the app is made"
        )
    return delays._runtime.celery
