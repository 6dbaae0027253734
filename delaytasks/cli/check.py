"""`delaytasks check`: would the waiting tasks run with this code?"""

from __future__ import annotations

import sys

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import cell, count, print_json, print_table, say
from delaytasks.client import DelayTasks
from delaytasks.core.errors import StoreError
from delaytasks.operations.state import explain_overdue
from delaytasks.runtime import runtime_of
from delaytasks.storage.state_queries import Stats

_EXIT_CODES_OF_CHECK = (
    "Exit codes: 0 all would run; 1 some would not, or the database is unavailable; "
    "2 wrong usage or settings."
)


@click.command(cls=Command, epilog=_EXIT_CODES_OF_CHECK)
@pass_cli
def check(cli: Cli) -> None:
    """Check before a deployment that the waiting tasks would run with this code.

    Lists the tasks whose tag has no processor, and those whose body the processor's schema refuses.
    A wrong setting ends the command with exit code 2. Warnings (late tasks that no worker takes, a
    database that can lose tasks) do not change the exit code.

    \b
    delaytasks check
    """
    cli.import_processors()
    runtime_of(cli.delays).checks.check_settings()
    found, warnings = (
        list(cli.delays.check()),
        list(map(cli.hints.rewrite, warnings_of(cli.delays))),
    )
    if cli.is_json:
        print_json({"findings": [finding.as_json() for finding in found], "warnings": warnings})
    else:
        if found:
            print_table(
                ["tag", "queue", "tasks", "first due", "problem", "for example"],
                [
                    [f.tag, ", ".join(f.queues), f.tasks, f.first_due, f.problem, _examples(f.ids)]
                    for f in found
                ],
                folded="tag queue problem",
            )
            tasks = count(sum(finding.tasks for finding in found), "task")
            say(f"{tasks} would not run well with this code")
        else:
            say("every waiting task has a processor that accepts its body")
        print_warnings(warnings)
    if found:
        sys.exit(1)


def _examples(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def warnings_of(delays: DelayTasks) -> list[str]:
    """Return the problems that do not prevent a deployment."""
    warnings, runtime = [], runtime_of(delays)
    try:
        overdue = explain_overdue(runtime.store, delays.settings)
    except StoreError as error:
        overdue = []  # the role may read tasks, but not the tables of workers and policies
        warnings.append(f"late tasks are unknown: {error}")
    warnings += [
        f"{count(group.tasks, 'late task')} of the tag {group.tag} in the queue {group.queue}: "
        f"{group.reason.text}"
        for group in overdue
        if not group.is_expected
    ]
    try:
        problem = Stats(runtime.store.database, runtime.store.schema).standby_problem()
    except StoreError as error:
        problem = f"its replication is unknown: {error}"
    if problem is not None:
        warnings.append(f"{runtime.store.database.shown_url}: {problem}")
    return warnings


def print_warnings(warnings: list[str]) -> None:
    for warning in warnings:
        say(f"warning: {cell(warning, 1000)}", fg="yellow")
