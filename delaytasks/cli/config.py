"""`config`: the effective settings and their origins."""

from __future__ import annotations

import os
import re
from typing import Any

import click

from delaytasks.attachment import file_broker_url
from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import GOOD, NOTHING, cell, print_fields, print_json, print_table, say
from delaytasks.core.text import mask_url

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
