"""`db`: the tables of this version, made and changed by migrations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import print_json, say
from delaytasks.cli.partitions import partitions
from delaytasks.cli.shards import shards

if TYPE_CHECKING:
    from delaytasks.storage.database import Database
    from delaytasks.storage.store import Store


@click.group(epilog=EXIT_CODES)
def db() -> None:
    """Make and change the tables.

    \b
    delaytasks db upgrade
    """


db.add_command(partitions)
db.add_command(shards)


@db.command(epilog=EXIT_CODES)
@click.argument("revision", default="head")
@pass_cli
def upgrade(cli: Cli, revision: str) -> None:
    """Make the tables, or bring them to this version (or to REVISION), in each database. Rows stay.

    \b
    delaytasks db upgrade
    """
    upgrade_all(cli, revision)
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
    from delaytasks.storage import migrations

    if not yes:
        if cli.is_json or not sys.stdin.isatty():
            raise click.UsageError("A downgrade may drop columns and tables; say --yes.")
        click.confirm(
            f"Downgrade {cli.database_url} by {revision}? Columns and tables may be dropped",
            abort=True,
            err=True,
        )
    for store in cli.stores:
        migrations.downgrade(*_place(cli, store), revision)
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


def upgrade_all(cli: Cli, revision: str = "head") -> None:
    """With several databases each of them learns its number."""
    from delaytasks.storage import migrations

    for store in cli.stores:
        migrations.upgrade(*_place(cli, store), revision, store.shard)


def _done(cli: Cli, done: str) -> None:
    if not cli.is_json:
        say(f"{done} {cli.database_url}")
    _print_current(cli)


def _print_current(cli: Cli) -> bool:
    """Whether all databases are this version's."""
    from delaytasks.storage import migrations

    head = migrations.head()
    revisions = [migrations.current(*_place(cli, store)) for store in cli.stores]
    is_current = all(revision == head for revision in revisions)
    if cli.is_json:
        shown = revisions[0] if len(revisions) == 1 else revisions
        print_json(
            {
                "database": cli.database_url,
                "revision": shown,
                "head": head,
                "is_current": is_current,
            }
        )
        return is_current
    for store, revision in zip(cli.stores, revisions, strict=True):
        where = f"shard {store.shard}: " if len(revisions) > 1 else ""
        if revision is None:
            say(f"{where}no revision yet (this version has {head}); run: {cli.command} db upgrade")
        elif revision == head:
            say(f"{where}revision {revision}, which is this version's")
        else:
            say(
                f"{where}revision {revision}, this version has {head}; run: {cli.command} db upgrade"
            )
    return is_current


def _place(cli: Cli, store: Store) -> tuple[Database, str, str | None]:
    settings = cli.delays.settings
    return store.database, settings.table_prefix, settings.table_schema or None
