"""`audit`: what was done to many tasks at once."""

from __future__ import annotations

import json

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import Cell, cell, print_json, print_table
from delaytasks.cli.times import show_from_now, show_instant
from delaytasks.core.bulk import AuditEntry

_COLOURS = {"done": "green", "failed": "red", "stopped": "yellow", "running": "cyan"}


@click.command(epilog=EXIT_CODES)
@click.option("--limit", type=int, default=20, show_default=True, help="1 to 1000.")
@pass_cli
def audit(cli: Cli, limit: int) -> None:
    """List what was done to many tasks at once, the newest first: who, which ones, and how far it came.

    \b
    delaytasks audit --limit 5

    A run that died says `running`, and is not seen any more.
    """
    entries = cli.delays.audit(limit=limit)
    if cli.is_json:
        print_json([entry.as_json() for entry in entries])
        return
    if not entries:
        cli.note("Nothing yet.")
        return
    now = cli.delays.clock.now()
    print_table(
        ("started", "actor", "action", "filter", "state", "seen", "matched", "changed", "refused"),
        ([*_row(entry), show_from_now(entry.seen_at, now), *_counts(entry)] for entry in entries),
        right="matched changed refused",
        folded="actor filter",
        extra="seen",
    )


def _row(entry: AuditEntry) -> list[Cell]:
    named = cell(json.dumps(entry.filter, ensure_ascii=False))
    state = (entry.state, _COLOURS.get(entry.state, ""))
    return [show_instant(entry.started_at), cell(entry.actor), cell(entry.action), named, state]


def _counts(entry: AuditEntry) -> list[Cell]:
    return [f"{number:,}" for number in (entry.matched, entry.changed, entry.refused)]
