"""`config`: the settings that are in effect, and where each of them comes from."""

from __future__ import annotations

import os
import re
from typing import Any

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import NOTHING, Cell, cell, print_fields, print_json, print_table, say
from delaytasks.core.masking import mask_url

_BROKER_VARIABLES = ("CELERY_BROKER_WRITE_URL", "CELERY_BROKER_URL")


@click.command(epilog=EXIT_CODES)
@pass_cli
def config(cli: Cli) -> None:
    """Print the settings and where each comes from.

    \b
    delaytasks config

    Passwords are masked. Later ones win: Celery's configuration, the environment, arguments of DelayTasks(...).
    """
    settings = cli.delays.settings
    places = {
        "app": (cli.app.main or NOTHING, cli.app_origin),
        "database": (cli.database_url, settings.origin("database_url")),
        "broker": (broker_url(cli.app), _broker_origin(cli)),
    }
    rows = settings.effective()
    if cli.is_json:
        names = ("name", "value", "origin", "about")
        listed = [dict(zip(names, row, strict=True)) for row in rows]
        print_json(
            {**{n: {"value": v, "origin": o} for n, (v, o) in places.items()}, "settings": listed}
        )
        return
    print_fields(
        [(name, f"{cell(value, 1000)} (from {origin})") for name, (value, origin) in places.items()]
    )
    say("")
    table: list[list[Cell]] = [
        [name, cell(value), (origin, "" if origin == "default" else "green"), about]
        for name, value, origin, about in rows
    ]
    print_table(
        ("setting", "value", "origin", "meaning"), table, folded="value meaning", extra="meaning"
    )


def broker_url(app: Any) -> str:
    """The broker's URL without its password; several URLs if the broker has several."""
    # Celery has a default too, which its configuration does not say.
    url = app.conf.broker_write_url or app.connection_for_write().as_uri()
    return ";".join(mask_url(part) for part in re.split(r";(?=[a-z0-9+.-]+://)", str(url)))


def _broker_origin(cli: Cli) -> str:
    from delaytasks.embedded import broker_of

    if any(os.environ.get(variable) for variable in _BROKER_VARIABLES):
        return "environment"
    configured = cli.app.conf.broker_url
    return (
        "default"
        if configured in (None, broker_of(cli.delays.settings.data_dir).url)
        else "celery configuration"
    )
