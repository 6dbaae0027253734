"""`list` and `show`."""

from __future__ import annotations

import shlex
from datetime import datetime

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import (
    LONGEST,
    NOTHING,
    Cell,
    block,
    cell,
    coloured,
    pretty_body,
    print_fields,
    print_json,
    print_table,
    reason,
    say,
    task_json,
)
from delaytasks.cli.times import show_from_now, show_instant, to_past
from delaytasks.core.states import Status, moves_from
from delaytasks.core.task import DelayTask
from delaytasks.core.why import Reason, as_json, why

# -- list -----------------------------------------------------------------------------------------


@click.command("list", epilog=EXIT_CODES)
@click.option("--tag", help="Only tasks of this tag.")
@click.option(
    "--status",
    type=click.Choice([s.name for s in Status], case_sensitive=False),
    help="Only these.",
)
@click.option("--key", help="Only tasks with this key.")
@click.option(
    "--since",
    callback=to_past,
    metavar="TIME",
    help="Due at this time or later: 2030-01-31T18:00:00Z, or 1h, which means an hour ago.",
)
@click.option(
    "--until", callback=to_past, metavar="TIME", help="Due before this time, in the same forms."
)
@click.option("--oldest-first", is_flag=True, help="What was due first comes first.")
@click.option("--limit", type=int, default=100, show_default=True, help="1 to 1000.")
@click.option("--cursor", help="Go on where the last page ended; it says how.")
@pass_cli
def list_(
    cli: Cli,
    tag: str | None,
    status: str | None,
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    oldest_first: bool,
    limit: int,
    cursor: str | None,
) -> None:
    """List tasks in the order of their due times, the newest first.

    The place of a task that no worker could run yet is that of its next try.

    \b
    delaytasks list --status FAILED --since 1h
    """
    page = cli.delays.find(
        tag=tag,
        status=status,
        key=key,
        since=since,
        until=until,
        limit=limit,
        cursor=cursor,
        newest_first=not oldest_first,
    )
    if cli.is_json:
        print_json(
            {
                "tasks": [task_json(task) for task in page],
                "cursor": page.cursor,
                "missing": page.missing,
            }
        )
        return
    if page.missing:
        cli.note(
            f"Not all tasks: {', '.join(f'shard {number}' for number in page.missing)} can not be reached."
        )
    if not page.tasks:
        cli.note("No tasks.")
        return
    now = cli.delays.clock.now()
    headings = ("id", "status", "tag", "key", "when", "due", "queue", "attempts", "error")
    rows = (_row(task, now) for task in page)
    print_table(
        headings,
        rows,
        right="attempts",
        folded="tag key",
        extra="due queue attempts key",
        below="error",
    )
    if page.cursor is not None:
        given = {"--tag": tag, "--status": status, "--key": key, "--since": since, "--until": until}
        words = [
            f"{name} {shlex.quote(_as_typed(value))}"
            for name, value in given.items()
            if value is not None
        ]
        words += ["--oldest-first"] if oldest_first else []
        # On stderr, so that a pipe gets tasks only.
        cli.note(
            f"More: {' '.join([cli.command, 'list', *words, f'--limit {limit}', f'--cursor {page.cursor}'])}"
        )


def _as_typed(value: str | datetime) -> str:
    return value.isoformat() if isinstance(value, datetime) else value


def _row(task: DelayTask, now: datetime) -> list[Cell]:
    due = task.due
    return [
        str(task.id),
        coloured(task.status),
        cell(task.tag),
        cell(task.key),
        show_from_now(due, now),
        show_instant(due),
        cell(task.queue),
        str(task.attempts),
        (reason(task.error), "red"),
    ]


#: Fields that are times.
INSTANTS = (
    "due_time",
    "expected_time",
    "execution_time",
    "create_time",
    "update_time",
    "lease_until",
)

# -- show -----------------------------------------------------------------------------------------


@click.command(epilog=EXIT_CODES)
@click.argument("id", required=False)
@click.option("--tag", help="With --key: the task of this tag that has the key.")
@click.option("--key", help="With --tag: the task that has this key.")
@pass_cli
def show(cli: Cli, id: str | None, tag: str | None, key: str | None) -> None:
    """Show one task: fields, body, error, what may happen next, and why it has not run.

    \b
    delaytasks show 2305843009213693952
    """
    task = cli.delays.get(id, tag=tag, key=key)
    moves = moves_from(task.status)
    attempts = cli.delays.attempts(task)
    reasons = _reasons(cli, task)
    if cli.is_json:
        found = {
            "moves": moves,
            "why": as_json(reasons),
            "failed_attempts": [one.as_json() for one in attempts],
        }
        print_json({**task_json(task), **found})
        return
    now = cli.delays.clock.now()
    shown: list[tuple[str, Cell]] = [("id", str(task.id)), ("status", coloured(task.status))]
    for name, value in task_json(task).items():
        if name not in ("id", "status", "body", "error"):
            instant = (
                (task.due if name == "due_time" else getattr(task, name))
                if name in INSTANTS
                else None
            )
            if isinstance(instant, datetime):
                value = f"{value} ({show_from_now(instant, now)})"
            shown.append((name, cell(value, LONGEST)))
    shown.append(("moves", ", ".join(moves) or NOTHING))
    shown.extend(
        ("why" if number == 0 else "", cell(each.text, LONGEST))
        for number, each in enumerate(reasons)
    )
    print_fields(shown)
    say("body")
    say(block(pretty_body(task)))
    if task.error:
        say("error", fg="red")
        say(block(task.error))
    if attempts:
        say("failed attempts")
        rows: list[list[Cell]] = [
            [str(one.number), show_instant(one.ended), cell(one.worker), reason(one.error)]
            for one in attempts
        ]
        print_table(["attempt", "ended", "worker", "error"], rows)


def _reasons(cli: Cli, task: DelayTask) -> list[Reason]:
    from delaytasks.maintenance.sweeper import SILENT_SWEEPS
    from delaytasks.storage.facts import FactReader

    settings = cli.delays.settings
    store = cli.delays.shards[task.shard].store
    return why(FactReader(store, settings, SILENT_SWEEPS * settings.sweep_s).of(task))
