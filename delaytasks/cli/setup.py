"""`delaytasks db` and `delaytasks config`."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from delaytasks.attachment import file_broker_url
from delaytasks.cli.context import Cli, Command, Group, pass_cli
from delaytasks.cli.output import GOOD, NOTHING, cell, print_fields, print_json, print_table, say
from delaytasks.core.text import mask_url
from delaytasks.storage import migrations
from delaytasks.storage.engines import lacks_sqlite_file

OTHER_DATABASE = (
    "This is the default database of this folder. For the database of your own app: "
    "delaytasks -A APP db upgrade (Flask: flask --app APP delays db upgrade; Django: python "
    "manage.py migrate), or set DELAYTASKS_DATABASE_URL."
)


@click.group(cls=Group)
def db() -> None:
    """Make and change the tables.

    \b
    delaytasks db upgrade
    """


@db.command()
@click.argument("revision", default="head")
@pass_cli
def upgrade(cli: Cli, revision: str) -> None:
    """Make the tables, or bring them to this version (or to REVISION).

    Rows stay.

    \b
    delaytasks db upgrade
    """
    is_for_own_app = _is_for_own_app(cli)
    upgrade_all(cli, revision)
    _report(cli, "upgraded")
    if not is_for_own_app:
        cli.note(OTHER_DATABASE)


@db.command(context_settings={"ignore_unknown_options": True})
@click.argument("revision", default="-1")
@click.option("--yes", is_flag=True, help="Do not ask.")
@pass_cli
def downgrade(cli: Cli, revision: str, yes: bool) -> None:
    """Undo the last migration (or all down to REVISION; base is before the first).

    \b
    delaytasks db downgrade --yes
    """
    cli.require_terminal(yes, "A downgrade may drop columns and tables; use --yes.")
    url = cli.database_url
    cli.confirm(yes, f"Downgrade {url} by {revision}? Columns and tables may be dropped")
    migrations.downgrade(*cli.tables, revision)
    _report(cli, "downgraded")


@db.command()
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
    migrations.upgrade(*cli.tables, revision)


def _is_for_own_app(cli: Cli) -> bool:
    """Return False if the user may not have meant the default database, which is new."""
    if cli.app_origin != "default" or cli.delays.settings.database_url:
        return True
    is_new = lacks_sqlite_file(cli.store.database.url)
    return not is_new and not Path("manage.py").exists()


def _report(cli: Cli, done: str) -> None:
    if not cli.is_json:
        say(f"{done} {cli.database_url}")
    _print_current(cli)


def _print_current(cli: Cli) -> bool:
    """Print the revision; return whether it is this version's."""
    head, revision = migrations.head(), migrations.current(*cli.tables)
    is_current = revision == head
    if cli.is_json:
        print_json(
            {
                "database": cli.database_url,
                "revision": revision,
                "head": head,
                "is_current": is_current,
            }
        )
        return is_current
    remedy = f"run: {cli.command} db upgrade"
    if revision is None:
        say(f"no revision yet (this version has {head}); {remedy}")
    elif is_current:
        say(f"revision {revision}, which is this version's")
    else:
        say(f"revision {revision}, this version has {head}; {remedy}")
    return is_current


# -- `config`: the effective settings and their origins -------------------------------------------


_BROKER_VARIABLES = ("CELERY_BROKER_WRITE_URL", "CELERY_BROKER_URL")


@click.command(cls=Command)
@pass_cli
def config(cli: Cli) -> None:
    """Print the settings and the origin of each.

    \b
    delaytasks config

    Passwords are masked. Celery's configuration is overridden by the environment, and both by the
    arguments of DelayTasks(...).
    """
    settings = cli.delays.settings
    places = {
        "app": (cli.app.main or NOTHING, cli.app_origin),
        "database": (cli.database_url, settings.origin("database_url")),
        "broker": (broker_url(cli.app), _broker_origin(cli)),
    }
    rows = settings.effective()
    if cli.is_json:
        document: dict[str, Any] = {n: {"value": v, "origin": o} for n, (v, o) in places.items()}
        names = ("name", "value", "origin", "about")
        document["settings"] = [dict(zip(names, row, strict=True)) for row in rows]
        print_json(document)
        return
    print_fields((n, f"{cell(v, 1000)} (from {origin})") for n, (v, origin) in places.items())
    say("")
    print_table(
        ("setting", "value", "origin", "meaning"),
        [
            [name, value, (origin, "" if origin == "default" else GOOD), about]
            for name, value, origin, about in rows
        ],
        folded="value meaning",
        extra="meaning",
    )


def broker_url(app: Any) -> str:
    """Return the broker's URL, or several, without passwords."""
    # Celery's default URL is not in its configuration.
    url = app.conf.broker_write_url or app.connection_for_write().as_uri()
    return ";".join(mask_url(part) for part in re.split(r";(?=[a-z0-9+.-]+://)", str(url)))


def _broker_origin(cli: Cli) -> str:
    if any(os.environ.get(variable) for variable in _BROKER_VARIABLES):
        return "environment"
    defaults = (None, file_broker_url(cli.delays.settings.data_dir))
    return "default" if cli.app.conf.broker_url in defaults else "celery configuration"
