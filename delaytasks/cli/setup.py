"""`delaytasks db upgrade` and `check`: the tables, the settings, and tasks that would not run."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import click

from delaytasks.attachment import file_broker_url
from delaytasks.cli.context import Cli, Command, Group, pass_cli
from delaytasks.cli.output import GOOD, NOTED, NOTHING, Table, cell, fields
from delaytasks.client import DelayTasks
from delaytasks.db import migrations
from delaytasks.db.engines import lacks_sqlite_file
from delaytasks.model.errors import ConfigError, StoreError
from delaytasks.model.text import count, mask_url
from delaytasks.operate.state import read_tables, server_problem
from delaytasks.runtime import runtime_of

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
@click.option(
    "--to", metavar="REVISION", default="head", help="Another revision; base is before the first."
)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if the tables need this.")
@click.option("--yes", is_flag=True, help="Go back without a question.")
@pass_cli
def upgrade(cli: Cli, to: str, check: bool, yes: bool) -> None:
    """Make the tables, or bring them to this version.

    \b
    delaytasks db upgrade
    delaytasks db upgrade --check
    delaytasks db upgrade --to base --yes

    Rows stay, unless --to goes back to a revision whose tables have no place for them.
    """
    database_url = cli.store.database.shown_url
    if check:
        sys.exit(0 if _answer_current(cli) else 1)
    is_for_own_app = _is_for_own_app(cli)
    current = migrations.current(*cli.tables)
    is_back = to == "base" or to.startswith("-") or (current is not None and to < current)
    if is_back:
        cli.require_terminal(yes, "Going back may drop columns and tables; use --yes.")
        cli.confirm(yes, f"Bring {database_url} back to {to}? Tables may be dropped")
        migrations.downgrade(*cli.tables, to)
    else:
        migrations.upgrade(*cli.tables, to)
    _answer_current(cli, f"{'downgraded' if is_back else 'upgraded'} {database_url}")
    if not is_for_own_app:
        cli.note(OTHER_DATABASE)


def _is_for_own_app(cli: Cli) -> bool:
    """Return False if the user may not have meant the default database, which is new."""
    if cli.app_origin != "default" or cli.delays.settings.database_url:
        return True
    is_new = lacks_sqlite_file(cli.store.database.url)
    return not is_new and not Path("manage.py").exists()


def _answer_current(cli: Cli, *done: str) -> bool:
    """Print the revision; return whether it is this version's."""
    head, revision = migrations.head(), migrations.current(*cli.tables)
    is_current = revision == head
    remedy = f"this version has {head}; run: {cli.command} db upgrade"
    cli.answer(
        {
            "database": cli.store.database.shown_url,
            "revision": revision,
            "head": head,
            "is_current": is_current,
        },
        *done,
        f"revision {revision or 'none yet'}, {'this version has it' if is_current else remedy}",
    )
    return is_current


# -- `check`: would the waiting tasks run with this code, and the effective settings --------------


_BROKER_VARIABLES = ("CELERY_BROKER_WRITE_URL", "CELERY_BROKER_URL")
_EXIT_CODES_OF_CHECK = (
    "Exit codes: 0 all would run; 1 some would not, or the database is unavailable; "
    "2 wrong usage or settings."
)


@click.command(cls=Command, epilog=_EXIT_CODES_OF_CHECK)
@click.option("--settings", is_flag=True, help="Print the settings and the origin of each instead.")
@pass_cli
def check(cli: Cli, settings: bool) -> None:
    """Check before a deployment that the waiting tasks would run with this code.

    \b
    delaytasks check
    delaytasks check --settings

    Lists the tasks whose tag has no processor, and those whose body the processor's schema refuses.
    A wrong setting ends the command with exit code 2. Warnings (late tasks that no worker takes, a
    database that can lose tasks) do not change the exit code.

    Passwords are masked. Celery's configuration is overridden by the environment, and both by the
    arguments of DelayTasks(...).
    """
    if settings:
        _answer_settings(cli)
        return
    cli.import_processors()
    cli.runtime.checks.check_settings()
    found = cli.delays.check()
    warnings = [*map(cli.rewrite, warnings_of(cli.delays))]
    tasks = count(sum(finding.tasks for finding in found), "task")
    verdict = f"{tasks} would not run well with this code"
    rows = [
        [f.tag, ", ".join(f.queues), f.tasks, f.first_due, f.problem, " ".join(map(str, f.ids))]
        for f in found
    ]
    columns = "tag,queue,tasks,first due,problem,for example"
    cli.answer(
        {"findings": [finding.as_json() for finding in found], "warnings": warnings},
        Table(columns, rows, folded="tag,queue,problem"),
        verdict if found else "every waiting task has a processor that accepts its body",
        *((f"warning: {cell(warning, 1000)}", NOTED) for warning in warnings),
    )
    if found:
        sys.exit(1)


def warnings_of(delays: DelayTasks) -> list[str]:
    """Return the problems that do not prevent a deployment."""
    from delaytasks.callbacks.sending import tls_context

    warnings, runtime = [], runtime_of(delays)
    try:
        overdue = read_tables(runtime.store, delays.settings).late
    except StoreError as error:
        overdue = ()  # the role may read tasks, but not the tables of workers and policies
        warnings.append(f"late tasks are unknown: {error}")
    warnings += [
        f"{count(group.tasks, 'late task')} of the tag {group.tag} in the queue {group.queue}: "
        f"{group.reason.text}"
        for group in overdue
        if not group.is_expected
    ]
    try:
        problem = server_problem(runtime.store.database)
    except StoreError as error:
        problem = f"its replication is unknown: {error}"
    try:
        tls_context()
    except ConfigError as error:  # a deployment without callbacks may do without
        warnings.append(str(error))
    if problem is not None:
        warnings.append(f"{runtime.store.database.shown_url}: {problem}")
    return warnings


def _answer_settings(cli: Cli) -> None:
    settings = cli.delays.settings
    places = {
        "app": (cli.app.main or NOTHING, cli.app_origin),
        "database": (cli.store.database.shown_url, settings.origin("database_url")),
        "broker": (broker_url(cli.app), _broker_origin(cli)),
    }
    rows = settings.effective()
    names = ("name", "value", "origin", "about")
    document: dict[str, Any] = {n: {"value": v, "origin": o} for n, (v, o) in places.items()}
    document["settings"] = [dict(zip(names, row, strict=True)) for row in rows]
    shown = [
        [name, value, (origin, "" if origin == "default" else GOOD), about]
        for name, value, origin, about in rows
    ]
    columns, folded = "setting,value,origin,meaning", "value,meaning"
    cli.answer(
        document,
        fields([(name, f"{value} (from {origin})") for name, (value, origin) in places.items()]),
        "",
        Table(columns, shown, folded=folded, extra="meaning"),
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
