"""`db`: the tables of this version, made and changed by migrations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import print_json, say
from delaytasks.cli.partitions import partitions

if TYPE_CHECKING:
    from delaytasks.store.database import Database


@click.group(epilog=EXIT_CODES)
def db() -> None:
    """Make and change the tables.

    \b
    delaytasks db upgrade
    """


db.add_command(partitions)


@db.command(epilog=EXIT_CODES)
@click.argument("revision", default="head")
@pass_cli
def upgrade(cli: Cli, revision: str) -> None:
    """Make the tables, or bring them to this version (or to REVISION). Rows stay.

    \b
    delaytasks db upgrade
    """
    from delaytasks.store import migrations

    migrations.upgrade(*_place(cli), revision)
    _done(cli, "upgraded")


@db.command(epilog=EXIT_CODES, context_settings={"ignore_unknown_options": True})
@click.argument("revision", default="-1")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_cli
def downgrade(cli: Cli, revision: str, yes: bool) -> None:
    """Take the last migration back (or all down to REVISION; base is before the first).

    \b
    delaytasks db downgrade --yes
    """
    from delaytasks.store import migrations

    if not yes:
        if cli.is_json or not sys.stdin.isatty():
            raise click.UsageError("A downgrade may drop columns and tables; say --yes.")
        click.confirm(
            f"Downgrade {cli.database_url} by {revision}? Columns and tables may be dropped", abort=True, err=True
        )
    migrations.downgrade(*_place(cli), revision)
    _done(cli, "downgraded")


@db.command(epilog=EXIT_CODES)
@click.option("--check", is_flag=True, help="Exit 1 unless the tables are those of this version.")
@pass_cli
def current(cli: Cli, check: bool) -> None:
    """Print the revision of the tables.

    \b
    delaytasks db current --check
    """
    is_current = _print_current(cli)
    if check and not is_current:
        sys.exit(1)


def _done(cli: Cli, done: str) -> None:
    if not cli.is_json:
        say(f"{done} {cli.database_url}")
    _print_current(cli)


def _print_current(cli: Cli) -> bool:
    from delaytasks.store import migrations

    revision, head = migrations.current(*_place(cli)), migrations.head()
    if cli.is_json:
        print_json({"database": cli.database_url, "revision": revision, "head": head, "is_current": revision == head})
    elif revision is None:
        say(f"no revision yet (this version has {head}); run: {cli.command} db upgrade")
    elif revision == head:
        say(f"revision {revision}, which is this version's")
    else:
        say(f"revision {revision}, this version has {head}; run: {cli.command} db upgrade")
    return revision == head


def _place(cli: Cli) -> tuple[Database, str, str | None]:
    settings = cli.delays.settings
    return cli.delays.store.database, settings.table_prefix, settings.table_schema or None
