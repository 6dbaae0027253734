"""Prepare a call of the command line: by itself, or under `celery`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

import click
from click.core import ParameterSource

from delaytasks.cli.celery_app import find_app
from delaytasks.cli.context import DEFAULT_APP, Cli

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
