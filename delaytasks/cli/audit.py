"""`audit`: list the actions on many tasks."""

from __future__ import annotations

import json
from typing import Any

import click

from delaytasks.cli.context import Cli, Command, pass_cli
from delaytasks.cli.output import BAD, GOOD, print_json, print_table
from delaytasks.cli.times import show_from_now
from delaytasks.core.text import some_values
from delaytasks.runtime import runtime_of

_AUDIT_COLOURS = {"done": GOOD, "failed": BAD, "stopped": "yellow", "running": "cyan"}


@click.command(cls=Command)
@click.option("--limit", type=int, default=20, show_default=True, help="1 to 1000.")
@pass_cli
def audit(cli: Cli, limit: int) -> None:
    """List the actions on many tasks, the newest first: the actor, the filter and the counts.

    \b
    delaytasks audit --limit 5

    If the process of an action died, its state stays `running`, and its time of `seen` stops.
    """
    entries = cli.delays.audit(limit=limit)
    if cli.is_json:
        print_json([entry.as_json() for entry in entries])
        return
    if not entries:
        cli.note("No actions yet.")
        return
    now = runtime_of(cli.delays).clock.now()
    print_table(
        (
            "id",
            "started",
            "actor",
            "action",
            "filter",
            "state",
            "seen",
            "matched",
            "changed",
            "refused",
        ),
        [
            [
                str(entry.id),
                entry.started_at,
                entry.actor,
                entry.action,
                _filter_text(entry.filter),
                (entry.state, _AUDIT_COLOURS.get(entry.state, "")),
                show_from_now(entry.seen_at, now),
                entry.matched,
                entry.changed,
                entry.refused,
            ]
            for entry in entries
        ],
        folded="actor filter",
        extra="seen",
    )


def _filter_text(filter: dict[str, Any]) -> str:
    """Return a filter for the table, which has only the first of many ids. `--json` has all."""
    if "ids" in filter:
        filter = {**filter, "ids": some_values(filter["ids"])}
    return json.dumps(filter, ensure_ascii=False)
