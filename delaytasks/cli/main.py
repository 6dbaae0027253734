"""The command line: `delaytasks …`, and the same commands as `celery -A proj delays …`."""

from __future__ import annotations

from importlib import import_module, metadata

import click

from delaytasks.cli.audit import audit
from delaytasks.cli.check import check
from delaytasks.cli.config import config
from delaytasks.cli.context import (
    EXIT_CODES,
    Commands,
    json_option,
    open_cli,
    open_cli_under_celery,
)
from delaytasks.cli.database import db
from delaytasks.cli.drain import drain
from delaytasks.cli.encryption import encryption
from delaytasks.cli.look import list_, show
from delaytasks.cli.policies import pause, policy, resume
from delaytasks.cli.schedule import schedule
from delaytasks.cli.stats import stats
from delaytasks.cli.tasks import cancel, reschedule, retry, touch


class AllCommands(Commands):
    """`up` brings a supervisor along, which the other commands do without."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "up"])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "up":
            command: click.Command = import_module("delaytasks.cli.up").up
            return command
        return super().get_command(ctx, name)


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        click.echo(f"delaytasks {version()}")
        ctx.exit()


def version() -> str:
    try:
        return metadata.version("delaytasks")
    except metadata.PackageNotFoundError:
        return "(not installed)"


@click.group(
    cls=AllCommands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option(
    "-A",
    "--app",
    metavar="APP",
    envvar="DELAYTASKS_APP",
    default="delaytasks.celery",
    show_default=True,
    show_envvar=True,
    help="The Celery app, as celery -A takes it.",
)
@json_option
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print it.",
)
@click.pass_context
def main(ctx: click.Context, app: str) -> None:
    """Durable delayed tasks on Celery.

    \b
    delaytasks db upgrade
    delaytasks schedule order.close '{"order": 7}' --delay 30m
    delaytasks list --status FAILED
    """
    open_cli(ctx, app)


@click.group(cls=AllCommands, epilog=EXIT_CODES)
@json_option
@click.pass_context
def delays(ctx: click.Context) -> None:
    """Delayed tasks: schedule, look at, cancel, move and run them.

    \b
    celery -A proj delays list --status FAILED
    """
    open_cli_under_celery(ctx)


for _group in (main, delays):
    for _command in (
        audit,
        cancel,
        check,
        config,
        db,
        drain,
        list_,
        pause,
        policy,
        reschedule,
        resume,
        retry,
    ):
        _group.add_command(_command)
    for _command in (encryption, schedule, show, stats, touch):
        _group.add_command(_command)
