"""The command line: `delaytasks …`, and the same commands as `celery -A proj delays …`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from delaytasks.cli.audit import audit
from delaytasks.cli.check import check
from delaytasks.cli.config import config
from delaytasks.cli.context import RootGroup, open_cli, open_cli_under_celery
from delaytasks.cli.database import db
from delaytasks.cli.drain import drain
from delaytasks.cli.encryption import encryption
from delaytasks.cli.look import list_, show
from delaytasks.cli.policies import pause, policy, resume
from delaytasks.cli.schedule import schedule
from delaytasks.cli.stats import stats
from delaytasks.cli.tasks import cancel, reschedule, retry, touch

_TASKS = [schedule, list_, show, cancel, reschedule, retry, touch, drain]
_DEPLOYMENT = [audit, check, config, db, encryption, pause, policy, resume, stats]


class AllCommands(RootGroup):
    """All commands. `up` is imported when it is called, because only it needs the supervisor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(commands=[*_TASKS, *_DEPLOYMENT], **options)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "up"])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name == "up":
            command: click.Command = import_module("delaytasks.cli.up").up
            return command
        return super().get_command(ctx, name)


@click.group(cls=AllCommands, context_settings={"help_option_names": ["-h", "--help"]})
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
