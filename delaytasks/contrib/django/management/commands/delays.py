"""`manage.py delays …`: the commands of `delaytasks …`, with Django's settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

import click
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from delaytasks.cli.context import Cli
from delaytasks.cli.main import AllCommands
from delaytasks.contrib.django.instance import project_delays
from delaytasks.runtime import runtime_of

#: The Celery app of the project, as the processes of `up` find it.
_APP = "delaytasks.contrib.django"


@click.group(cls=AllCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def _commands(ctx: click.Context) -> None:
    """Delayed tasks: schedule, show, cancel, move and run them.

    \b
    python manage.py delays list --status FAILED
    """

    def find() -> Any:
        return runtime_of(project_delays()).celery

    ctx.obj = Cli(ctx, find, "python manage.py delays", _APP)


class Command(BaseCommand):
    help = "Delayed tasks: schedule, show, cancel, move and run them."
    requires_system_checks: Sequence[str] = []

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass on everything except the options that manage.py has read already."""
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        ours.add_argument("--settings")
        ours.add_argument("--pythonpath")
        _, arguments = ours.parse_known_args(argv[2:])
        try:
            _commands.main(arguments, prog_name=f"{os.path.basename(argv[0])} {argv[1]}")
        finally:
            connections.close_all()

    def print_help(self, prog_name: str, subcommand: str) -> None:
        self.run_from_argv([prog_name, subcommand, "--help"])

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def handle(self, *_: Any, arguments: Sequence[str], **options: Any) -> None:
        """Run a command for `call_command("delays", "list", "--json")`."""
        stdout = options.get("stdout")
        try:
            with redirect_stdout(stdout) if stdout else nullcontext():
                _commands.main(list(arguments), prog_name="delays", standalone_mode=False)
        except click.ClickException as error:
            code = error.exit_code
            raise CommandError(error.format_message(), returncode=code) from error
