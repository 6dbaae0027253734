"""The command line: `delaytasks …`, and the same commands as `celery -A proj delays …`."""

from __future__ import annotations

from importlib import import_module

import click

from delaytasks.cli.context import (
    DEFAULT_APP,
    RootGroup,
    open_cli,
    open_cli_under_celery,
    open_cli_under_flask,
)
from delaytasks.operate.operations import OPERATIONS

#: The commands of each module. All others are made from the table of operations.
_MODULES = {
    "recurring_commands": "import recurring",
    "run": "run",
    "servers": "access serve",
    "setup": "check db",
    "status": "status",
    "tasks": "cancel list rerun reschedule show",
    "up": "up",
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
    open_cli(ctx, app)


@click.group(cls=AllCommands)
@click.pass_context
def delays(ctx: click.Context) -> None:
    """Delayed tasks: schedule, show, cancel, move and run them.

    \b
    celery -A proj delays list --status FAILED
    """
    open_cli_under_celery(ctx)


@click.group("delays", cls=AllCommands)
@click.pass_context
def flask_delays(ctx: click.Context) -> None:
    """Delayed tasks: schedule, show, cancel, move and run them.

    \b
    flask --app shop delays list --status FAILED
    """
    open_cli_under_flask(ctx)
