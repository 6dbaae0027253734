"""`why`: the reason why a task has not run, or how it ended."""

from __future__ import annotations

import sys

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import LONGEST, cell, coloured, print_json, say
from delaytasks.core.why import Explanation


@click.command(cls=Command)
@click.argument("id", required=False)
@click.option("--tag", help="With --key: the tag of the task.")
@click.option("--key", help="With --tag: the live task with this key, or else the last one.")
@pass_cli
def why(cli: Cli, id: str | None, tag: str | None, key: str | None) -> None:
    """Explain why a task has not run yet, or how it ended, and what to do about it.

    The first reason is the one that you can change first. With --json, each reason has a code, a
    sentence, a remedy and its facts.

    \b
    delaytasks why 2305843009213693952
    delaytasks why --tag order.close --key order-7
    """
    explanation = cli.explain(id, tag, key)
    if cli.is_json:
        print_json(explanation.as_json())
    else:
        _print(explanation)
    if explanation.task is None:
        sys.exit(1)


def _print(explanation: Explanation) -> None:
    task = explanation.task
    if task is not None:
        status, colour = coloured(task.status)
        name = click.style(status, fg=colour) if colour else status
        say(f"task {task.id} ({cell(task.tag)}): {name}")
    for reason in explanation.reasons:
        say(cell(reason.sentence, LONGEST))
        if reason.remedy:
            say(f"  → {cell(reason.remedy, LONGEST)}", fg="yellow")
