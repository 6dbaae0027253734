"""`list`, `show`, `cancel`, `reschedule`, `touch` and `retry`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import click

from delaytasks.cli.context import EXIT_CODES, Cli, pass_cli
from delaytasks.cli.output import (
    LONGEST,
    NOTHING,
    Cell,
    block,
    cell,
    coloured,
    count,
    failure_of,
    pretty_body,
    print_fields,
    print_json,
    print_table,
    reason,
    say,
    sentence,
    task_json,
)
from delaytasks.cli.times import (
    at_option,
    delay_option,
    show_from_now,
    show_instant,
    to_duration,
    to_instant,
)
from delaytasks.core.errors import DelayTaskError, StoreError
from delaytasks.core.ids import check_id
from delaytasks.core.states import Status, moves_from
from delaytasks.core.task import DelayTask

_TAG_OF_KEY = click.option("--tag", help="With --key: the task of this tag that has the key.")
_KEY = click.option("--key", help="With --tag: the task that has this key.")


# -- list -----------------------------------------------------------------------------------------


@click.command("list", epilog=EXIT_CODES)
@click.option("--tag", help="Only tasks of this tag.")
@click.option("--status", type=click.Choice([s.name for s in Status], case_sensitive=False), help="Only these.")
@click.option("--key", help="Only tasks with this key.")
@click.option(
    "--since", callback=to_instant, metavar="INSTANT", help="Due at this instant or later, as 2030-01-31T18:00:00Z."
)
@click.option("--until", callback=to_instant, metavar="INSTANT", help="Due before this instant.")
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
    limit: int,
    cursor: str | None,
) -> None:
    """List tasks in the order of their due times.

    \b
    delaytasks list --status FAILED --since 2030-01-31T00:00:00Z
    """
    page = cli.delays.find(tag=tag, status=status, key=key, since=since, until=until, limit=limit, cursor=cursor)
    if cli.is_json:
        print_json({"tasks": [task_json(task) for task in page], "cursor": page.cursor, "missing": page.missing})
        return
    if page.missing:
        cli.note(f"Not all tasks: {', '.join(f'shard {number}' for number in page.missing)} can not be reached.")
    if not page.tasks:
        cli.note("No tasks.")
        return
    now = cli.delays.clock.now()
    headings = ("id", "status", "tag", "key", "when", "due", "queue", "attempts", "error")
    rows = (_row(task, now) for task in page)
    print_table(headings, rows, right="attempts", folded="tag key queue error", extra="due queue attempts")
    if page.cursor is not None:
        given = {"--tag": tag, "--status": status, "--key": key, "--since": since, "--until": until}
        words = [f"{name} {shlex.quote(_as_typed(value))}" for name, value in given.items() if value is not None]
        # On stderr, so that a pipe gets tasks only.
        cli.note(f"More: {' '.join([cli.command, 'list', *words, f'--limit {limit}', f'--cursor {page.cursor}'])}")


def _as_typed(value: str | datetime) -> str:
    return value.isoformat() if isinstance(value, datetime) else value


def _row(task: DelayTask, now: datetime) -> list[Cell]:
    due = task.expected_time
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


# -- show -----------------------------------------------------------------------------------------


@click.command(epilog=EXIT_CODES)
@click.argument("id", required=False)
@_TAG_OF_KEY
@_KEY
@pass_cli
def show(cli: Cli, id: str | None, tag: str | None, key: str | None) -> None:
    """Show one task: fields, body, error, and what may happen next.

    \b
    delaytasks show 2305843009213693952
    """
    task = cli.delays.get(id, tag=tag, key=key)
    moves = moves_from(task.status)
    attempts = cli.delays.attempts(task)
    if cli.is_json:
        print_json({**task_json(task), "moves": moves, "failed_attempts": [one.as_json() for one in attempts]})
        return
    now = cli.delays.clock.now()
    shown: list[tuple[str, Cell]] = [("id", str(task.id)), ("status", coloured(task.status))]
    for name, value in task_json(task).items():
        if name not in ("id", "status", "body", "error"):
            instant = getattr(task, name, None)
            if isinstance(instant, datetime):
                value = f"{value} ({show_from_now(instant, now)})"
            shown.append((name, cell(value, LONGEST)))
    shown.append(("moves", ", ".join(moves) or NOTHING))
    print_fields(shown)
    say("body")
    say(block(pretty_body(task)))
    if task.error:
        say("error", fg="red")
        say(block(task.error))
    if attempts:
        say("failed attempts")
        rows: list[list[Cell]] = [
            [str(one.number), show_instant(one.ended), one.worker or NOTHING, reason(one.error)] for one in attempts
        ]
        print_table(["attempt", "ended", "worker", "error"], rows)


# -- moves ----------------------------------------------------------------------------------------


@click.command(epilog=EXIT_CODES)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@_TAG_OF_KEY
@_KEY
@pass_cli
def cancel(cli: Cli, ids: tuple[str, ...], tag: str | None, key: str | None) -> None:
    """Cancel tasks that wait: by their ids, or by tag and key.

    \b
    delaytasks cancel 2305843009213693952 2305843009213693953
    delaytasks cancel --tag order.close --key order-7

    A task that was cancelled before, named by its id, stays so, which is no error.
    """
    delays = cli.delays
    cancelled: list[str] = []
    unchanged: list[str] = []

    def cancel_one(id: int) -> None:
        is_new = delays.cancel(id)
        (cancelled if is_new else unchanged).append(str(id))
        if not cli.is_json:
            say(f"cancelled task {id}" if is_new else f"task {id} was cancelled before")

    if key is not None or tag is not None:
        if ids:
            raise click.UsageError("Give ids, or --tag and --key.")
        ids = (str(delays.get(tag=tag, key=key).id),)
    _each(cli, ids, cancel_one, lambda: {"cancelled": cancelled, "unchanged": unchanged})


@click.command(epilog=EXIT_CODES)
@click.argument("id", required=False)
@delay_option
@at_option
@click.option("--version", type=int, help="Only if nobody moved it since it had this version.")
@_TAG_OF_KEY
@_KEY
@pass_cli
def reschedule(
    cli: Cli,
    id: str | None,
    delay: timedelta | None,
    when: datetime | None,
    version: int | None,
    tag: str | None,
    key: str | None,
) -> None:
    """Give a task that waits another time.

    \b
    delaytasks reschedule 2305843009213693952 --delay 2h
    """
    if (delay is None) == (when is None):
        raise click.UsageError("Give --delay or --at, one of the two.")
    delays = cli.delays
    task = delays.reschedule(id, delay, when=when, version=version, tag=tag, key=key)
    if cli.is_json:
        print_json(task_json(task))
        return
    say(sentence(task, "rescheduled", delays.clock.now()))
    cli.note_broker_away()


@click.command(epilog=EXIT_CODES)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@delay_option
@_TAG_OF_KEY
@click.option("--key", "keys", multiple=True, help="With --tag: the task that has this key; as often as you like.")
@pass_cli
def touch(cli: Cli, ids: tuple[str, ...], delay: timedelta | None, tag: str | None, keys: tuple[str, ...]) -> None:
    """Push timeouts away: by ids, or by tag and keys. No task gets earlier.

    \b
    delaytasks touch 2305843009213693952 2305843009213693953 --delay 2h
    delaytasks touch --tag device.lost --key device-3 --key device-4 --delay 1m
    """
    if delay is None:
        raise click.UsageError("Give --delay.")
    if bool(ids) == bool(keys) or bool(keys) != (tag is not None):
        raise click.UsageError("Give ids, or --tag and --key.")
    delays = cli.delays
    gone: Sequence[Any]
    if tag is None:
        named = [str(check_id(id)) for id in dict.fromkeys(ids)]
        gone = [str(id) for id in delays.touch_many(named, delay)]
    else:
        named, gone = list(dict.fromkeys(keys)), delays.touch_many(tag=tag, keys=keys, delay=delay)
    touched = [name for name in named if name not in gone]
    if cli.is_json:
        print_json({"touched": touched, "gone": gone})
    else:
        say(f"touched {count(len(touched), 'task')}")
        for name in gone:
            cli.note(f"does not wait any more: {name}")
    if gone:
        raise SystemExit(1)


@click.command(epilog=EXIT_CODES)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option("--delay", callback=to_duration, metavar="DURATION", default="0", help="Not at once, but so much later.")
@pass_cli
def retry(cli: Cli, ids: tuple[str, ...], delay: timedelta) -> None:
    """Run FAILED or CANCELLED tasks again.

    \b
    delaytasks retry 2305843009213693952
    """
    delays = cli.delays
    retried: list[DelayTask] = []

    def retry_one(id: int) -> None:
        retried.append(delays.retry(id, delay))
        if not cli.is_json:
            say(sentence(retried[-1], "retried", delays.clock.now()))

    _each(cli, ids, retry_one, lambda: {"retried": [task_json(task) for task in retried]})
    cli.note_broker_away()


def _each(cli: Cli, ids: Sequence[str], move: Callable[[int], None], done: Callable[[], dict[str, Any]]) -> None:
    """The move for every id, whatever becomes of the others; an id that can not be one stops it before anything."""
    if not ids:
        raise click.UsageError("Give an id, or --tag and --key.")
    failures: list[tuple[int, DelayTaskError]] = []
    for id in [check_id(text) for text in ids]:
        try:
            move(id)
        except DelayTaskError as error:
            failures.append((id, error))
            if isinstance(error, StoreError):
                break  # the next one would wait as long, for the same answer
    if cli.is_json:
        failed = [{"id": str(id), "error": str(error), "type": type(error).__name__} for id, error in failures]
        print_json({**done(), "failed": failed})
    if failures:
        if not cli.is_json:
            for _, earlier in failures[:-1]:
                failure_of(earlier, cli.is_json).show()
        raise failures[-1][1]
