"""`check`: would the tasks that wait run with this code?"""

from __future__ import annotations

import sys

import click

from delaytasks.cli.context import Cli, pass_cli
from delaytasks.cli.output import Cell, cell, count, print_json, print_table, say
from delaytasks.cli.times import show_instant
from delaytasks.cli.waiting import print_warnings, warnings_of


@click.command(
    epilog="Exit codes: 0 all would run; 1 some would not, or the database is away; 2 wrong usage or settings."
)
@pass_cli
def check(cli: Cli) -> None:
    """Check before a deploy that the tasks which wait would run with this code.

    Lists those whose tag has no processor, and those whose body the processor's schema refuses; a wrong setting ends it
    with 2. Warnings (late tasks that no worker takes, a database that can lose tasks) do not change the exit code.

    \b
    delaytasks check
    """
    cli.import_processors()
    cli.delays.check_settings()
    found, warnings = list(cli.delays.check()), warnings_of(cli.delays)
    if cli.is_json:
        print_json({"findings": [finding.as_json() for finding in found], "warnings": warnings})
    elif not found:
        say("every task that waits has a processor, and a body that it takes")
    else:
        rows: list[list[Cell]] = [
            [
                cell(finding.tag),
                cell(", ".join(finding.queues)),
                f"{finding.tasks:,}",
                show_instant(finding.first_due),
                cell(finding.problem, 200),
                " ".join(map(str, finding.ids)),
            ]
            for finding in found
        ]
        print_table(
            ["tag", "queue", "tasks", "first due", "problem", "for example"],
            rows,
            "tasks",
            "tag queue problem",
        )
        say(
            f"{count(sum(finding.tasks for finding in found), 'task')} would not run well with this code"
        )
    if not cli.is_json:
        print_warnings(warnings)
    if found:
        sys.exit(1)
