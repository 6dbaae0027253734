"""The command line: `delaytasks …`, and the same commands as `celery -A proj delays …`."""

from __future__ import annotations

import shlex
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource

from delaytasks.cli.context import DEFAULT_APP, Cli, RootGroup, find_app
from delaytasks.model.errors import ConfigError
from delaytasks.operate.operations import OPERATIONS

#: The commands of each module. All others are made from the table of operations.
_MODULES = {
    "recurring_commands": "import recurring",
    "servers": "access serve",
    "status": "check db status",
    "tasks": "list show",
    "up": "run up",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


class AllCommands(RootGroup):
    """All commands. The module of a command is imported when the command is called or listed.

    Every `celery` command imports this module, and most of them need no command of ours.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        plain = (each.name for each in OPERATIONS.values() if each.is_command)
        return sorted({*_MODULE_OF, *(name for name in plain if " " not in name)})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _MODULE_OF and name in self.list_commands(ctx):
            if OPERATIONS[name].bulk is not None:
                from delaytasks.cli.tasks import move_command

                return move_command(name)
            from delaytasks.cli.options import command_of

            return command_of(name)
        if name not in _MODULE_OF:
            return super().get_command(ctx, name)
        module = import_module(f"delaytasks.cli.{_MODULE_OF[name]}")
        commands = (each for each in vars(module).values() if isinstance(each, click.Command))
        return next(command for command in commands if command.name == name)


@click.group(cls=AllCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-A",
    "--app",
    metavar="APP",
    envvar="DELAYTASKS_APP",
    default=DEFAULT_APP,
    show_default=True,
    show_envvar=True,
    help="The Celery app, as celery -A takes it.",
)
@click.version_option(package_name="delaytasks", message="delaytasks %(version)s")
@click.pass_context
def main(ctx: click.Context, app: str) -> None:
    """Durable delayed tasks on Celery.

    \b
    delaytasks db upgrade
    delaytasks schedule order.close '{"order": 7}' --delay 30m
    delaytasks list --status FAILED
    """
    is_typed = ctx.get_parameter_source("app") is ParameterSource.COMMANDLINE
    command = f"delaytasks -A {shlex.quote(app)}" if is_typed else "delaytasks"
    ctx.obj = Cli(ctx, lambda: find_app(app), command, app)


@click.group(cls=AllCommands)
@click.pass_context
def delays(ctx: click.Context) -> None:
    """Delayed tasks: schedule, show, cancel, move and run them.

    \b
    celery -A proj delays list --status FAILED
    """
    if ctx.obj.no_color:
        ctx.color = False
    app, name = ctx.obj.app, ctx.parent and ctx.parent.params.get("app")
    command = f"celery -A {shlex.quote(name)} delays" if isinstance(name, str) else "celery delays"
    app_name = name if isinstance(name, str) else DEFAULT_APP
    ctx.obj = Cli(ctx, lambda: app, command, app_name)


@click.group("delays", cls=AllCommands)
@click.pass_context
def flask_delays(ctx: click.Context) -> None:
    """Delayed tasks: schedule, show, cancel, move and run them.

    \b
    flask --app shop delays list --status FAILED
    """
    # No application context surrounds the command: calls would be part of the transaction of its
    # `db.session`.
    info = ctx.obj
    path = info.app_import_path
    command = f"flask --app {shlex.quote(path)} delays" if path else "flask delays"

    def find() -> Any:
        app = info.load_app()
        if "delaytasks" in app.extensions:
            return app.extensions["delaytasks"]._runtime.celery
        raise ConfigError(
            f"the Flask app {app.name!r} has no delayed tasks; call init_app(app) of a FlaskDelays "
            "where the app is made"
        )

    ctx.obj = Cli(ctx, find, command, None)
